"""Keeps the parts of a run alive until one of them says that the run is over."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

from preceptor.launch.child import Child, Part, State
from preceptor.launch.errors import CONFIGURATION_EXIT_CODE, PartFailed
from preceptor.launch.settings import LaunchSettings

logger = logging.getLogger(__name__)

# A probe costs a connection: not on every look.
_PROBE_SECONDS = 0.25
_STOP_POLL_SECONDS = 0.02


class Supervisor:
    """A context: on leaving it, for whatever reason, every process it started is gone.

    Not thread-safe, and to be used from the main thread (see Child.start).

    Attributes:
        children: one per part, in the order given.
    """

    def __init__(self, parts: Sequence[Part], logs: Path, settings: LaunchSettings) -> None:
        """
        Args:
            parts: what to run; those a part needs are among them.
            logs: folder of the logs, one a part.
            settings: budgets and patience.
        """
        self.children = [Child(part, logs / f"{part.name}.log") for part in parts]
        self._by_name = {child.part.name: child for child in self.children}
        self._settings = settings
        self._next_probe_at = 0.0
        self._hurry = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def look(self) -> bool:
        """Start what is due, note what is ready or has died; True once the run is over.

        Call it a few times a second; it waits for nothing but probes.

        Raises:
            PartFailed: a part died for good.
        """
        for child in self.children:
            if (code := child.exit_code()) is not None:
                if child.part.ends_run and code == 0:
                    child.state = State.ENDED
                    logger.info("%s has finished", child.part.name)
                    return True
                self._note_death(child, code)
        self._probe()
        for child in self.children:
            if child.state in (State.WAITING, State.RESTARTING) and self._may_start(child):
                child.start()
                child.state = State.STARTING if child.part.ready else State.READY
                logger.info("%s starts (process %s)", child.part.name, child.pid)
        return False

    def stop(self) -> None:
        """End all parts, stage by stage from the highest: SIGTERM, the grace, SIGKILL."""
        by_stage = sorted(self.children, key=lambda child: child.part.stage, reverse=True)
        for _, stage in groupby(by_stage, key=lambda child: child.part.stage):
            self._stop_together([child for child in stage if child.pid is not None])

    def hurry(self) -> None:
        """Cut the grace of a stop short. Safe to call from a signal handler."""
        self._hurry = True

    def _may_start(self, child: Child) -> bool:
        needs = [self._by_name[name] for name in child.part.needs]
        return time.monotonic() >= child.due_at and all(need.state is State.READY for need in needs)

    def _probe(self) -> None:
        now = time.monotonic()
        if now < self._next_probe_at:
            return
        self._next_probe_at = now + _PROBE_SECONDS
        for child in self.children:
            if child.state is not State.STARTING or child.part.ready is None:
                continue
            waited = time.monotonic() - child.started_at
            if child.part.ready():
                child.state, child.was_ready = State.READY, True
                logger.info("%s is ready after %.1f s", child.part.name, waited)
            elif waited > self._settings.ready_timeout_seconds:
                limit = self._settings.ready_timeout_seconds
                raise self._failed(
                    child, 1, f"was not ready within launch.ready_timeout_seconds ({limit:g} s)"
                )

    def _note_death(self, child: Child, code: int) -> None:
        """Plan a restart, or raise PartFailed."""
        how, exit_code = _describe(code), 128 - code if code < 0 else code or 1
        settings, part = self._settings, child.part
        if code == CONFIGURATION_EXIT_CODE:
            raise self._failed(child, exit_code, f"{how}: its settings do not work as they are")
        if not part.restart:
            raise self._failed(child, exit_code, how)
        # A part that ends by itself before it ever worked would only do so again. Not so one that
        # was killed, and a trainer has no readiness: what it needs may have died under it.
        if part.ready is not None and not child.was_ready and code >= 0:
            raise self._failed(child, exit_code, f"{how} before it was ready")
        if child.restarts >= settings.restart_budget:
            raise self._failed(
                child,
                exit_code,
                f"{how} and was started again {child.restarts} times already "
                f"(launch.restart_budget is {settings.restart_budget})",
            )
        wait = min(
            settings.restart_backoff_seconds * 2**child.restarts,
            settings.restart_backoff_limit_seconds,
        )
        child.restarts += 1
        child.due_at = time.monotonic() + wait
        child.state = State.RESTARTING
        logger.warning(
            "%s %s; restart %d of %d in %.1f s; its log: %s",
            part.name,
            how,
            child.restarts,
            settings.restart_budget,
            wait,
            child.log,
        )

    def _failed(self, child: Child, exit_code: int, what: str) -> PartFailed:
        child.state = State.ENDED
        name = child.part.name
        return PartFailed(name, f"{name} {what}; its log: {child.log}", exit_code, child.log_tail())

    def _stop_together(self, children: list[Child]) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._settings.stop_grace_seconds
        while any(child.alive() for child in children):
            if self._hurry or time.monotonic() >= deadline:
                break
            time.sleep(_STOP_POLL_SECONDS)
        for child in children:
            if child.alive():
                logger.warning("%s did not end in time and is killed", child.part.name)
                child.kill()
            child.state = State.ENDED


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    # Real-time signals have no name of their own.
    names = {int(number): number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
