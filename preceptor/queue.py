"""RolloutQueue: prompt tasks out, rollout groups back, over Redis Streams.

Delivery is at least once. What a dead consumer held is delivered again, and a retried write may
leave two entries: the trainer drops duplicates by rollout id (`task_key`). An entry is deleted only
in the transaction that records what became of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import redis
from redis.client import Pipeline

from preceptor import heartbeats
from preceptor.config import RedisSettings, RunConfig
from preceptor.leases import LeaseKeeper
from preceptor.messages import SCHEMA_VERSION, Claim, M, MessageError, pack, task_key, unpack
from preceptor.redis_connection import (
    BLOCK_SLICE_SECONDS,
    Patience,
    QueueError,
    QueueFull,
    QueueUnavailable,
    connect,
)
from preceptor.streams import FIELD, Entry, Stream, Tail, is_group_missing
from preceptor.v1 import queue_pb2

__all__ = [
    "SCHEMA_VERSION",
    "Backlog",
    "Claim",
    "QueueError",
    "QueueFull",
    "QueueUnavailable",
    "RolloutQueue",
    "connect",
    "task_key",
]

# The trainer is one process, and the name outlives it: a restarted trainer finds its claims.
TRAINER = "trainer"
DEFAULTS = RedisSettings()


@dataclass(frozen=True)
class Backlog:
    """Entries by state, counted by us from stream lengths and claims; a missing stream counts 0."""

    tasks_waiting: int
    tasks_running: int
    groups_waiting: int
    groups_held: int
    dead: int


class RolloutQueue:
    """One run's queue. Thread-safe, blocking; every call waits through an outage of Redis.

    Any call raises QueueUnavailable when Redis stays away longer than `retry_seconds`. Calls that
    add (put_tasks, finish_task, dead_letter, beat) raise QueueFull at maxmemory.
    """

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        consumer: str,
        *,
        lease_seconds: float = DEFAULTS.lease_seconds,
        max_deliveries: int = DEFAULTS.max_deliveries,
        retry_seconds: float = DEFAULTS.retry_seconds,
    ) -> None:
        """
        Args:
            client: from `connect`.
            run: name of the run; all its keys are `preceptor:{run}:...` (one cluster slot).
            consumer: this process' name among the claimers of tasks, unique in the run. Groups are
                always claimed under the name "trainer".
            lease_seconds: a task not renewed for this long is handed to another worker.
            max_deliveries: a task handed out more often than this goes to the dead letters.
            retry_seconds: how long a call waits for Redis to come back.

        Raises:
            ValueError: a run name that does not fit a key.
        """
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", run):
            raise ValueError(f"run name {run!r}: use 1-64 letters, digits, '.', '_', '-'")
        self.run = run
        self.consumer = consumer
        self.lease_seconds = lease_seconds
        self.max_deliveries = max_deliveries
        self._redis: Any = client
        self._patience = Patience(client, retry_seconds)
        self._tasks = Stream(client, self._patience, self._key("tasks"), consumer)
        self._groups = Stream(client, self._patience, self._key("groups"), TRAINER)
        self._dead = Tail(client, self._patience, self._key("dead"))
        self._held: set[str] = set()
        self._own_cursor: str | None = "0"
        self._failures_seen = 0

    @classmethod
    def open(cls, config: RunConfig, consumer: str) -> Self:
        """Connect to a run's queue as its settings say."""
        settings = config.redis
        return cls(
            connect(settings.url),
            config.run.name,
            consumer,
            lease_seconds=settings.lease_seconds,
            max_deliveries=settings.max_deliveries,
            retry_seconds=settings.retry_seconds,
        )

    # The trainer's side.

    def put_tasks(self, tasks: Sequence[queue_pb2.PromptTask]) -> None:
        """Add tasks, all or none; stamps their schema_version."""
        if not tasks:
            return
        payloads = [pack(task) for task in tasks]
        # What becomes of these is news, whenever new_dead_letters is first called.
        self._dead.start()

        def write(pipe: Pipeline) -> None:
            for payload in payloads:
                self._tasks.add(pipe, payload)

        self._transact(write)

    def claim_groups(self, count: int, block_seconds: float) -> list[Claim[queue_pb2.RolloutGroup]]:
        """Up to `count` groups; waits up to `block_seconds` for the first.

        What a trainer of this run claimed and never acknowledged comes first: after a restart all
        of it, after an outage whatever a lost reply held. Groups in our hands are not repeated.
        One thread at a time.
        """
        deadline = time.monotonic() + block_seconds
        while True:
            entries = self._lost_groups(count)
            if not entries:
                wait = min(BLOCK_SLICE_SECONDS, deadline - time.monotonic())
                entries = self._groups.read_new(count, wait)
            claims = self._open(self._groups, entries, queue_pb2.RolloutGroup)
            claims = [claim for claim in claims if claim.entry_id not in self._held]
            self._held.update(claim.entry_id for claim in claims)
            if claims or time.monotonic() >= deadline:
                return claims

    def ack_groups(self, claims: Iterable[Claim[queue_pb2.RolloutGroup]]) -> None:
        """The groups' work is safe: acknowledge and delete them in one transaction."""
        entry_ids = [claim.entry_id for claim in claims]
        if entry_ids:
            self._transact(lambda pipe: self._groups.remove(pipe, entry_ids))
            self._held.difference_update(entry_ids)

    def new_dead_letters(self) -> list[queue_pb2.DeadLetter]:
        """Tasks that went to the dead letters since the last call, oldest first.

        The first call reaches back to the first `put_tasks` of this object; without one it finds
        nothing. After Redis was flushed or lost its last writes, old letters may come again.
        """
        letters = [queue_pb2.DeadLetter.FromString(payload) for payload in self._dead.read()]
        return [letter for letter in letters if letter.source_stream == self._tasks.key]

    def clear_tasks(self) -> None:
        """Drop all outstanding tasks, running ones included (a new incarnation starts)."""
        self._transact(self._tasks.recreate)

    def backlog(self) -> Backlog:
        """How much is where, at one moment."""

        def ask() -> list[object]:
            pipe = self._redis.pipeline(transaction=True)
            for stream in (self._tasks, self._groups):
                pipe.xlen(stream.key)
                pipe.xpending(stream.key, stream.group)
            pipe.xlen(self._dead.key)
            return pipe.execute(raise_on_error=False)

        tasks, running, groups, held, dead = map(_count, self._patience.call(ask))
        return Backlog(max(0, tasks - running), running, max(0, groups - held), held, dead)

    # The worker's side.

    def claim_tasks(self, count: int, block_seconds: float) -> list[Claim[queue_pb2.PromptTask]]:
        """Up to `count` tasks, abandoned ones first; waits up to `block_seconds` for the first.

        Tasks delivered too often, and entries nobody can read, go to the dead letters instead.
        """
        deadline = time.monotonic() + block_seconds
        # A lease that runs out while we wait is noticed soon after.
        slice_seconds = min(BLOCK_SLICE_SECONDS, self.lease_seconds / 3)
        while True:
            entries = self._tasks.take_stale(count, self.lease_seconds)
            if len(entries) < count:
                left = 0.0 if entries else min(slice_seconds, deadline - time.monotonic())
                entries += self._tasks.read_new(count - len(entries), left)
            claims = self._open(self._tasks, entries, queue_pb2.PromptTask)
            if claims or time.monotonic() >= deadline:
                return claims

    def renew(
        self, claims: Sequence[Claim[queue_pb2.PromptTask]]
    ) -> list[Claim[queue_pb2.PromptTask]]:
        """Restart the claims' leases; returns those that are still ours.

        One attempt: the next renewal is the retry. Raises QueueUnavailable at once.
        """
        ours = self._tasks.renew([claim.entry_id for claim in claims])
        return [claim for claim in claims if claim.entry_id in ours]

    def leases(self, claims: Sequence[Claim[queue_pb2.PromptTask]]) -> LeaseKeeper:
        """A context in which a thread renews the claims at a third of the lease."""
        return LeaseKeeper(self.renew, self.lease_seconds, claims)

    def finish_task(
        self, claim: Claim[queue_pb2.PromptTask], group: queue_pb2.RolloutGroup
    ) -> None:
        """Add the group and delete its task in one transaction; stamps its schema_version."""
        payload = pack(group)

        def write(pipe: Pipeline) -> None:
            self._groups.add(pipe, payload)
            self._tasks.remove(pipe, [claim.entry_id])

        self._transact(write)

    def release(
        self, claims: Sequence[Claim[queue_pb2.PromptTask]], after_seconds: float = 0.0
    ) -> None:
        """Give tasks back unworked: any worker may take them, at once (a graceful stop) or
        `after_seconds` from now (they cannot be served yet), lease_seconds at most."""
        deliveries = {claim.entry_id: claim.deliveries for claim in claims}
        self._tasks.release(deliveries, max(0.0, self.lease_seconds - after_seconds))

    # Both sides'.

    def dead_letter(self, claim: Claim[M], reason: str) -> None:
        """Move a claimed message, whole, to the dead letters, in one transaction."""
        stream = self._tasks if isinstance(claim.message, queue_pb2.PromptTask) else self._groups
        payload = claim.message.SerializeToString()
        self._bury(stream, Entry(claim.entry_id, claim.deliveries, payload), reason)
        self._held.discard(claim.entry_id)

    def dead_letters(self, count: int = 100) -> list[queue_pb2.DeadLetter]:
        """The oldest `count` dead letters."""
        rows = self._patience.call(lambda: self._redis.xrange(self._dead.key, count=count))
        return [queue_pb2.DeadLetter.FromString(fields[FIELD]) for _, fields in rows]

    def beat(self, kind: str, name: str, info: heartbeats.Info, ttl_seconds: float = 15.0) -> None:
        """Say that `name`, a `kind` of process ("rollout"), lives for `ttl_seconds` from now.

        `info` is what its observers may want to know, as JSON.
        """
        key = self._key(f"beat:{kind}:{name}")
        self._patience.call(lambda: heartbeats.beat(self._redis, key, info, ttl_seconds))

    def heartbeats(self, kind: str) -> dict[str, dict[str, str | int | float]]:
        """Living processes of this kind by name, each with its last `info`."""
        prefix = self._key(f"beat:{kind}:")
        return self._patience.call(lambda: heartbeats.living(self._redis, prefix))

    def _key(self, name: str) -> str:
        return f"preceptor:{{{self.run}}}:{name}"

    def _transact(self, write: Callable[[Pipeline], None]) -> None:
        """Run the commands that `write` queues in one MULTI."""

        def run() -> None:
            pipe = self._redis.pipeline(transaction=True)
            write(pipe)
            pipe.execute()

        self._patience.call(run)

    def _lost_groups(self, count: int) -> list[Entry]:
        """Groups claimed under our name that this process does not know."""
        if self._patience.failures != self._failures_seen:
            self._failures_seen = self._patience.failures
            self._own_cursor = "0"
        lost: list[Entry] = []
        while self._own_cursor is not None and not lost:
            page = self._groups.read_own(self._own_cursor, count)
            self._own_cursor = page[-1].entry_id if page else None
            lost = [entry for entry in page if entry.entry_id not in self._held]
        return lost

    def _open(self, stream: Stream, entries: list[Entry], kind: type[M]) -> list[Claim[M]]:
        claims = []
        for entry in entries:
            if stream is self._tasks and entry.deliveries > self.max_deliveries:
                self._bury(
                    stream,
                    entry,
                    f"delivered {entry.deliveries} times, max_deliveries is {self.max_deliveries}: "
                    "the workers that held it died or never finished it",
                )
                continue
            try:
                claims.append(Claim(entry.entry_id, entry.deliveries, unpack(entry.payload, kind)))
            except MessageError as error:
                self._bury(stream, entry, str(error))
        return claims

    def _bury(self, stream: Stream, entry: Entry, reason: str) -> None:
        letter = queue_pb2.DeadLetter(
            schema_version=SCHEMA_VERSION,
            source_stream=stream.key,
            source_entry=entry.entry_id,
            deliveries=entry.deliveries,
            reason=reason,
            payload=entry.payload or b"",
            dead_at_unix_ms=time.time_ns() // 1_000_000,
        )

        def write(pipe: Pipeline) -> None:
            pipe.xadd(self._dead.key, {FIELD: letter.SerializeToString()})
            stream.remove(pipe, [entry.entry_id])

        self._transact(write)


def _count(reply: object) -> int:
    if isinstance(reply, redis.ResponseError) and is_group_missing(reply):
        return 0
    if isinstance(reply, Exception):
        raise reply
    if isinstance(reply, dict):
        reply = reply["pending"]
    return int(reply)  # type: ignore[call-overload]
