"""The tree of settings that a model of a RUN.yaml declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def settings_of(
    model: type[BaseModel], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Path and declaration of each setting and each section, sections before what they hold."""
    for name, declared in model.model_fields.items():
        path = (*above, name)
        yield path, declared
        annotation: Any = declared.annotation
        if is_section(annotation):
            yield from settings_of(annotation, path)


def setting_names(model: type[BaseModel]) -> list[tuple[str, ...]]:
    """Paths of all settings and sections, in order of declaration."""
    return [path for path, _ in settings_of(model)]


def is_section(annotation: Any) -> bool:
    """Whether a field of this type has settings of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
