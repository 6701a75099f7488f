"""preceptor report RUN_DIR: a run as one HTML page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from preceptor.cli.failure import fail


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder (run.dir).")],
    output: Annotated[
        Path | None, typer.Option(help="The page. Default: report.html in the run's folder.")
    ] = None,
) -> None:
    """Write a run's report: one HTML file with its charts in it, readable without a network."""
    if find_spec("plotly") is None:
        fail("the report needs plotly: pip install 'preceptor[local]'")
    # plotly is in an extra, and takes its time to import.
    from preceptor.report import ReportError, write_report

    page = output or folder / "report.html"
    try:
        write_report(folder, page)
    except (ReportError, OSError) as error:
        fail(str(error))
    print(page)
