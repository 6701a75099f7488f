"""preceptor config show | settings: what a run's settings are, and what they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preceptor.cli.failure import fail
from preceptor.cli.parts import PROGRAMS
from preceptor.config import as_yaml
from preceptor.config_errors import ConfigError
from preceptor.config_help import INTRODUCTION, settings_help
from preceptor.launch.settings import LaunchConfig


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    commands = typer.Typer(
        help="Show the settings of a run, or all there are.", no_args_is_help=True
    )
    lenient = {"allow_extra_args": True, "ignore_unknown_options": True}
    commands.command("show", context_settings=lenient)(show)
    commands.command("settings")(settings)
    app.add_typer(commands, name="config")


def show(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's settings.")],
) -> None:
    """Print a run's settings as every part would see them: defaults, file, environment, overrides.

    Overrides follow the file: --trainer.steps 10. Sections of parts that the file does not have are
    left out. The output loads again as a RUN.yaml; a password in redis.url is hidden.
    """
    try:
        resolved = LaunchConfig.load(file, context.args).resolved()
        for program in PROGRAMS:
            if resolved[program.section]:
                part = program.config_class().load(file, context.args).resolved()
                resolved[program.section] = part[program.section]
            else:
                del resolved[program.section]
    except ConfigError as error:
        fail(str(error))
    print(as_yaml(resolved), end="")


def settings() -> None:
    """List every setting of a RUN.yaml: name, type, limits, default, meaning."""
    print(INTRODUCTION)
    print(settings_help(LaunchConfig, ("run", "redis", "launch")))
    for program in PROGRAMS:
        print(settings_help(program.config_class(), (program.section,)))
