"""What a reward is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class RewardError(ValueError):
    """A reward that cannot be used, or an answer that it cannot grade by."""


@dataclass(frozen=True)
class Reward:
    """How responses are graded.

    Attributes:
        name: the setting that chose it.
        score: text of a response and the answer -> reward, usually in [0, 1]. Never raises on what
            a model wrote.
        check: raises RewardError for an answer that `score` cannot grade by.
    """

    name: str
    score: Callable[[str, str], float]
    check: Callable[[str], None]
