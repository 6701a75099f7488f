"""Verifiable rewards: was the answer right?"""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def numeric(response: str, answer: str) -> float:
    """1.0 if the last number of the response equals the answer, else 0.0.

    Raises:
        ValueError: the answer, ground truth, is no number.
    """
    wanted = float(answer)
    found = NUMBER.findall(response)
    return float(bool(found) and float(found[-1]) == wanted)
