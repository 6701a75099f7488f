"""One Redis stream read by one consumer group: reads, leases, lost groups; or followed by ids,
without a group. Knows no messages.

Works alike on Redis 6.2 and 7: stale entries are found by XPENDING IDLE and taken by XCLAIM, which
also says how often each was delivered; XAUTOCLAIM does not, and its reply differs between the two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis
from redis.client import Pipeline

from preceptor.redis_connection import Patience

logger = logging.getLogger(__name__)

# The one field of an entry.
FIELD = b"message"


@dataclass(frozen=True)
class Entry:
    """An entry handed to this consumer.

    Attributes:
        entry_id: Redis' id.
        deliveries: how often Redis handed it out, this time included.
        payload: its bytes; None if it lacks our field.
    """

    entry_id: str
    deliveries: int
    payload: bytes | None


class Stream:
    """A stream and its one consumer group, which is made on demand and reads from entry 0."""

    def __init__(self, client: redis.Redis, patience: Patience, key: str, consumer: str) -> None:
        self.key = key
        self.consumer = consumer
        self.group = "consumers"
        # redis-py types replies for every protocol and decoding at once.
        self._redis: Any = client
        self._patience = patience

    def add(self, pipe: Pipeline, payload: bytes) -> None:
        """Queue an XADD on `pipe`. Never trimmed by length: that would drop unread work."""
        pipe.xadd(self.key, {FIELD: payload})

    def remove(self, pipe: Pipeline, entry_ids: Sequence[str]) -> None:
        """Queue acknowledgement and deletion on `pipe` (an XACK alone leaves the entry)."""
        pipe.xack(self.key, self.group, *entry_ids)
        pipe.xdel(self.key, *entry_ids)

    def recreate(self, pipe: Pipeline) -> None:
        """Queue, on `pipe`, dropping every entry and claim and starting the group anew."""
        pipe.delete(self.key)
        pipe.xgroup_create(self.key, self.group, id="0", mkstream=True)

    def read_new(self, count: int, block_seconds: float) -> list[Entry]:
        """Up to `count` entries never delivered before; waits `block_seconds` for the first."""
        # BLOCK 0 would wait for ever.
        block = max(1, round(block_seconds * 1000)) if block_seconds > 0 else None
        rows = self._call(lambda: self._readgroup(">", count, block))
        return [_entry(entry_id, fields, 1) for entry_id, fields in rows]

    def read_own(self, after: str, count: int) -> list[Entry]:
        """Up to `count` entries this consumer holds, with ids beyond `after` ("0": all)."""
        while rows := self._call(lambda: self._readgroup(after, count, None)):
            live = [(_text(entry_id), fields) for entry_id, fields in rows if fields]
            self._forget({_text(entry_id) for entry_id, _ in rows} - {key for key, _ in live})
            if live:
                deliveries = self.pending([entry_id for entry_id, _ in live])
                return [_entry(key, fields, deliveries.get(key, 1)) for key, fields in live]
        return []

    def take_stale(self, count: int, idle_seconds: float) -> list[Entry]:
        """Up to `count` entries whose holder has not renewed them for `idle_seconds`, made ours."""
        idle = round(idle_seconds * 1000)
        stale = self._call(
            lambda: self._redis.xpending_range(self.key, self.group, "-", "+", count, idle=idle)
        )
        if not stale:
            return []
        counts = {_text(row["message_id"]): row["times_delivered"] for row in stale}
        # The idle time is checked again here, so of two takers one wins.
        rows = self._call(
            lambda: self._redis.xclaim(self.key, self.group, self.consumer, idle, list(counts))
        )
        taken = [(_text(entry_id), fields) for entry_id, fields in rows if entry_id is not None]
        self._forget(counts.keys() - {entry_id for entry_id, _ in taken})
        return [_entry(entry_id, fields, counts[entry_id] + 1) for entry_id, fields in taken]

    def renew(self, entry_ids: Sequence[str]) -> set[str]:
        """Restart the lease of those still ours, one attempt; returns the ids that are.

        JUSTID leaves the delivery count alone.
        """
        # Without this check XCLAIM would snatch an entry back from whoever took it over.
        ours = list(self.pending(entry_ids, self.consumer, retry=False))
        if ours:
            self._call(
                lambda: self._redis.xclaim(
                    self.key, self.group, self.consumer, 0, ours, justid=True
                ),
                retry=False,
            )
        return set(ours)

    def release(self, deliveries: dict[str, int], idle_seconds: float) -> None:
        """Give entries back unused: not renewed for `idle_seconds`, this delivery uncounted."""
        for entry_id in self.pending(list(deliveries), self.consumer):
            give_back = partial(
                self._redis.xclaim,
                self.key,
                self.group,
                self.consumer,
                0,
                [entry_id],
                idle=round(idle_seconds * 1000),
                retrycount=max(0, deliveries[entry_id] - 1),
                justid=True,
            )
            self._call(give_back)

    def pending(
        self, entry_ids: Sequence[str], consumer: str | None = None, *, retry: bool = True
    ) -> dict[str, int]:
        """Delivery counts of those entries that are held (by `consumer`, if given)."""

        def ask() -> list[list[dict[str, Any]]]:
            pipe = self._redis.pipeline(transaction=False)
            for entry_id in entry_ids:
                pipe.xpending_range(self.key, self.group, entry_id, entry_id, 1, consumer)
            return pipe.execute()

        rows = self._call(ask, retry=retry) if entry_ids else []
        return {_text(row["message_id"]): row["times_delivered"] for found in rows for row in found}

    def _readgroup(self, after: str, count: int, block_ms: int | None) -> list[tuple[bytes, Any]]:
        reply: Any = self._redis.xreadgroup(
            self.group, self.consumer, {self.key: after}, count=count, block=block_ms
        )
        return reply[0][1] if reply else []

    def _forget(self, entry_ids: Iterable[str]) -> None:
        """Drop claims on those entries that no longer exist (deleted by hand, say)."""
        for entry_id in entry_ids:
            if not self._call(partial(self._redis.xrange, self.key, entry_id, entry_id)):
                self._call(partial(self._redis.xack, self.key, self.group, entry_id))

    def _call(self, do: Callable[[], Any], *, retry: bool = True) -> Any:
        """`do` through outages, with the group made again if it is gone (first use, a flush)."""
        attempt = 0
        while True:
            try:
                return self._patience.call(do, retry=retry)
            except redis.ResponseError as error:
                if not is_group_missing(error):
                    raise
            # A flush every few moments must not become a hot loop.
            time.sleep(0.1 * min(attempt, 10))
            attempt += 1
            self._patience.call(self._create_group, retry=retry)

    def _create_group(self) -> None:
        try:
            # From entry 0 and not "$": whatever was added before the group existed is work too.
            self._redis.xgroup_create(self.key, self.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        else:
            logger.info("made the consumer group of %s (new, or Redis was flushed)", self.key)


class Tail:
    """What is added to a stream, for one reader who claims nothing. Thread-safe."""

    def __init__(self, client: redis.Redis, patience: Patience, key: str) -> None:
        self.key = key
        self._redis: Any = client
        self._patience = patience
        self._lock = threading.Lock()
        # Id of the last entry read; b"-", Redis' word for the smallest id, before any.
        self._seen: bytes | None = None

    def start(self) -> None:
        """Pass over what is there now. Only the first call does anything, or the first `read`."""
        with self._lock:
            if self._seen is None:
                last = self._patience.call(lambda: self._redis.xrevrange(self.key, count=1))
                self._seen = last[0][0] if last else b"-"

    def read(self) -> list[bytes]:
        """Payloads added since the last `read` or the start; entries without our field are passed
        over. If the last entry read is gone, so may its ids be (a flush): everything is new."""
        self.start()
        with self._lock:
            rows = self._range(self._seen)
            if rows and rows[0][0] == self._seen:
                del rows[0]
            elif self._seen != b"-":
                rows = self._range(b"-")
                self._seen = b"-"
            if rows:
                self._seen = rows[-1][0]
        return [fields[FIELD] for _, fields in rows if FIELD in fields]

    def _range(self, first: bytes | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self._patience.call(lambda: self._redis.xrange(self.key, min=first))


def is_group_missing(error: redis.ResponseError) -> bool:
    """Whether Redis says that the stream or its group is not there."""
    # Redis 7.0 answers UNBLOCKED to a reader whose stream is deleted while it waits.
    return str(error).startswith(("NOGROUP", "UNBLOCKED"))


def _entry(entry_id: bytes | str, fields: dict[bytes, bytes], deliveries: int) -> Entry:
    return Entry(_text(entry_id), deliveries, fields.get(FIELD))


def _text(entry_id: bytes | str) -> str:
    return entry_id.decode() if isinstance(entry_id, bytes) else entry_id
