"""The one thread that owns the engine: takes work, isolates failures, delivers outcomes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from modeling.engine_errors import ENGINE_ERRORS
from modeling.groups import TokenGroup
from services.teacher.backlog import Backlog, Unit
from services.teacher.call import Options
from services.teacher.scores import Failure, Outcome, Scores

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What the worker needs of an engine."""

    def score(
        self, groups: Sequence[TokenGroup], options: Options
    ) -> Iterator[dict[tuple[int, int], Scores]]:
        """Batch after batch: (group, response) -> Scores."""

    def probe(self) -> None:
        """Raise if the engine can no longer score."""


@dataclass
class Counters:
    """Since the start; written by the worker alone."""

    tokens: int = 0
    groups: int = 0
    failures: int = 0
    busy_seconds: float = 0.0


class Worker(threading.Thread):
    """Runs until the backlog is closed.

    Attributes:
        counters: what was done.
        busy_since: time.monotonic() of the start of the batch that runs now, or None.
        failed: what ended the thread, or None.
    """

    def __init__(self, engine: Engine, backlog: Backlog, batch_tokens: int) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._backlog = backlog
        self._batch_tokens = batch_tokens
        self.counters = Counters()
        self.busy_since: float | None = None
        self.failed: BaseException | None = None

    def run(self) -> None:
        """Serve until closed. An engine that is broken for good ends the thread with `failed` set;
        the server then ends the process."""
        try:
            while units := self._backlog.take(self._batch_tokens):
                started = time.monotonic()
                self._serve(units)
                self.busy_since = None
                self.counters.busy_seconds += time.monotonic() - started
        except BaseException as error:
            self.failed = error
            raise

    def throughput(self) -> float:
        """Tokens a second while busy; 0 before the first batch."""
        seconds = self.counters.busy_seconds
        return self.counters.tokens / seconds if seconds else 0.0

    def _serve(self, units: list[Unit]) -> None:
        groups = [unit.group for unit in units]
        outcomes: dict[tuple[int, int], Outcome] = {}
        pending = [len(group.responses) for group in groups]
        for key, outcome in self._outcomes(units, groups):
            outcomes[key] = outcome
            index = key[0]
            pending[index] -= 1
            if pending[index] == 0:
                rows = range(len(groups[index].responses))
                units[index].deliver([outcomes.pop((index, row)) for row in rows])
                self.counters.groups += 1
                self.counters.tokens += units[index].tokens

    def _outcomes(
        self, units: list[Unit], groups: list[TokenGroup]
    ) -> Iterator[tuple[tuple[int, int], Outcome]]:
        """Outcome of every response: all together, or after a failure one by one."""
        options = units[0].options
        done: set[tuple[int, int]] = set()
        self.busy_since = time.monotonic()
        try:
            for batch in self._engine.score(groups, options):
                yield from batch.items()
                done.update(batch)
                self.busy_since = time.monotonic()
                if all(unit.call.cancelled for unit in units):
                    return
            return
        except ENGINE_ERRORS:
            logger.exception(
                "a batch of %d groups failed; its responses run one by one", len(groups)
            )
        for index, group in enumerate(groups):
            for row in range(len(group.responses)):
                if (index, row) not in done and not units[index].call.cancelled:
                    self.busy_since = time.monotonic()
                    yield (index, row), self._alone(group, row, options)
        # If nothing can be scored any more, say so by dying.
        self._engine.probe()

    def _alone(self, group: TokenGroup, row: int, options: Options) -> Outcome:
        named = group.named_ids[row : row + 1]
        single = TokenGroup(group.prompt_ids, (group.responses[row],), group.images, named)
        try:
            (batch,) = self._engine.score([single], options)
        except ENGINE_ERRORS as error:
            self.counters.failures += 1
            return Failure(f"the engine failed on this response: {type(error).__name__}: {error}")
        return batch[0, 0]
