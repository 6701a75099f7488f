"""Rewards that need nothing but the text."""

from __future__ import annotations

import math
import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def exact(response: str, answer: str) -> float:
    """1.0 if the response is the answer, white space around both aside, else 0.0."""
    return float(response.strip() == answer.strip())


def numeric(response: str, answer: str) -> float:
    """1.0 if the last number of the response equals the answer, else 0.0.

    Raises:
        ValueError: see `number`.
    """
    wanted = number(answer)
    found = NUMBER.findall(response)
    return float(bool(found) and float(found[-1]) == wanted)


def number(answer: str) -> float:
    """The ground truth as a number.

    Raises:
        ValueError: it is none, or not finite.
    """
    value = float(answer)
    if not math.isfinite(value):
        raise ValueError(f"{answer} is not finite")
    return value
