"""What the metrics so far say about a run: the numbers a live view shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from preceptor.launch.metrics import Row

# Speeds and shares are over this many steps: one alone jumps, all hide a change.
_RECENT_STEPS = 10

# Where the time of a step goes, as the trainer names it, and in words.
TIME_PARTS = {
    "rollout_wait_s": "waits for rollouts",
    "teacher_wait_s": "waits for teacher",
    "train_s": "trains",
    "publish_s": "publishes",
}


def number(row: Row, key: str) -> float | None:
    """A metric, or None where the row lacks it (or has a null, or a word)."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


@dataclass
class Progress:
    """Fed rows in order; anything may be missing from them.

    Attributes:
        step, steps: how many are finished, of how many. Rows of steps count from 0, and those of
            other events say how many were finished.
        first_evaluation, evaluation: the first and the newest.
        warning: the newest warning's words.
        unreadable: lines that could not be read.
    """

    step: int = 0
    steps: int | None = None
    first_evaluation: Row = field(default_factory=dict)
    evaluation: Row = field(default_factory=dict)
    warning: str = ""
    unreadable: int = 0
    _recent: deque[Row] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def take(self, rows: Iterable[Row]) -> None:
        """Count these rows in."""
        for row in rows:
            if (steps := number(row, "steps")) is not None:
                self.steps = int(steps)
            event, step = row.get("event"), number(row, "step")
            if step is not None and event != "warning":
                self.step = int(step) + (event == "step")
            match event:
                case "step":
                    self._recent.append(row)
                case "evaluation":
                    self.first_evaluation = self.first_evaluation or row
                    self.evaluation = row
                case "warning":
                    self.warning = str(row.get("message", "see metrics.jsonl"))

    def latest(self, key: str) -> float | None:
        """A metric of the last step."""
        return number(self._recent[-1], key) if self._recent else None

    def mean(self, key: str) -> float | None:
        """A metric's mean over the recent steps that have it."""
        values = [value for row in self._recent if (value := number(row, key)) is not None]
        return sum(values) / len(values) if values else None

    def tokens_per_second(self) -> float | None:
        """Over the recent steps together, from tokens and durations where both are there."""
        pairs = [(number(row, "tokens"), number(row, "step_s")) for row in self._recent]
        seconds = sum(second for token, second in pairs if token is not None and second)
        if not seconds:
            return self.mean("tokens_per_second")
        return sum(token for token, second in pairs if token is not None and second) / seconds

    def time_shares(self) -> dict[str, float]:
        """Part of the recent steps' time by what the trainer did; empty if it does not say."""
        total = sum(number(row, "step_s") or 0.0 for row in self._recent)
        if not total:
            return {}
        return {
            key: sum(number(row, key) or 0.0 for row in self._recent) / total
            for key in TIME_PARTS
            if any(key in row for row in self._recent)
        }
