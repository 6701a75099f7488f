"""Rows of a data set to rendered prompts, and which of them a step trains on."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modeling.images import decode_image, feature_count
from modeling.load import LoadedModel
from trainer.rendering import IMAGE, Renderer
from trainer.rewards import Reward, RewardError
from trainer.sources import DataError, read_rows


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        ids: int32 [tokens], image placeholders expanded.
        images: encoded, in the order of their placeholders.
        answer: ground truth for the verifiable reward; None where the source has none.
        tag: names a part of the data that evaluation reports on its own; may be empty.
        teacher_ids: int32 [tokens], what the teacher sees instead of `ids`; None: the same.
        teacher_images: those of teacher_ids: all of `images`, or none.
        teacher: names the teacher whose statistics this prompt's tokens belong to; may be empty.
    """

    ids: NDArray[np.int32]
    images: tuple[bytes, ...]
    answer: str | None
    tag: str
    teacher_ids: NDArray[np.int32] | None = None
    teacher_images: tuple[bytes, ...] = ()
    teacher: str = ""


def read_prompts(source: str | Path, student: LoadedModel) -> list[Prompt]:
    """Read and render a data source. Columns, all but the first optional:

    `prompt`: text with one <image> an image, or chat messages for the student's template, their
        contents such texts or lists of parts; see Renderer.text_ids.
    `images`: a list, each bytes, a base64 string prefixed "base64:", a path relative to the
        source's folder, or {"bytes": ...} / {"path": ...}.
    `answer`: text or a number, 3.0 as "3"; a list of one stands for its element. Without it the
        `ground_truth` of `reward_model`, as verl lays it out.
    `tag`: without it `data_source`, as verl lays it out.
    `teacher_prompt`: what the teacher sees instead of `prompt` (privileged context), in the same
        formats, rendered by the student's tokenizer and template. It shows all images of the row or
        none of them.
    `teacher`: a name.

    Args:
        source: see trainer.sources.read_rows.
        student: its tokenizer, template and image features.

    Raises:
        DataError: unreadable source, or the first bad row by its number and reason.
    """
    rows, folder = read_rows(str(source))
    if not rows:
        raise DataError(f"{source} holds no prompts")
    renderer = Renderer(student)
    prompts = []
    for number, row in enumerate(rows, start=1):
        try:
            prompts.append(_prompt(row, folder, student, renderer))
        except (ValueError, OSError) as error:
            raise DataError(f"{source}, row {number}: {error}") from error
    return prompts


def check_answers(
    name: str, prompts: Sequence[Prompt], reward: Reward, *, required: bool = False
) -> None:
    """Find out now, not at the first grading, that an answer cannot be graded.

    Args:
        name: of the source, for the message.
        prompts: its rows, all of them.
        reward: what will grade them.
        required: whether every prompt needs an answer, as in evaluation.

    Raises:
        DataError: naming the first such row.
    """
    for row, prompt in enumerate(prompts, start=1):
        if prompt.answer is None:
            if required:
                raise DataError(f"{name}, row {row}: no answer to grade by")
            continue
        try:
            reward.check(prompt.answer)
        except RewardError as error:
            raise DataError(f"{name}, row {row}: {error}") from error


def fitting(
    name: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    limit: int,
    overlong: Literal["error", "drop"],
) -> tuple[list[Prompt], int]:
    """The prompts that leave room for a response, in their order.

    Args:
        name: of the setting that names the source, for the message.
        prompts: its rows, all of them.
        max_new_tokens: longest response.
        limit: longest prompt + response that student and teacher take; the teacher's own prompt
            counts too.
        overlong: trainer.data.overlong.

    Returns:
        Them, and how many were dropped.

    Raises:
        DataError: naming the row that is too long, or that all are.
    """
    kept = []
    for row, prompt in enumerate(prompts, start=1):
        if prompt.teacher_ids is not None and len(prompt.teacher_ids) > len(prompt.ids):
            what, tokens = "teacher prompt", len(prompt.teacher_ids)
        else:
            what, tokens = "prompt", len(prompt.ids)
        if tokens + max_new_tokens <= limit:
            kept.append(prompt)
        elif overlong == "error":
            raise DataError(
                f"{name}, row {row}: a {what} of {tokens} tokens and trainer.max_new_tokens "
                f"{max_new_tokens} exceed the {limit} tokens that student and teacher take; "
                "shorten one or the other, or set trainer.data.overlong to drop"
            )
    if prompts and not kept:
        raise DataError(
            f"{name}: all {len(prompts)} prompts are too long: with trainer.max_new_tokens "
            f"{max_new_tokens} they exceed the {limit} tokens that student and teacher take"
        )
    return kept, len(prompts) - len(kept)


