"""A line per refused trajectory, but never a flood of them."""

from __future__ import annotations

import logging
import time

from preceptor.v1 import teacher_pb2


class RefusalLog:
    """At most `lines` refusals an `every` seconds; the rest are counted."""

    def __init__(self, logger: logging.Logger, lines: int = 20, every: float = 10.0) -> None:
        self._logger = logger
        self._lines = lines
        self._every = every
        self._since = float("-inf")
        self._written = 0
        self._skipped = 0

    def note(self, student: str, result: teacher_pb2.GroupResult) -> None:
        """Log what was refused in a group."""
        for one in result.trajectories:
            if one.status != teacher_pb2.TRAJECTORY_STATUS_OK:
                self._line(student, result.group_id, one)

    def _line(self, student: str, group_id: str, one: teacher_pb2.TrajectoryResult) -> None:
        now = time.monotonic()
        if now - self._since >= self._every:
            if self._skipped:
                self._logger.warning("%d more refusals were not logged", self._skipped)
            self._since, self._written, self._skipped = now, 0, 0
        if self._written >= self._lines:
            self._skipped += 1
            return
        self._written += 1
        self._logger.warning(
            "refused student=%r group=%r trajectory=%r: %s: %s",
            student,
            group_id,
            one.trajectory_id,
            teacher_pb2.Refusal.Name(one.refusal),
            one.message,
        )
