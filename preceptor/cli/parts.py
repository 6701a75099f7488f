"""preceptor teacher | rollout | train RUN.yaml: one part of a run, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn

import typer

from preceptor.cli.failure import fail


@dataclass(frozen=True)
class Program:
    """A part as a module to run.

    Attributes:
        module: for `python -m`.
        extra: of the package, with what it imports.
        imports: the top-level modules of that extra.
    """

    module: str
    extra: str
    imports: tuple[str, ...]


TEACHER = Program(
    "services.teacher", "teacher", ("torch", "transformers", "grpc_health", "grpc_reflection")
)
ROLLOUT = Program("services.rollout", "rollout", ("torch", "transformers"))
TRAINER = Program("trainer", "trainer", ("torch", "transformers", "pyarrow", "tensorboard"))

_COMMANDS = {
    "teacher": (TEACHER, "Serve a teacher: scores of token ids over gRPC."),
    "rollout": (ROLLOUT, "Write rollouts for the tasks of a run."),
    "train": (TRAINER, "Train the student of a run."),
}


def add_to(app: typer.Typer) -> None:
    """Add the commands. All that follows their name goes to the module, --help too."""
    settings = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
    for name, (program, help_text) in _COMMANDS.items():
        app.command(name, help=help_text, context_settings=settings)(_runner(program))


def _runner(program: Program) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        require(program)
        execute(program, context.args)

    return run


def require(program: Program) -> None:
    """Fail by name of the extra if something the program imports is not installed."""
    missing = [name for name in program.imports if find_spec(name) is None]
    if missing:
        fail(
            f"{program.module} needs {', '.join(missing)}: pip install 'preceptor[{program.extra}]'"
        )


def execute(program: Program, arguments: list[str]) -> NoReturn:
    """Become the program."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", program.module, *arguments])