def training_indices(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Which prompts a step trains on: a pure function of its number, so the step is the cursor.

    Each epoch is a permutation of its own; a batch may span two epochs.
    """
    indices = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, offset = divmod(position, count)
        indices.append(int(_permutation(count, epoch, seed)[offset]))
    return indices


def _permutation(count: int, epoch: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _prompt(row: Any, folder: Path, student: LoadedModel, renderer: Renderer) -> Prompt:
    if not isinstance(row, dict):
        raise DataError(f"a row is a mapping, not {type(row).__name__}")
    if "prompt" not in row:
        raise DataError(f"no column `prompt`, found {sorted(row)}")
    images = _images(row, folder)
    if images and student.image_placeholder_id is None:
        raise DataError(f"{len(images)} images for a text-only student")
    text_ids = renderer.text_ids(row["prompt"])
    found = renderer.images_in(text_ids)
    if found != len(images):
        raise DataError(f"{len(images)} images but {found} {IMAGE} in the prompt")
    counts = [feature_count(student, decode_image(image)) for image in images]
    teacher_ids, teacher_images = _teacher_prompt(row, images, counts, renderer)
    return Prompt(
        ids=renderer.expand(text_ids, counts),
        images=images,
        answer=_answer(row),
        tag=str(row.get("tag") or row.get("data_source") or ""),
        teacher_ids=teacher_ids,
        teacher_images=teacher_images,
        teacher=_teacher(row),
    )


def _images(row: dict[str, Any], folder: Path) -> tuple[bytes, ...]:
    given = row.get("images") or []
    if not isinstance(given, list):
        raise DataError(f"images are a list, not {type(given).__name__}")
    return tuple(_image_bytes(one, folder) for one in given)


def _image_bytes(image: Any, folder: Path) -> bytes:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if isinstance(image, str) and image.startswith("base64:"):
        return base64.b64decode(image.removeprefix("base64:"), validate=True)
    if isinstance(image, str):
        return (folder / image).read_bytes()
    raise DataError(f"an image must be bytes, a path or base64:..., not {type(image).__name__}")


def _teacher_prompt(
    row: dict[str, Any], images: tuple[bytes, ...], counts: Sequence[int], renderer: Renderer
) -> tuple[NDArray[np.int32] | None, tuple[bytes, ...]]:
    """Its ids, and the images among `images` that it shows; None: the teacher sees `prompt`."""
    if row.get("teacher_prompt") is None:
        return None, ()
    try:
        text_ids = renderer.text_ids(row["teacher_prompt"])
        found = renderer.images_in(text_ids)
        if found not in (0, len(images)):
            raise DataError(f"{len(images)} images but {found} {IMAGE}; it shows all or none")
        return renderer.expand(text_ids, counts if found else []), images if found else ()
    except DataError as error:
        raise DataError(f"teacher_prompt: {error}") from error


def _teacher(row: dict[str, Any]) -> str:
    name = row.get("teacher")
    if name is None:
        return ""
    if not isinstance(name, str):
        raise DataError(f"teacher is a name, not {name!r}")
    return name


def _answer(row: dict[str, Any]) -> str | None:
    graded_by = row.get("reward_model")
    if not isinstance(graded_by, dict | None):
        raise DataError(f"reward_model is a mapping, not {type(graded_by).__name__}")
    given = {
        "answer": row.get("answer"),
        "reward_model.ground_truth": (graded_by or {}).get("ground_truth"),
    }
    texts = {name: _answer_text(name, one) for name, one in given.items() if one is not None}
    if len({text.strip() for text in texts.values()}) > 1:
        named = " and ".join(f"{name} {text!r}" for name, text in texts.items())
        raise DataError(f"{named} contradict each other; keep one")
    return next(iter(texts.values()), None)


def _answer_text(name: str, value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        # A column of integers with gaps is often stored as floats.
        return str(int(value) if float(value).is_integer() else value)
    raise DataError(f"{name} is one text or finite number, not {value!r:.80}")
