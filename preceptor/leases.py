"""Keeps claimed tasks ours while they are worked on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import redis

from preceptor.messages import Claim
from preceptor.redis_connection import QueueError
from preceptor.v1 import queue_pb2

logger = logging.getLogger(__name__)

TaskClaim = Claim[queue_pb2.PromptTask]


class LeaseKeeper:
    """Renews claims at a third of the lease, from a thread, for as long as the context lasts.

    A failed renewal is logged and tried again: the work goes on, and in the worst case somebody
    else repeats it and one of the two results is dropped by its id.

    Attributes:
        claims: those still being renewed.
    """

    def __init__(
        self,
        renew: Callable[[Sequence[TaskClaim]], list[TaskClaim]],
        lease_seconds: float,
        claims: Sequence[TaskClaim],
    ) -> None:
        """
        Args:
            renew: restarts the leases of claims and returns those that are still ours.
            lease_seconds: how long a lease lasts.
            claims: what to keep.
        """
        self._renew = renew
        self._lease_seconds = lease_seconds
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

    def drop(self, claim: TaskClaim) -> None:
        """Stop renewing a claim that is finished before the others."""
        with self._lock:
            self.claims = [kept for kept in self.claims if kept.entry_id != claim.entry_id]

    def _run(self) -> None:
        failing = False
        while not self._stop.wait(self._lease_seconds / 3):
            with self._lock:
                claims = list(self.claims)
            try:
                kept = self._renew(claims)
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

    def _lose(self, claim: TaskClaim) -> None:
        with self._lock:
            if all(held is not claim for held in self.claims):
                return  # finished while we asked
        self.drop(claim)
        logger.warning(
            "task entry %s is no longer ours (its lease of %g s ran out, or it was withdrawn)",
            claim.entry_id,
            self._lease_seconds,
        )
