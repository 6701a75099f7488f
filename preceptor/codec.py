"""Arrays <-> bytes, and the only place where a reply becomes numbers.

Little-endian, contiguous, no per-element Python: a response of 10,000 tokens costs one memcpy.
Validity is a status or an exception, never a number: 0.0 is a legal logprob.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from preceptor.v1 import common_pb2, teacher_pb2

IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")
MASK = np.dtype("u1")

# Log-softmax in float32 may round a certain token's logprob to just above zero. More is an error.
LOGPROB_ROUNDING = 1e-5


class CodecError(ValueError):
    """Bytes or values that the contract does not allow."""


class TeacherRefusal(CodecError):
    """The teacher did not score a trajectory.

    Attributes:
        status: teacher_pb2.TrajectoryStatus.
        refusal: teacher_pb2.Refusal.
    """

    def __init__(self, result: teacher_pb2.TrajectoryResult) -> None:
        self.status = result.status
        self.refusal = result.refusal
        status = teacher_pb2.TrajectoryStatus.Name(result.status)
        reason = teacher_pb2.Refusal.Name(result.refusal)
        super().__init__(
            f"trajectory {result.trajectory_id!r} was not scored: {status}, {reason}: "
            f"{result.message}"
        )


def encode_ids(ids: ArrayLike) -> bytes:
    """Token ids [n] as int32 bytes.

    Raises:
        CodecError: no one-dimensional array, not integers, negative, or beyond int32 (2^31 and more
            never reach the wire).
    """
    return _encode_ids(_array(ids, 1, "token ids"))


def encode_id_table(ids: ArrayLike) -> bytes:
    """Token ids [n, k], such as named_ids, as int32 bytes, row after row.

    Raises:
        CodecError: as encode_ids, of two dimensions.
    """
    return _encode_ids(_array(ids, 2, "token ids"))


def encode_id_set(ids: ArrayLike) -> bytes:
    """Token ids [n] as int32 bytes, ascending, each once: equal sets are equal bytes.

    Raises:
        CodecError: as encode_ids.
    """
    return np.unique(decode_ids(encode_ids(ids))).tobytes()


def _array(values: ArrayLike, dimensions: int, what: str) -> NDArray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise CodecError(f"{what} are no array: {error}") from error
    if array.ndim != dimensions:
        raise CodecError(
            f"{what} must have {dimensions} dimension{'s' * (dimensions > 1)}, found "
            f"{array.ndim} (shape {array.shape})"
        )
    return array


def _encode_ids(array: NDArray) -> bytes:
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise CodecError(f"token ids must be integers that fit int64, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise CodecError(
            f"token ids must lie in [0, 2^31 - 1], found {low if low < 0 else high}; "
            "check the tokenizer that made them"
        )
    return np.ascontiguousarray(array, dtype=IDS).tobytes()


def decode_ids(data: bytes) -> NDArray[np.int32]:
    """int32 bytes as a read-only array, any shape flattened; signs and ranges are not checked.

    Raises:
        CodecError: the length is no multiple of 4.
    """
    return _decode(data, IDS, "int32 ids")


def decode_id_table(data: bytes, rows: int, columns: int) -> NDArray[np.int32]:
    """int32 bytes as a read-only array [rows, columns].

    Raises:
        CodecError: another number of values.
    """
    array = decode_ids(data)
    if array.size != rows * columns:
        raise CodecError(f"{array.size} named ids for {rows} tokens with {columns} each")
    return array.reshape(rows, columns)


def encode_logprobs(logprobs: ArrayLike) -> bytes:
    """Logprobs (nats) as float32 bytes.

    Raises:
        CodecError: a NaN or a value above zero. -inf is legal.
    """
    array = np.ascontiguousarray(logprobs, dtype=LOGPROBS)
    check_logprobs(array)
    return array.tobytes()


def decode_logprobs(data: bytes, count: int) -> NDArray[np.float32]:
    """float32 bytes as a read-only array of exactly `count` values.

    Raises:
        CodecError: another number of values, a NaN, or a value above zero.
    """
    array = _decode(data, LOGPROBS, "float32 logprobs")
    if array.size != count:
        raise CodecError(f"{array.size} logprobs for {count} tokens; nothing is padded")
    check_logprobs(array)
    return array


def check_logprobs(logprobs: NDArray[np.floating]) -> None:
    """Raise CodecError where a value is NaN or above zero (beyond float32 rounding)."""
    bad = np.isnan(logprobs) | (logprobs > LOGPROB_ROUNDING)
    if bad.any():
        at = int(np.flatnonzero(bad.ravel())[0])
        value = logprobs.ravel()[at]
        raise CodecError(f"logprob {value} at position {at} is no logprob (NaN or above 0)")


def encode_mask(mask: ArrayLike) -> bytes:
    """A 0/1 mask as uint8 bytes.

    Raises:
        CodecError: no one-dimensional array, or a value other than 0 and 1.
    """
    array = _array(mask, 1, "mask values")
    if array.size and not np.isin(array, (0, 1)).all():
        raise CodecError("a mask holds only 0 and 1")
    return np.ascontiguousarray(array, dtype=MASK).tobytes()


def decode_mask(data: bytes, count: int) -> NDArray[np.uint8]:
    """uint8 bytes as a read-only array of `count` values; empty bytes mean all ones.

    Raises:
        CodecError: another number of values, or a value other than 0 and 1.
    """
    if not data:
        return np.ones(count, dtype=MASK)
    array = _decode(data, MASK, "uint8 mask")
    if array.size != count:
        raise CodecError(f"a mask of {array.size} values for {count} tokens")
    if array.max(initial=0) > 1:
        raise CodecError(f"a mask holds only 0 and 1, found {array.max()}")
    return array


def _decode(data: bytes, dtype: np.dtype, what: str) -> NDArray:
    if len(data) % dtype.itemsize:
        raise CodecError(f"{len(data)} bytes are no array of {what}")
    return np.frombuffer(data, dtype=dtype)


def image_message(data: bytes) -> common_pb2.Image:
    """An encoded image with its hash."""
    return common_pb2.Image(data=data, sha256=hashlib.sha256(data).digest())


def prompt_message(ids: ArrayLike, images: Iterable[bytes] = ()) -> common_pb2.Prompt:
    """A prompt: ids with placeholders expanded, images encoded.

    Raises:
        CodecError: no ids, or ids that encode_ids refuses.
    """
    data = encode_ids(ids)
    if not data:
        raise CodecError("a prompt is never empty: a first token has no logprob without one")
    return common_pb2.Prompt(token_ids=data, images=[image_message(image) for image in images])


def prompt_group(
    group_id: str,
    prompt_ids: ArrayLike,
    responses: Sequence[ArrayLike],
    images: Iterable[bytes] = (),
    loss_masks: Sequence[ArrayLike] | None = None,
) -> teacher_pb2.PromptGroup:
    """A prompt group as the teacher wants it; trajectories are named "0", "1", ... in order.

    Args:
        group_id: unique within a request.
        prompt_ids: int [prompt_tokens], image placeholders expanded.
        responses: each int [tokens], EOS included where the student wrote one.
        images: encoded, in the order of their placeholders.
        loss_masks: each 0/1 [tokens]; None: everything was written by the student.

    Raises:
        CodecError: ids or masks the wire does not allow, such as one flat list of ids for
            `responses`, or a mask of another length than its response.
    """
    if loss_masks is not None and len(loss_masks) != len(responses):
        raise CodecError(f"{len(loss_masks)} loss_masks for {len(responses)} responses")
    trajectories = []
    for index, response in enumerate(responses):
        ids = _encode_ids(_array(response, 1, f"response {index}: token ids"))
        mask = b"" if loss_masks is None else encode_mask(loss_masks[index])
        count = len(ids) // IDS.itemsize
        if loss_masks is not None and len(mask) != count:
            raise CodecError(f"response {index}: a mask of {len(mask)} values for {count} tokens")
        trajectories.append(
            teacher_pb2.Trajectory(trajectory_id=str(index), response_ids=ids, loss_mask=mask)
        )
    return teacher_pb2.PromptGroup(
        group_id=group_id, prompt=prompt_message(prompt_ids, images), trajectories=trajectories
    )


@dataclass(frozen=True)
class Score:
    """What the teacher thought of one trajectory of n tokens.

    Attributes:
        logprobs: float32 [n], nats.
        top_ids, top_logprobs: int32 and float32 [n, top_k]; top_k may be 0.
        named_logprobs: float32 [n, k], the logprobs of the ids the caller named; k may be 0.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    named_logprobs: NDArray[np.float32]


