"""--section.key overrides of a command line, and the environment variables that say the same.

An override is read as if it stood in the environment, so that one rule reads both, and `preceptor
up` hands its own on to the parts as variables: each is validated by the part that owns the setting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from preceptor.config_errors import ConfigError

PREFIX = "PRECEPTOR_"
SECTIONS = ("run", "redis", "launch", "teacher", "rollout", "trainer")

# Names as they come back from an environment variable: lower case, no double underscore.
_KEY = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Override:
    """One setting given outside the file.

    Attributes:
        path: section first, such as ("trainer", "steps").
        value: as typed; lists, mappings and null as JSON.
    """

    path: tuple[str, ...]
    value: str

    @property
    def name(self) -> str:
        """As in messages: trainer.steps."""
        return ".".join(self.path)

    @property
    def argument(self) -> str:
        """As on a command line: --trainer.steps=10."""
        return f"--{self.name}={self.value}"

    @property
    def variable(self) -> str:
        """The environment variable: PRECEPTOR_TRAINER__STEPS."""
        return variable(*self.path)


def variable(*path: str) -> str:
    """The environment variable of a setting: ("trainer", "steps") -> PRECEPTOR_TRAINER__STEPS."""
    return PREFIX + "__".join(path).upper()


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read `--section.key value` and `--section.key=value`, in any mixture.

    Raises:
        ConfigError: no override, no value, or a section that RUN.yaml does not have.
    """
    overrides: list[Override] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"{argument!r} is no override; write --section.key value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} has no value; write --{name} VALUE or --{name}=VALUE")
            value = rest.pop(0)
        overrides.append(Override(_path(name), value))
    return overrides


def _path(name: str) -> tuple[str, ...]:
    path = tuple(name.split("."))
    if path[0] not in SECTIONS:
        raise ConfigError(
            f"--{name}: RUN.yaml has no section {path[0]!r}; sections are {', '.join(SECTIONS)}"
        )
    if len(path) < 2 or not all(_KEY.fullmatch(key) for key in path):
        raise ConfigError(
            f"--{name} names no setting; write --section.key with lower-case letters, digits and "
            "single underscores, such as --trainer.steps"
        )
    return path
