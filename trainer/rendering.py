"""The one place where a prompt is rendered to token ids.

Rendering happens here, once: workers and teacher see ids only, so no template is applied twice and
no BOS doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from modeling.images import expand_placeholders
from modeling.load import LoadedModel
from trainer.sources import DataError

IMAGE = "<image>"
# A message's text that no template writes by itself.
PROBE = "preceptor probe"

Message = dict[str, Any]


class Renderer:
    """Turns prompts, text or chat messages, into a student's token ids."""

    def __init__(self, student: LoadedModel) -> None:
        """Args: student: its tokenizer and chat template."""
        self._tokenizer, self._model_id = student.tokenizer, student.model_id
        self._bos, self._placeholder = student.bos_id, student.image_placeholder_id
        self._token: str | None = None
        if self._placeholder is not None:
            self._token = str(self._tokenizer.convert_ids_to_tokens(self._placeholder))

    def text_ids(self, prompt: Any) -> list[int]:
        """One placeholder id an image; special tokens added exactly once.

        Args:
            prompt: text with one <image> an image, tokenized as it stands; or chat messages
                {"role": ..., "content": ...} for the template, each content such a text or a
                list of parts {"type": "text", "text": ...} and {"type": "image"}.

        Raises:
            DataError: neither of them, messages for a tokenizer without a template, or messages
                that the template refuses.
        """
        if isinstance(prompt, str):
            return list(self._tokenizer(self._marked(prompt))["input_ids"])
        if not isinstance(prompt, list):
            raise DataError(f"a prompt is text or chat messages, not {type(prompt).__name__}")
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"the prompt is chat messages, but the tokenizer of {self._model_id} has no chat "
                "template; give text, or put a chat_template.jinja into its folder"
            )
        messages = [self._message(one) for one in prompt]
        if not messages:
            raise DataError("the prompt is empty")
        # The template writes the special tokens itself.
        rendered = self._marked(self._apply(messages))
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def images_in(self, text_ids: Sequence[int]) -> int:
        """How many images a rendered text asks for."""
        return 0 if self._placeholder is None else text_ids.count(self._placeholder)

    def expand(self, text_ids: Sequence[int], feature_counts: Sequence[int]) -> NDArray[np.int32]:
        """Text ids to int32 [tokens], with as many placeholders as each image has features.

        Raises:
            DataError: an empty prompt, or one that starts with two BOS.
            modeling.images.ImageError: another number of placeholders than images.
        """
        ids = np.asarray(text_ids, dtype=np.int32)
        if self._placeholder is not None:
            ids = expand_placeholders(ids, feature_counts, self._placeholder)
        if ids.size == 0:
            raise DataError("the prompt is empty")
        if self._bos is not None and ids[:2].tolist() == [self._bos, self._bos]:
            raise DataError("the prompt starts with two BOS; the tokenizer adds its own")
        return ids

    def _message(self, message: Any) -> Message:
        """A message in the form the template takes."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"a chat message has role and content, this is {message!r:.80}")
        text = _marked_text(message.get("content"))
        has_images = self._token is not None and IMAGE in text
        as_parts = self._takes_parts and (has_images or not self._takes_text)
        if not as_parts and not self._takes_text:
            raise DataError(
                f"the chat template of {self._model_id} writes neither text nor parts of a message "
                "as they stand; give the prompt as text"
            )
        # Parquet writes None for what other messages have.
        others = {key: value for key, value in message.items() if value is not None}
        return {**others, "content": _parts(text) if as_parts else text}

    # Some templates leave out content that is text, without a word; others print a list of parts
    # as Python would. Trying it out is the only way to know.
    @cached_property
    def _takes_text(self) -> bool:
        return self._writes(PROBE, images=0)

    @cached_property
    def _takes_parts(self) -> bool:
        images = 0 if self._token is None else 1
        return self._writes(_parts(PROBE + IMAGE * images), images)

    def _writes(self, content: Any, images: int) -> bool:
        """Whether the template writes a message of this content, and its placeholders."""
        try:
            rendered = self._apply([{"role": "user", "content": content}])
        except DataError:
            return False
        counts = self._token is None or rendered.count(self._token) == images
        return PROBE in rendered and "'type'" not in rendered and counts

    def _apply(self, messages: list[Message]) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return str(rendered)

    def _marked(self, text: str) -> str:
        return text if self._token is None else text.replace(IMAGE, self._token)


def _marked_text(content: Any) -> str:
    """A message's content as one text, with <image> where an image stands."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"a message's content is text or a list of parts, not {type(content).__name__}"
        )
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        # Parquet gives all parts the same keys.
        kind, held = (
            part.get("type"),
            [key for key, value in part.items() if value not in (None, "")],
        )
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if kind == "image" and held == ["type"]:
            return IMAGE
    raise DataError(
        f'a part is {{"type": "text", "text": ...}} or {{"type": "image"}}, with the image itself '
        f"in the column `images`; this is {part!r:.80}"
    )


def _parts(text: str) -> list[dict[str, str]]:
    """The parts of a text: images where <image> stands, and what lies between."""
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(IMAGE)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts
