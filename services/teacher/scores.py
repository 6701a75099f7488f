"""What an engine answers for one response, and its form on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from preceptor.codec import IDS, CodecError, encode_id_table, encode_ids, encode_logprobs
from preceptor.v1 import teacher_pb2
from services.teacher.bounds import MAX_TEXT_BYTES, cut
from services.teacher.call import Options
from services.teacher.gate import Admitted

# Statuses, identity and framing, generously, of a group and of each of its trajectories.
GROUP_BYTES = 256
TRAJECTORY_BYTES = MAX_TEXT_BYTES + 100


@dataclass(frozen=True)
class Scores:
    """Of one response of n tokens: float32 [n], int32 and float32 [n, top_k], float32 [n, k]."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    named_logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class Failure:
    """The engine raised on this response alone."""

    message: str


Outcome = Scores | Failure


def trajectory_result(trajectory_id: str, outcome: Outcome) -> teacher_pb2.TrajectoryResult:
    """For the wire. A NaN or a value above zero is INTERNAL: such a score is worth nothing."""
    if isinstance(outcome, Failure):
        return _internal(trajectory_id, teacher_pb2.REFUSAL_ENGINE_FAILED, outcome.message)
    try:
        return teacher_pb2.TrajectoryResult(
            trajectory_id=trajectory_id,
            status=teacher_pb2.TRAJECTORY_STATUS_OK,
            logprobs=encode_logprobs(outcome.logprobs),
            top_ids=encode_id_table(outcome.top_ids),
            top_logprobs=encode_logprobs(outcome.top_logprobs),
            named_logprobs=encode_logprobs(outcome.named_logprobs),
        )
    except CodecError as error:
        return _internal(trajectory_id, teacher_pb2.REFUSAL_INVALID_SCORE, str(error))


def group_result(
    group: teacher_pb2.PromptGroup,
    admitted: Admitted,
    outcomes: Sequence[Outcome],
    identity: str,
    options: Options,
) -> teacher_pb2.GroupResult:
    """Outcomes of the admitted responses and refusals of the others, in the request's order."""
    results = dict(admitted.refused)
    for row, outcome in zip(admitted.rows, outcomes, strict=True):
        results[row] = trajectory_result(group.trajectories[row].trajectory_id, outcome)
    return teacher_pb2.GroupResult(
        group_id=group.group_id,
        trajectories=[results[row] for row in range(len(group.trajectories))],
        identity=identity,
        temperature=options.temperature,
        top_k=options.top_k,
        suppressed_ids=encode_ids(options.suppressed_ids),
    )


def reply_bytes(group: teacher_pb2.PromptGroup, options: Options) -> int:
    """Upper bound of the size of a group's result, before anything is computed."""
    return sum(
        len(one.response_ids) * (1 + 2 * options.top_k)
        + len(one.named_ids)
        + len(one.trajectory_id.encode())
        + TRAJECTORY_BYTES
        for one in group.trajectories
    ) + (len(group.group_id.encode()) + IDS.itemsize * len(options.suppressed_ids) + GROUP_BYTES)


def _internal(
    trajectory_id: str, refusal: teacher_pb2.Refusal, message: str
) -> teacher_pb2.TrajectoryResult:
    return teacher_pb2.TrajectoryResult(
        trajectory_id=trajectory_id,
        status=teacher_pb2.TRAJECTORY_STATUS_INTERNAL,
        refusal=refusal,
        message=cut(message),
    )
