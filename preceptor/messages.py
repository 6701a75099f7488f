"""Queue messages as bytes, and what a reader holds of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from preceptor.v1 import queue_pb2

# Stamped on every message written; a reader refuses another one.
SCHEMA_VERSION = 1

M = TypeVar("M", queue_pb2.PromptTask, queue_pb2.RolloutGroup)


class MessageError(ValueError):
    """Bytes that are no message of this kind or schema version."""


@dataclass(frozen=True)
class Claim(Generic[M]):
    """A message handed to this consumer, to be acknowledged once its work is safe.

    Attributes:
        entry_id: Redis' id of the stream entry.
        deliveries: how often Redis handed it out, this time included.
        message: a PromptTask or a RolloutGroup.
    """

    entry_id: str
    deliveries: int
    message: M


def task_key(task: queue_pb2.TaskId, kind: int) -> tuple[str, int, int, int, int]:
    """(run, incarnation, kind, step, slot): equal for the copies of one task, for dict keys.

    With a sample index behind it, it is a rollout id. `kind` is a queue_pb2.TaskKind.
    """
    return task.run, task.incarnation, kind, task.step, task.slot


def pack(message: M) -> bytes:
    """The message as bytes; sets its schema_version."""
    message.schema_version = SCHEMA_VERSION
    return message.SerializeToString()


def unpack(payload: bytes | None, kind: type[M]) -> M:
    """The bytes as a message of `kind`; None stands for an entry without our field.

    Raises:
        MessageError: anything else than such a message of this schema version.
    """
    if payload is None:
        raise MessageError("the entry lacks the field that holds the message")
    try:
        message = kind.FromString(payload)
    except DecodeError as error:
        raise MessageError(f"no {kind.__name__}: {error}") from error
    if message.schema_version != SCHEMA_VERSION:
        raise MessageError(
            f"schema_version {message.schema_version}, this build reads {SCHEMA_VERSION}: "
            "run the same version of Preceptor everywhere"
        )
    return message
