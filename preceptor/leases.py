"""Keeps claimed tasks ours while they are worked on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import redis

from preceptor.redis_connection import QueueError
from preceptor.v1 import queue_pb2

if TYPE_CHECKING:
    from preceptor.queue import Claim, RolloutQueue

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews claims at a third of the lease, from a thread, for as long as the context lasts.

    A failed renewal is logged and tried again: the work goes on, and in the worst case somebody
    else repeats it and one of the two results is dropped by its id.

    Attributes:
        claims: those still being renewed.
    """

    def __init__(self, queue: RolloutQueue, claims: Sequence[Claim[queue_pb2.PromptTask]]) -> None:
        self._queue = queue
        self.claims = list(claims)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def drop(self, claim: Claim[queue_pb2.PromptTask]) -> None:
        """Stop renewing a claim that is finished before the others."""
        with self._lock:
            self.claims = [kept for kept in self.claims if kept.entry_id != claim.entry_id]

    def _run(self) -> None:
        failing = False
        while not self._stop.wait(self._queue.lease_seconds / 3):
            with self._lock:
                claims = list(self.claims)
            try:
                kept = self._queue.renew(claims)
            except (QueueError, redis.RedisError) as error:
                # Once per outage: the queue's own calls log it too.
                if not failing:
                    logger.warning("could not renew %d task leases: %s", len(claims), error)
                failing = True
                continue
            failing = False
            for claim in claims:
                if claim not in kept:
                    self._lose(claim)

    def _lose(self, claim: Claim[queue_pb2.PromptTask]) -> None:
        with self._lock:
            if all(held is not claim for held in self.claims):
                return  # finished while we asked
        self.drop(claim)
        logger.warning(
            "task entry %s is no longer ours (its lease of %g s ran out, or it was withdrawn)",
            claim.entry_id,
            self._queue.lease_seconds,
        )
