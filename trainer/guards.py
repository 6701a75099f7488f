"""Signs of collapse, and the guards that stop a run by them.

A collapsing student often looks well by its KL: repeating one token is easy to agree with. So the
run watches how it writes, and says which sign it saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.settings import GuardSettings

LONGEST_PERIOD = 8


class CollapsedRun(RuntimeError):
    """The student has collapsed; the message names the sign."""


def repetition(ids_T: NDArray[np.integer]) -> float:
    """Largest share of tokens that equal the one p places before, over periods p of 1 to 8.

    Near 1 for a response stuck in a loop of up to 8 tokens, 0 for one without repeats.
    """
    shares = [
        float(np.mean(ids_T[period:] == ids_T[:-period]))
        for period in range(1, min(LONGEST_PERIOD, len(ids_T) - 1) + 1)
        # The share of fewer than two periods says nothing about a loop.
        if len(ids_T) >= 2 * period + 1
    ]
    return max(shares, default=0.0)


def mean_repetition(responses: Sequence[NDArray[np.integer]]) -> float:
    """Mean of `repetition` over responses; 0 without any."""
    return float(np.mean([repetition(ids) for ids in responses])) if responses else 0.0


class Guards:
    """Counts the steps in a row beyond each limit.

    Attributes:
        strikes: by guard, up to now; a checkpoint keeps them.
    """

    def __init__(self, settings: GuardSettings, strikes: Mapping[str, int]) -> None:
        self._settings = settings
        self.strikes = dict(strikes)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Look at a step's metrics.

        Raises:
            CollapsedRun: a sign held for settings.patience steps in a row.
        """
        settings = self._settings
        clamped = metrics.get("clamped_low", 0.0) + metrics.get("clamped_high", 0.0)
        signs = {
            "repetition": (metrics["repetition"], settings.repetition, "the responses repeat"),
            "clamped": (clamped, settings.clamped, "the clamp cuts almost every k"),
            "truncated": (metrics["truncated"], settings.truncated, "responses run into the cap"),
            # Smaller is worse: compared with the signs turned.
            "entropy": (
                -metrics["entropy"],
                None if settings.entropy is None else -settings.entropy,
                "the student is certain of everything",
            ),
        }
        for name, (value, limit, what) in signs.items():
            # A NaN is beyond any limit.
            if limit is None or value <= limit:
                self.strikes.pop(name, None)
                continue
            self.strikes[name] = self.strikes.get(name, 0) + 1
            if self.strikes[name] >= settings.patience:
                raise CollapsedRun(
                    f"{what}: {name} {abs(value):.3f} is beyond trainer.guards.{name} "
                    f"{abs(limit):g} for {self.strikes[name]} steps in a row (truncated "
                    f"{metrics['truncated']:.2f}, repetition {metrics['repetition']:.2f}, clamped "
                    f"{clamped:.2f}, entropy {metrics['entropy']:.2f}); the last checkpoint "
                    "stands. Lower trainer.optimiser.learning_rate, or set the guard to null"
                )
