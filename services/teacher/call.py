"""What concerns a call as a whole: its options and its names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from preceptor.codec import CodecError, decode_ids
from preceptor.v1 import teacher_pb2
from services.teacher.bounds import MAX_NAME_BYTES, shown

# Placeholders and the padding of an embedding; not half a vocabulary.
MAX_SUPPRESSED_IDS = 4096


class InvalidCall(ValueError):
    """Options or names that cannot be honoured: the whole call is INVALID_ARGUMENT."""


@dataclass(frozen=True)
class Options:
    """What is computed. Work with equal options can share a batch.

    Attributes:
        suppressed_ids: ascending, each once; they leave the distribution.
    """

    temperature: float
    top_k: int
    suppressed_ids: tuple[int, ...] = ()


def read_options(options: teacher_pb2.ScoreOptions, card: teacher_pb2.TeacherCard) -> Options:
    """Options with defaults applied.

    Raises:
        InvalidCall: a temperature that is no positive number, a top_k beyond the limit,
            suppressed ids that are none, too many, or all.
    """
    temperature = options.temperature if options.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidCall(f"temperature {temperature} is not a positive finite number")
    suppressed = _read_suppressed(options.suppressed_ids, card.embedding_rows)
    left = card.embedding_rows - len(suppressed)
    if options.top_k > min(card.limits.max_top_k, left):
        raise InvalidCall(
            f"top_k {options.top_k} exceeds this teacher's limit of {card.limits.max_top_k} "
            f"(teacher.max_top_k) or the {left} ids that are not suppressed"
        )
    return Options(temperature, options.top_k, suppressed)


def _read_suppressed(data: bytes, rows: int) -> tuple[int, ...]:
    """Ascending, each once."""
    try:
        ids = np.unique(decode_ids(data))
    except CodecError as error:
        raise InvalidCall(f"suppressed_ids: {error}") from error
    outside = ids[(ids < 0) | (ids >= rows)]
    if outside.size:
        raise InvalidCall(
            f"suppressed_ids has id {outside[0]}; this teacher's ids lie in [0, {rows})"
        )
    if len(ids) == rows:
        raise InvalidCall(f"suppressed_ids names all {rows} ids; nothing is left to score")
    if len(ids) > MAX_SUPPRESSED_IDS:
        raise InvalidCall(
            f"suppressed_ids names {len(ids)} ids, the limit is {MAX_SUPPRESSED_IDS}: they are "
            "echoed with every group"
        )
    return tuple(ids.tolist())


def check_names(request: teacher_pb2.ScoreRequest) -> None:
    """What is echoed and logged is short.

    Raises:
        InvalidCall: a name of more than MAX_NAME_BYTES.
    """
    _check_name("student", request.student)
    for group in request.groups:
        _check_name("group_id", group.group_id)
        for trajectory in group.trajectories:
            _check_name("trajectory_id", trajectory.trajectory_id)


def _check_name(field: str, name: str) -> None:
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise InvalidCall(f"{field} {shown(name)} has {size} bytes, the limit is {MAX_NAME_BYTES}")
