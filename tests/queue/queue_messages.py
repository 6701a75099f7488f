"""Small messages for the queue's tests."""

from __future__ import annotations

from preceptor.queue import Claim
from preceptor.v1 import queue_pb2


def task(slot: int, step: int = 0, payload_bytes: int = 8) -> queue_pb2.PromptTask:
    """A task that its slot tells apart."""
    message = queue_pb2.PromptTask(kind=queue_pb2.TASK_KIND_TRAIN, samples=1)
    message.id.run, message.id.incarnation, message.id.step, message.id.slot = "run", 1, step, slot
    message.prompt.token_ids = b"\1" * payload_bytes
    return message


def group_for(one: queue_pb2.PromptTask) -> queue_pb2.RolloutGroup:
    """What a worker makes of it."""
    return queue_pb2.RolloutGroup(id=one.id, kind=one.kind, prompt=one.prompt, worker="w")


def slots(claims: list[Claim]) -> list[int]:
    """Which tasks these are, or are about."""
    return [claim.message.id.slot for claim in claims]
