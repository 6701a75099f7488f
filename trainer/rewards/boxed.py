r"""The reward of reasoning recipes: a right answer in \boxed{}, and a response of this form."""

from __future__ import annotations

import re
from collections.abc import Callable

ACCURACY_WEIGHT = 0.9
FORMAT_WEIGHT = 0.1

# The form: thoughts in <think></think>, then an answer with \boxed{}. The same as matching all of
# `\s*<think>.*</think>.*\\boxed\{.*\}.*`, with atomic groups instead of backtracking: that takes
# cubic time on text that repeats the marks. The tags must be text: a tokenizer that has them as
# special tokens leaves them out of what is graded, as a template does that opens <think> itself.
FORMAT = re.compile(r"\s*<think>(?>.*?</think>)(?>.*?\\boxed\{).*?\}", re.DOTALL)

_BOX = "\\boxed{"
# An escaped character, which is no brace of LaTeX's own, or a brace.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def boxed(response: str, answer: str, equal: Callable[[str, str], bool]) -> float:
    r"""0.9 * accuracy + 0.1 * format.

    Accuracy is whether the last \boxed{} of the response holds the answer, format whether the
    response matches FORMAT.

    Args:
        response: text.
        answer: what the box should hold.
        equal: content of a box, and the answer -> whether they are the same in mathematics.
    """
    content = last_boxed(response)
    right = content is not None and (content.strip() == answer.strip() or equal(content, answer))
    return ACCURACY_WEIGHT * right + FORMAT_WEIGHT * (FORMAT.match(response) is not None)


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, braces balanced; None without one, or if it never closes."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None
