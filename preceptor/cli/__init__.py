"""The `preceptor` command: one file a subcommand."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from preceptor.cli import config, parts, report, score, up

app = typer.Typer(
    help="Teacher-as-a-service for on-policy distillation.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version("preceptor"))
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


up.add_to(app)
parts.add_to(app)
score.add_to(app)
report.add_to(app)
config.add_to(app)
