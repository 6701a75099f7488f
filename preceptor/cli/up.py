"""preceptor up RUN.yaml: a whole run on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from preceptor.cli.failure import fail
from preceptor.cli.parts import ROLLOUT, TEACHER, TRAINER, require
from preceptor.config_errors import ConfigError
from preceptor.embedded_redis import RedisMissing
from preceptor.launch.errors import LaunchError, PartFailed
from preceptor.lock import RunFolderBusy


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("up", context_settings=settings)(up)


def up(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's settings.")],
) -> None:
    """Start a whole run here (Redis, teacher, rollout workers, trainer) and watch it to its end.

    Settings of the file are overridden after it: --trainer.steps 10 --launch.rollout_workers 2.
    `preceptor config settings` lists them. Logs are in the run folder. Ctrl-C ends everything, a
    second one at once.
    """
    # Imported here: the other commands need no Redis.
    from preceptor.launch.up import read_settings
    from preceptor.launch.up import up as launch

    try:
        config, overrides = read_settings(file, context.args)
        parts = [TRAINER]
        parts += [TEACHER] if config.launch.teacher else []
        parts += [ROLLOUT] if config.launch.rollout_workers else []
        for part in parts:
            require(part)
            # Before anything starts: a typo should not cost the loading of three models.
            part.config_class().load(file, context.args)
        code = launch(file, config, overrides, Console())
    except (ConfigError, LaunchError, RedisMissing, RunFolderBusy, OSError) as error:
        fail(str(error))
    except PartFailed as error:
        if error.log_tail:
            print(f"\n{error.log_tail}\n", file=sys.stderr)
        fail(str(error), error.exit_code)
    raise typer.Exit(code)