def read_group(
    group: teacher_pb2.PromptGroup, result: teacher_pb2.GroupResult
) -> list[Score | TeacherRefusal]:
    """One entry per trajectory of the group, in its order: a Score, or why there is none.

    Raises:
        CodecError: the reply does not match the request (ids, counts, values).
    """
    if result.group_id != group.group_id:
        raise CodecError(f"asked for group {group.group_id!r}, got {result.group_id!r}")
    if len(result.trajectories) != len(group.trajectories):
        raise CodecError(
            f"group {group.group_id!r}: {len(result.trajectories)} results for "
            f"{len(group.trajectories)} trajectories"
        )
    pairs = zip(group.trajectories, result.trajectories, strict=True)
    return [_read(trajectory, one, result.top_k) for trajectory, one in pairs]


def _read(
    trajectory: teacher_pb2.Trajectory, result: teacher_pb2.TrajectoryResult, top_k: int
) -> Score | TeacherRefusal:
    if result.trajectory_id != trajectory.trajectory_id:
        raise CodecError(
            f"asked for trajectory {trajectory.trajectory_id!r}, got {result.trajectory_id!r}"
        )
    if result.status != teacher_pb2.TRAJECTORY_STATUS_OK:
        return TeacherRefusal(result)
    count = len(trajectory.response_ids) // IDS.itemsize
    top_ids = decode_ids(result.top_ids)
    if top_ids.size != count * top_k:
        raise CodecError(f"{top_ids.size} top ids for {count} tokens and top_k {top_k}")
    named = len(trajectory.named_ids) // IDS.itemsize
    return Score(
        logprobs=decode_logprobs(result.logprobs, count),
        top_ids=top_ids.reshape(count, top_k),
        top_logprobs=decode_logprobs(result.top_logprobs, count * top_k).reshape(count, top_k),
        named_logprobs=decode_logprobs(result.named_logprobs, named).reshape(count, -1)
        if named
        else np.empty((count, 0), dtype=LOGPROBS),
    )
