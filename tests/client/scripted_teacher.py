"""A teacher without a model: the logprob of id i is -(i + 1) / 1000. It fails on demand.

`python scripted_teacher.py PORT SECONDS_PER_GROUP` serves one until it is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from preceptor.codec import decode_ids, encode_id_table, encode_logprobs
from preceptor.v1 import teacher_pb2, teacher_pb2_grpc

IDENTITY = "scripted"
# The teacher refuses a trajectory that holds this id.
REFUSED_ID = 666


@dataclass(frozen=True)
class Failure:
    """How a call ends, after it has sent `after` groups."""

    code: grpc.StatusCode
    details: str = "as scripted"
    trailers: tuple[tuple[str, str], ...] = ()
    after: int = 0


@dataclass
class ScriptedTeacher(teacher_pb2_grpc.TeacherServiceServicer):
    """One per test.

    Attributes:
        failures: taken from the front, one a call.
        requests: every ScoreRequest that came in.
        backwards: stream the groups of a request in reverse.
        applied: fields of a result that say something else than the options asked for.
    """

    identity: str = IDENTITY
    max_message_bytes: int = 0
    seconds_per_group: float = 0.0
    backwards: bool = False
    applied: dict[str, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    requests: list[teacher_pb2.ScoreRequest] = field(default_factory=list)

    def Describe(self, request, context):
        if self.failures:
            _fail(context, self.failures.pop(0))
        limits = teacher_pb2.Limits(max_message_bytes=self.max_message_bytes)
        card = teacher_pb2.TeacherCard(identity=self.identity, limits=limits)
        return teacher_pb2.DescribeResponse(card=card)

    def ScoreStream(self, request, context):
        self.requests.append(request)
        failure = self.failures.pop(0) if self.failures else None
        if request.expected_identity not in ("", self.identity):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this is {self.identity}")
        groups = list(request.groups)
        for done, group in enumerate(reversed(groups) if self.backwards else groups):
            if failure is not None and done == failure.after:
                _fail(context, failure)
            time.sleep(self.seconds_per_group)
            result = score_group(group, request.options, self.identity)
            for name, value in self.applied.items():
                setattr(result, name, value)
            yield result
        if failure is not None:
            _fail(context, failure)


def score_group(
    group: teacher_pb2.PromptGroup, options: teacher_pb2.ScoreOptions, identity: str
) -> teacher_pb2.GroupResult:
    return teacher_pb2.GroupResult(
        group_id=group.group_id,
        trajectories=[_score(trajectory, options.top_k) for trajectory in group.trajectories],
        identity=identity,
        temperature=options.temperature if options.HasField("temperature") else 1.0,
        top_k=options.top_k,
        suppressed_ids=options.suppressed_ids,
    )


def _score(trajectory: teacher_pb2.Trajectory, top_k: int) -> teacher_pb2.TrajectoryResult:
    ids = decode_ids(trajectory.response_ids)
    if REFUSED_ID in ids:
        return teacher_pb2.TrajectoryResult(
            trajectory_id=trajectory.trajectory_id,
            status=teacher_pb2.TRAJECTORY_STATUS_INVALID_ARGUMENT,
            refusal=teacher_pb2.REFUSAL_ID_OUT_OF_RANGE,
            message=f"id {REFUSED_ID}",
        )
    top_ids = np.broadcast_to(np.arange(top_k), (len(ids), top_k))
    return teacher_pb2.TrajectoryResult(
        trajectory_id=trajectory.trajectory_id,
        status=teacher_pb2.TRAJECTORY_STATUS_OK,
        logprobs=logprobs_of(ids),
        top_ids=encode_id_table(top_ids),
        top_logprobs=logprobs_of(top_ids),
        named_logprobs=logprobs_of(decode_ids(trajectory.named_ids)),
    )


def logprobs_of(ids: np.ndarray) -> bytes:
    return encode_logprobs(-(ids + 1.0) / 1000.0)


def _fail(context, failure: Failure) -> None:
    context.set_trailing_metadata(failure.trailers)
    context.abort(failure.code, failure.details)


@contextmanager
def serving(teacher: ScriptedTeacher, port: int = 0) -> Iterator[str]:
    """The teacher's address, for as long as the context lasts; it takes messages of any size."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, options=options)
        teacher_pb2_grpc.add_TeacherServiceServicer_to_server(teacher, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


if __name__ == "__main__":
    with serving(ScriptedTeacher(seconds_per_group=float(sys.argv[2])), int(sys.argv[1])):
        print("ready", flush=True)
        time.sleep(600)
