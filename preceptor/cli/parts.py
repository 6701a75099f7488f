"""preceptor teacher | rollout | train RUN.yaml: one part of a run, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

import typer

from preceptor.cli.failure import USAGE_EXIT_CODE, fail
from preceptor.config import RunConfig
from preceptor.config_help import INTRODUCTION, settings_help


@dataclass(frozen=True)
class Program:
    """A part as a module to run.

    Attributes:
        module: for `python -m`.
        section: of RUN.yaml.
        config: the class that reads the section, as package.module:class.
        extra: of the package, with what it imports.
        imports: the top-level modules of that extra.
    """

    module: str
    section: str
    config: str
    extra: str
    imports: tuple[str, ...]

    def config_class(self) -> type[RunConfig]:
        """The class itself; its module is light."""
        module, _, name = self.config.partition(":")
        found: type[RunConfig] = getattr(import_module(module), name)
        return found


TEACHER = Program(
    "services.teacher",
    "teacher",
    "services.teacher.settings:TeacherConfig",
    "teacher",
    ("torch", "transformers", "grpc_health", "grpc_reflection"),
)
ROLLOUT = Program(
    "services.rollout",
    "rollout",
    "services.rollout.settings:RolloutConfig",
    "rollout",
    ("torch", "transformers"),
)
TRAINER = Program(
    "trainer",
    "trainer",
    "trainer.settings:TrainerConfig",
    "trainer",
    ("torch", "transformers", "pyarrow", "tensorboard"),
)
PROGRAMS = (TEACHER, ROLLOUT, TRAINER)

_COMMANDS = {
    "teacher": (TEACHER, "Serve a teacher: scores of token ids over gRPC."),
    "rollout": (ROLLOUT, "Write rollouts for the tasks of a run."),
    "train": (TRAINER, "Train the student of a run."),
}
_EXPORT = "Write a checkpoint of a run as a plain Hugging Face folder."


def add_to(app: typer.Typer) -> None:
    """Add the commands. All that follows their name goes to the module, but for --help."""
    settings = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
    app.command("export", help=_EXPORT, context_settings=settings)(_export)
    for name, (program, help_text) in _COMMANDS.items():
        app.command(name, help=help_text, context_settings=settings)(_runner(program, help_text))


def _runner(program: Program, help_text: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        if not context.args or {"--help", "-h"} & set(context.args):
            # Here, and not by the module, which takes seconds to import what it works with.
            print(f"Usage: {context.command_path} RUN.yaml [--section.key VALUE ...]\n")
            print(f"{help_text}\n\n{INTRODUCTION}")
            print(settings_help(program.config_class(), (program.section, "run", "redis")))
            raise typer.Exit(0 if context.args else USAGE_EXIT_CODE)
        require(program)
        execute(program.module, context.args)

    return run


def _export(context: typer.Context) -> None:
    require(TRAINER)
    execute("trainer.export", context.args)


def require(program: Program) -> None:
    """Fail by name of the extra if something the program imports is not installed."""
    missing = [name for name in program.imports if find_spec(name) is None]
    if missing:
        fail(
            f"{program.module} needs {', '.join(missing)}: pip install 'preceptor[{program.extra}]'"
        )


def execute(module: str, arguments: list[str]) -> NoReturn:
    """Become `python -m module`."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
