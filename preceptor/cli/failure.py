"""How a command ends that cannot go on."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

# As of command-line errors: it was not even tried.
USAGE_EXIT_CODE = 2


def fail(message: str, exit_code: int = USAGE_EXIT_CODE) -> NoReturn:
    """Say why on stderr and exit."""
    print(f"preceptor: {message}", file=sys.stderr)
    raise typer.Exit(exit_code)
