"""Work that waits for the engine: first come first served, bounded by tokens.

The seam for fair sharing: the servicer reserves and puts, the worker takes; who is served next is
decided in `take` alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from modeling.groups import TokenGroup
from services.teacher.call import Options
from services.teacher.scores import Outcome


class BacklogFull(RuntimeError):
    """No room for these tokens now.

    Attributes:
        never: they exceed the whole capacity; coming back later does not help.
    """

    def __init__(self, message: str, never: bool) -> None:
        super().__init__(message)
        self.never = never


@dataclass(eq=False)
class Call:
    """One gRPC call.

    Attributes:
        student: who asks.
        deadline: time.monotonic() value; infinity without one.
        cancelled: set by the servicer when nobody waits any more.
    """

    student: str
    deadline: float = float("inf")
    cancelled: bool = field(default=False)


@dataclass(frozen=True, eq=False)
class Unit:
    """A prompt group waiting for the engine.

    Attributes:
        tokens: prompt and responses, what it costs.
        deliver: called once from the worker's thread, with the outcome of each response: scores
            or a failure.
        expire: called once, instead, when the deadline is too near to start.
    """

    call: Call
    group: TokenGroup
    options: Options
    tokens: int
    deliver: Callable[[list[Outcome]], None]
    expire: Callable[[], None]


class Backlog:
    """A thread-safe queue. Tokens count from `reserve` to `release`, waiting or running."""

    def __init__(self, capacity: int, minimum_deadline_seconds: float) -> None:
        self._capacity = capacity
        self._margin = minimum_deadline_seconds
        self._units: deque[Unit] = deque()
        self._tokens = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def tokens(self) -> int:
        """Reserved now."""
        with self._changed:
            return self._tokens

    def reserve(self, tokens: int) -> None:
        """Make room for a call before any work is done for it.

        Raises:
            BacklogFull: over the capacity.
        """
        with self._changed:
            if self._tokens + tokens > self._capacity:
                raise BacklogFull(
                    f"{tokens} tokens asked for, {self._tokens} of {self._capacity} are queued "
                    "(teacher.max_queued_tokens)",
                    never=tokens > self._capacity,
                )
            self._tokens += tokens

    def release(self, tokens: int) -> None:
        """Give room back: answered, refused or cancelled."""
        with self._changed:
            self._tokens -= tokens

    def put(self, units: list[Unit]) -> None:
        """Append units whose tokens are reserved."""
        with self._changed:
            self._units.extend(units)
            self._changed.notify_all()

    def take(self, budget: int) -> list[Unit]:
        """Wait for work, then take units with equal options of about `budget` tokens, one at least.

        Cancelled units vanish, units whose deadline is too near expire. Empty once closed and
        nothing is left.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._units or self._closed)
                if not self._units:
                    return []
                taken, expired = self._take(budget)
            for unit in expired:
                unit.expire()
            if taken:
                return taken

    def close(self) -> None:
        """Let `take` return empty after what is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, budget: int) -> tuple[list[Unit], list[Unit]]:
        taken: list[Unit] = []
        expired: list[Unit] = []
        soon = time.monotonic() + self._margin
        tokens = 0
        while self._units:
            unit = self._units[0]
            alive = not unit.call.cancelled and unit.call.deadline > soon
            if alive and taken:
                tokens += unit.tokens
                if unit.options != taken[0].options or tokens > budget:
                    break
            self._units.popleft()
            if alive:
                tokens = tokens if taken else unit.tokens
                taken.append(unit)
            elif not unit.call.cancelled:
                expired.append(unit)
        return taken, expired
