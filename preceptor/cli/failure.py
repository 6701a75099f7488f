"""How a command ends that cannot go on."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from pydantic import ValidationError

# As of command-line errors: it was not even tried.
USAGE_EXIT_CODE = 2


def fail(message: str, exit_code: int = USAGE_EXIT_CODE) -> NoReturn:
    """Say why on stderr and exit."""
    print(f"preceptor: {message}", file=sys.stderr)
    raise typer.Exit(exit_code)


def explain(error: ValidationError) -> str:
    """A settings error, one line a setting: its name, what is wrong, the value."""
    lines = [
        f"{'.'.join(map(str, one['loc']))}: {one['msg']} (it is {one['input']!r})"
        for one in error.errors(include_url=False)
    ]
    return "settings do not fit:\n  " + "\n  ".join(lines)
