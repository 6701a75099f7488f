"""Prompt files, and the one place where a prompt is rendered to token ids.

Rendering happens here, once: workers and teacher see ids only, so no template is applied twice and
no BOS doubled.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from modeling.images import decode_image, expand_placeholders, feature_count
from modeling.load import LoadedModel

IMAGE = "<image>"


class DataError(ValueError):
    """A prompt file, or a row of it, that cannot be used."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        ids: int32 [tokens], image placeholders expanded.
        images: encoded, in the order of their placeholders.
        answer: ground truth for the verifiable reward; None where the file has none.
        tag: names a part of the data that evaluation reports on its own; may be empty.
    """

    ids: NDArray[np.int32]
    images: tuple[bytes, ...]
    answer: str | None
    tag: str


def read_prompts(path: Path, student: LoadedModel) -> list[Prompt]:
    """Read and render a prompt file.

    Columns: `prompt`, text with one <image> an image, or a list of chat messages for the student's
    template; `images`, optional, each bytes, a base64 string prefixed "base64:", a path relative to
    the file, or {"bytes": ...} / {"path": ...}; `answer`, optional; `tag`, optional.

    Args:
        path: a .jsonl or .parquet file.
        student: its tokenizer, template and image features.

    Raises:
        DataError: unreadable file, or the first bad row by its number and reason.
    """
    rows = _read_rows(path)
    if not rows:
        raise DataError(f"{path} holds no prompts")
    prompts = []
    for number, row in enumerate(rows, start=1):
        try:
            prompts.append(_render(row, path.parent, student))
        except (ValueError, OSError) as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    return prompts


def check_lengths(name: str, prompts: Sequence[Prompt], max_new_tokens: int, limit: int) -> None:
    """Find out now that a prompt leaves no room for its response.

    Args:
        name: of the setting that names the file, for the message.
        prompts: its rows.
        max_new_tokens: longest response.
        limit: longest prompt + response that student and teacher take.

    Raises:
        DataError: naming the row.
    """
    for row, prompt in enumerate(prompts, start=1):
        if len(prompt.ids) + max_new_tokens > limit:
            raise DataError(
                f"{name}, row {row}: a prompt of {len(prompt.ids)} tokens and trainer."
                f"max_new_tokens {max_new_tokens} exceed the {limit} tokens that student and "
                "teacher take; shorten one or the other"
            )


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


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path).to_pylist()
        if path.suffix == ".jsonl":
            # Not splitlines(): it also cuts at separators that are legal inside JSON strings.
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    raise DataError(f"{path}: prompt files end in .jsonl or .parquet")


def _render(row: dict[str, Any], folder: Path, student: LoadedModel) -> Prompt:
    if not isinstance(row, dict):
        raise DataError(f"a row is a mapping, not {type(row).__name__}")
    if "prompt" not in row:
        raise DataError(f"no column `prompt`, found {sorted(row)}")
    given = row.get("images") or []
    if not isinstance(given, list):
        raise DataError(f"images are a list, not {type(given).__name__}")
    images = tuple(_image_bytes(one, folder) for one in given)
    text_ids = _token_ids(row["prompt"], student)
    placeholder = student.image_placeholder_id
    if placeholder is None:
        if images:
            raise DataError(f"{len(images)} images for a text-only student")
        ids = np.asarray(text_ids, dtype=np.int32)
    else:
        wanted, found = len(images), text_ids.count(placeholder)
        if wanted != found:
            raise DataError(f"{wanted} images but {found} {IMAGE} in the prompt")
        counts = [feature_count(student, decode_image(image)) for image in images]
        ids = expand_placeholders(text_ids, counts, placeholder)
    if ids.size == 0:
        raise DataError("the prompt is empty")
    if student.bos_id is not None and ids[:2].tolist() == [student.bos_id, student.bos_id]:
        raise DataError("the prompt starts with two BOS; the tokenizer adds its own")
    answer = row.get("answer")
    return Prompt(ids, images, None if answer is None else str(answer), str(row.get("tag") or ""))


def _token_ids(prompt: str | list[dict[str, Any]], student: LoadedModel) -> list[int]:
    """One placeholder id an image; special tokens added exactly once."""
    tokenizer = student.tokenizer
    if isinstance(prompt, str):
        if student.image_placeholder_id is not None:
            token = tokenizer.convert_ids_to_tokens(student.image_placeholder_id)
            prompt = prompt.replace(IMAGE, str(token))
        return list(tokenizer(prompt)["input_ids"])
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    if student.image_placeholder_id is not None:
        token = tokenizer.convert_ids_to_tokens(student.image_placeholder_id)
        rendered = str(rendered).replace(IMAGE, str(token))
    # The template writes the special tokens itself.
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


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
