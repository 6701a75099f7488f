"""The tasks a worker has in hand: none is forgotten."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from modeling.load import ModelError
from preceptor.queue import Claim, RolloutQueue
from preceptor.v1 import queue_pb2

logger = logging.getLogger(__name__)

TaskClaim = Claim[queue_pb2.PromptTask]


class Hand:
    """Claimed tasks, their leases renewed for as long as the context lasts.

    At its end those neither finished nor buried are given back. If it ends by an exception they are
    not: their leases run out and the delivery counts, so that a task that kills its workers ends
    among the dead letters. A model that does not fit (ModelError) is no task's fault.
    """

    def __init__(
        self, queue: RolloutQueue, claims: Sequence[TaskClaim], postpone_seconds: float
    ) -> None:
        """
        Args:
            queue: where the claims are from.
            claims: what is in hand.
            postpone_seconds: see `postpone`.
        """
        self._queue = queue
        self._leases = queue.leases(claims)
        self._left = {claim.entry_id: claim for claim in claims}
        self._postponed: dict[str, TaskClaim] = {}
        self._postpone_seconds = postpone_seconds

    def __enter__(self) -> Self:
        self._leases.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # No renewal may follow a release: it would make the task ours again.
        self._leases.__exit__(kind, error, trace)
        if kind is not None and not issubclass(kind, ModelError):
            return
        if self._left:
            logger.info("%d tasks are given back", len(self._left))
        self._queue.release(list(self._left.values()))
        self._queue.release(list(self._postponed.values()), self._postpone_seconds)

    def finish(self, claim: TaskClaim, group: queue_pb2.RolloutGroup) -> None:
        """Hand the group in; the task is done."""
        self._queue.finish_task(claim, group)
        self._drop(claim)

    def postpone(self, claim: TaskClaim) -> None:
        """The task cannot be served yet: at the end it is given back, and offered again, to any
        worker, `postpone_seconds` later."""
        self._postponed[claim.entry_id] = self._left.pop(claim.entry_id)

    def bury(self, claim: TaskClaim, reason: str) -> None:
        """The task cannot be served: to the dead letters, which the trainer reads."""
        task = claim.message.id
        logger.error("step %d slot %d goes to the dead letters: %s", task.step, task.slot, reason)
        self._queue.dead_letter(claim, reason)
        self._drop(claim)

    def _drop(self, claim: TaskClaim) -> None:
        self._leases.drop(claim)
        del self._left[claim.entry_id]
