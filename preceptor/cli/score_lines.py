"""The lines that `preceptor score` reads and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preceptor.codec import CodecError, Score, TeacherRefusal, prompt_group
from preceptor.v1 import teacher_pb2

_KEYS = {"id", "prompt_ids", "responses", "response_ids", "images"}


@dataclass(frozen=True)
class Item:
    """A line to score.

    Attributes:
        id: the caller's, or the line's number.
        group: what to send, named by the line's number.
        tokens: of prompt and responses.
        end: bytes of the file up to the end of this line.
    """

    id: Any
    group: teacher_pb2.PromptGroup
    tokens: int
    end: int


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be scored; see Item for `end`."""

    line: int
    error: str
    end: int


class _LineError(ValueError):
    """What is wrong with a line."""


def read_items(file: Path) -> Iterator[Item | BadLine]:
    """The file's lines, one at a time; empty ones are passed over."""
    end = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            end += len(line)
            if not line.strip():
                continue
            try:
                yield _read(line, number, end, file.parent)
            except (_LineError, CodecError) as error:
                yield BadLine(number, str(error), end)


def scored(item: Item, results: Sequence[Score | TeacherRefusal]) -> tuple[dict[str, Any], bool]:
    """The line to write, and whether every response was scored."""
    complete = all(isinstance(result, Score) for result in results)
    return {"id": item.id, "responses": [_response(result) for result in results]}, complete


def refused(bad: BadLine) -> dict[str, Any]:
    """The line to write for a bad one, so that lines out match lines in."""
    return {"line": bad.line, "error": bad.error}


def _read(line: bytes, number: int, end: int, folder: Path) -> Item:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise _LineError("no JSON object")
    if unknown := sorted(set(row) - _KEYS):
        raise _LineError(f"unknown keys {unknown}; known are {sorted(_KEYS)}")
    if "prompt_ids" not in row or ("responses" in row) == ("response_ids" in row):
        raise _LineError('needs "prompt_ids" and either "responses" or "response_ids"')
    prompt = _ids(row["prompt_ids"], "prompt_ids")
    if "responses" in row:
        if not isinstance(row["responses"], list) or not row["responses"]:
            raise _LineError('"responses" is no list of lists of ids')
        responses = [_ids(one, f"responses[{index}]") for index, one in enumerate(row["responses"])]
    else:
        responses = [_ids(row["response_ids"], "response_ids")]
    images = row.get("images", [])
    if not isinstance(images, list):
        raise _LineError('"images" is no list of paths')
    return Item(
        id=_writable(row.get("id", number)),
        group=prompt_group(str(number), prompt, responses, [_image(folder, one) for one in images]),
        tokens=len(prompt) + sum(map(len, responses)),
        end=end,
    )


def _writable(name: object) -> object:
    """Python reads NaN and 1e999, which are no JSON, and could not write them again."""
    try:
        json.dumps(name, allow_nan=False)
    except ValueError as error:
        raise _LineError(f'"id" is no JSON: {error}') from error
    return name


def _ids(value: object, name: str) -> list[int]:
    # Booleans are ints in Python, and numpy would take them silently.
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise _LineError(f'"{name}" is no list of token ids')
    return value


def _image(folder: Path, name: object) -> bytes:
    if not isinstance(name, str):
        raise _LineError(f'"images" holds {name!r}, not a path')
    try:
        return (folder / name).read_bytes()
    except (OSError, ValueError) as error:
        # ValueError: a name that no file can have.
        reason = getattr(error, "strerror", None) or error
        raise _LineError(f"cannot read the image {str(folder / name)!r}: {reason}") from error


def _response(result: Score | TeacherRefusal) -> dict[str, Any]:
    if isinstance(result, TeacherRefusal):
        return {
            "status": teacher_pb2.TrajectoryStatus.Name(result.status),
            "refusal": teacher_pb2.Refusal.Name(result.refusal),
            "message": str(result),
        }
    row: dict[str, Any] = {"logprobs": [_json(value) for value in result.logprobs]}
    if result.top_ids.shape[1]:
        row["top_ids"] = result.top_ids.tolist()
        row["top_logprobs"] = [[_json(value) for value in each] for each in result.top_logprobs]
    return row


def _json(value: np.float32) -> float | str:
    # The shortest decimal that is this float32: 1.1 and not 1.100000023841858. JSON knows no
    # infinities; float() reads the word back.
    return float(str(value)) if np.isfinite(value) else "-inf"
