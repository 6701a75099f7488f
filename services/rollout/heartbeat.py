"""Says what the worker is doing, from a thread, so that a busy worker stays visible."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import redis

from preceptor.queue import QueueError, RolloutQueue

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# Tokens per second are over this many beats.
WINDOW_BEATS = 10


@dataclass
class Status:
    """Written by the worker, read by its heartbeat.

    Attributes:
        policy: the version held; empty before the first.
        state: what the worker does.
        tokens: response tokens written since the start.
    """

    policy: str = ""
    state: Literal["loading", "idle", "generating"] = "loading"
    tokens: int = 0


class Heartbeat:
    """Beats for as long as the context lasts. A failed beat is logged, and the next one tries."""

    def __init__(self, queue: RolloutQueue, status: Status) -> None:
        self._queue = queue
        self._status = status
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW_BEATS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Not joined: it may be waiting for Redis, and nothing depends on its last beat.
        self._stop.set()

    def _run(self) -> None:
        failing = False
        while True:
            try:
                self._beat()
                failing = False
            except (QueueError, redis.RedisError) as error:
                if not failing:
                    logger.warning("no heartbeat: %s", error)
                failing = True
            if self._stop.wait(BEAT_SECONDS):
                return

    def _beat(self) -> None:
        tokens = self._status.tokens
        self._seen.append((time.monotonic(), tokens))
        since, before = self._seen[0]
        seconds = self._seen[-1][0] - since
        info: dict[str, str | int | float] = {
            "policy": self._status.policy,
            "state": self._status.state,
            "tokens": tokens,
            "tokens_per_second": round((tokens - before) / seconds, 1) if seconds else 0.0,
        }
        self._queue.beat("rollout", self._queue.consumer, info)
