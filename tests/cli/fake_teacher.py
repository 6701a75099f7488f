"""A teacher without a model in this process: the logprob of id i is -i / 10."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np

from preceptor.codec import decode_ids, encode_id_table, encode_logprobs
from preceptor.v1 import teacher_pb2, teacher_pb2_grpc

# Its logprob is minus infinity; the other one is refused.
IMPOSSIBLE, REFUSED = 500, 666


class Teacher(teacher_pb2_grpc.TeacherServiceServicer):
    """Keeps the requests it got."""

    def __init__(self) -> None:
        self.requests: list[teacher_pb2.ScoreRequest] = []

    def Describe(self, request, context):
        return teacher_pb2.DescribeResponse(card=teacher_pb2.TeacherCard(identity="t"))

    def ScoreStream(self, request, context):
        self.requests.append(request)
        top_k = request.options.top_k
        for group in request.groups:
            yield teacher_pb2.GroupResult(
                group_id=group.group_id,
                identity="t",
                temperature=request.options.temperature or 1.0,
                top_k=top_k,
                suppressed_ids=request.options.suppressed_ids,
                trajectories=[_score(one, top_k) for one in group.trajectories],
            )


def _score(trajectory: teacher_pb2.Trajectory, top_k: int) -> teacher_pb2.TrajectoryResult:
    ids = decode_ids(trajectory.response_ids)
    if REFUSED in ids:
        return teacher_pb2.TrajectoryResult(
            trajectory_id=trajectory.trajectory_id,
            status=teacher_pb2.TRAJECTORY_STATUS_INVALID_ARGUMENT,
            refusal=teacher_pb2.REFUSAL_ID_OUT_OF_RANGE,
            message="id 666 is beyond the embedding's 600 rows",
        )
    top = np.tile(np.arange(top_k), (len(ids), 1))
    return teacher_pb2.TrajectoryResult(
        trajectory_id=trajectory.trajectory_id,
        status=teacher_pb2.TRAJECTORY_STATUS_OK,
        logprobs=encode_logprobs(np.where(ids == IMPOSSIBLE, -np.inf, -ids / 10)),
        top_ids=encode_id_table(top),
        top_logprobs=encode_logprobs(-top / 10),
    )


@contextmanager
def serving(teacher: Teacher) -> Iterator[str]:
    """Its address, for as long as the context lasts."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        teacher_pb2_grpc.add_TeacherServiceServicer_to_server(teacher, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
