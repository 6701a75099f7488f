"""What is wrong with settings, one line each, with the nearest right name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from preceptor.config_names import setting_names

# Of what an unknown name is compared with: 1 is equal, 0 has no letter in common.
ALIKE = 0.6
# Names of other sections must be nearer, or anything would remind of something.
VERY_ALIKE = 0.75


class ConfigError(ValueError):
    """Settings that cannot be used, and why."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """A settings error for people: a setting's name, what is wrong, and what to write.

    Args:
        error: as pydantic raised it.
        model: whose validation it was.
    """
    lines = [_line(one, model) for one in error.errors(include_url=False)]
    return "settings do not fit:\n  " + "\n  ".join(lines)


def _line(one: Any, model: type[BaseModel]) -> str:
    path = tuple(map(str, one["loc"]))
    name = ".".join(path)
    match one["type"]:
        case "extra_forbidden":
            return f"{name} is unknown; {suggestion(path, setting_names(model))}"
        case "missing":
            return f"{name} is missing"
        case "value_error" if isinstance(one["input"], dict):
            # Of several settings; the message names them.
            return str(one["msg"]).removeprefix("Value error, ")
    return f"{name}: {one['msg'].removeprefix('Value error, ')} (it is {one['input']!r})"


def suggestion(path: tuple[str, ...], names: Sequence[tuple[str, ...]]) -> str:
    """What to write instead of an unknown path, given the known ones."""
    *parent, last = path
    beside = sorted({name[len(parent)] for name in names if _below(name, parent)})
    if near := get_close_matches(last, beside, 1, ALIKE):
        return f"did you mean {'.'.join([*parent, *near])}?"
    by_last = {name[-1]: name for name in reversed(names)}
    if near := get_close_matches(last, list(by_last), 1, VERY_ALIKE):
        return f"did you mean {'.'.join(by_last[near[0]])}?"
    return f"known here are {', '.join(beside)}" if beside else "there is nothing to set here"


def _below(name: tuple[str, ...], parent: Sequence[str]) -> bool:
    return len(name) > len(parent) and name[: len(parent)] == tuple(parent)
