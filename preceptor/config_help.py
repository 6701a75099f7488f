"""The list of settings that --help prints: name, type, limits, default, meaning."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from preceptor.config_names import is_section, settings_of

WIDTH = 100
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

INTRODUCTION = """\
Settings come from RUN.yaml; the environment beats it (PRECEPTOR_TRAINER__STEPS=10), and the command
line beats both (--trainer.steps=10). null, lists and mappings are written as JSON there.
"""


def settings_help(model: type[BaseModel], sections: Sequence[str]) -> str:
    """All settings of these sections, for people.

    Args:
        model: of a RUN.yaml, such as trainer.settings.TrainerConfig.
        sections: in the order wanted.
    """
    blocks: list[str] = []
    found = list(settings_of(model))
    for section in sections:
        for path, declared in found:
            if path[0] == section:
                blocks.append(_heading(path, declared) + _text(path, declared))
    return "\n".join(blocks)


def _heading(path: tuple[str, ...], declared: FieldInfo) -> str:
    name = ".".join(path)
    if is_section(declared.annotation):
        return f"[{name}]\n"
    limits = "".join(
        f" {sign} {getattr(one, key)}"
        for one in declared.metadata
        for key, sign in _LIMITS.items()
        if hasattr(one, key)
    )
    return f"{name}: {_type(declared.annotation)}{limits}{_default(declared)}\n"


def _default(declared: FieldInfo) -> str:
    if declared.is_required():
        return ", required"
    if declared.default_factory is not None:
        return ", by default chosen at the start"
    default = _plain(declared.default)
    return " = " + (default if isinstance(default, str) and default else json.dumps(default))


def _text(path: tuple[str, ...], declared: FieldInfo) -> str:
    annotation: Any = declared.annotation
    words = declared.description
    if words is None and is_section(annotation):
        words = annotation.__doc__
    if words is None:
        return ""
    paragraphs = cleandoc(words).split("\n\n")
    lines = [
        textwrap.fill(" ".join(one.split()), WIDTH, initial_indent="    ", subsequent_indent="    ")
        for one in paragraphs
    ]
    return "\n".join(lines) + "\n"


def _type(annotation: Any) -> str:
    """As people say it: number | null, adamw | sgd."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " | ".join(map(_type, inner))
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    return _WORDS.get(annotation) or str(getattr(annotation, "__name__", annotation))


_WORDS: dict[Any, str] = {str: "text", float: "number", int: "integer", bool: "true | false"}
_WORDS |= {NoneType: "null", Path: "path"}


def _plain(value: Any) -> Any:
    """As JSON can say it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    return value
