"""Verifiable rewards: was the answer right?"""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
from functools import partial

from trainer.rewards.boxed import boxed
from trainer.rewards.math_grader import math_grader
from trainer.rewards.reward import Reward, RewardError
from trainer.rewards.text import exact, number, numeric

__all__ = ["Reward", "RewardError", "exact", "load_reward", "number", "numeric"]

NAMES = ("exact", "numeric", "math_verify", "boxed")


def load_reward(name: str) -> Reward:
    r"""The reward of a name (trainer.data.reward).

    exact: the response is the answer. numeric: its last number is. math_verify: the answer that
    math-verify finds in it equals it in mathematics. boxed: 0.9 if the last \boxed{} does, plus 0.1
    if the response is of the form in boxed.py. Each is 0.0 otherwise.

    Args:
        name: one of these, or package.module:function, which takes the response's text and the
            answer and returns a finite number. What it raises stops the run.

    Raises:
        RewardError: unknown name, a path that does not import or is not callable, or a package
            that is not installed. Later, from an imported function's score: what it returned is no
            finite number.
    """
    if ":" in name:
        return _imported(name)
    match name:
        case "exact":
            return Reward(name, exact, _check_text)
        case "numeric":
            return Reward(name, numeric, _check_number)
        case "math_verify":
            grader = math_grader()
            return Reward(name, grader.score, grader.check)
        case "boxed":
            grader = math_grader()
            return Reward(name, partial(boxed, equal=grader.equal), grader.check)
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f", did you mean {near[0]}?" if near else "."
    raise RewardError(
        f"trainer.data.reward {name!r} is unknown{hint} There are {', '.join(NAMES)}, and "
        "package.module:function for one of your own"
    )


def _imported(path: str) -> Reward:
    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise RewardError(f"trainer.data.reward {path!r} does not import: {error}") from error
    if not callable(function):
        raise RewardError(f"trainer.data.reward {path!r} is {type(function).__name__}, no function")

    def score(response: str, answer: str) -> float:
        value = function(response, answer)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"trainer.data.reward {path!r} returned {value!r}, no finite number")
        return float(value)

    return Reward(path, score, lambda answer: None)


def _check_text(answer: str) -> None:
    if not answer.strip():
        raise RewardError("the answer is blank, which trainer.data.reward: exact would find right")


def _check_number(answer: str) -> None:
    try:
        number(answer)
    except ValueError as error:
        raise RewardError(
            f"answer {answer!r} is no finite number, which trainer.data.reward: numeric compares"
        ) from error
