"""preceptor score FILE.jsonl: a teacher's logprobs of one's own token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from preceptor.cli.failure import fail
from preceptor.cli.score_lines import BadLine, Item, read_items, refused, scored
from preceptor.client import TeacherClient
from preceptor.teacher_errors import TeacherError

# What is held at once: enough for the teacher to batch, little enough for any machine.
_BATCH_TOKENS = 65_536
_BATCH_BYTES = 32 * 2**20
_BATCH_GROUPS = 256


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("score")(score)


def score(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", exists=True, dir_okay=False, readable=True)
    ],
    teacher: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the teacher is.")],
    student: Annotated[
        str, typer.Option(help="Who asks; the teacher names it in its log.")
    ] = "score",
    temperature: Annotated[
        float | None, typer.Option(help="Of the teacher's distribution. Default: 1.")
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=0, help="Also print the k likeliest tokens at each position.")
    ] = 0,
    suppress: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID",
            min=0,
            max=2**31 - 1,
            help="Leave this id out of the teacher's distribution. May be repeated.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write here instead of stdout.")] = None,
    retry_seconds: Annotated[
        float, typer.Option(min=0, help="How long to wait for a teacher that is away or full.")
    ] = 20.0,
) -> None:
    """Ask a teacher for the logprobs of one's own token ids.

    Each line of FILE.jsonl is a prompt and its responses:

    {"prompt_ids": [1, 2], "responses": [[3, 4], [5]], "images": ["a.png"], "id": "mine"}

    "response_ids": [3, 4] stands for one response; images (paths from the file's folder) and id
    (default: the line's number) may be left out. Each line out has the id and, per response, its
    logprobs (nats; minus infinity is "-inf") or status, refusal and message; or, for a line that
    cannot be read, an error. Exit code: 0 all scored, 1 some not, 2 the teacher failed.
    """
    incomplete = False
    options = {"temperature": temperature, "top_k": top_k, "suppressed_ids": suppress or []}
    with ExitStack() as stack:
        client = stack.enter_context(
            TeacherClient(teacher, student=student, retry_seconds=retry_seconds)
        )
        sink = stack.enter_context(_open(output)) if output else sys.stdout
        progress = stack.enter_context(_progress(sink.isatty()))
        bar = progress.add_task("", total=file.stat().st_size)
        try:
            client.describe()
            for batch in _batches(read_items(file)):
                incomplete |= _score_batch(client, batch, options, file, sink)
                progress.update(bar, completed=batch[-1].end)
        except TeacherError as error:
            fail(str(error))
    if incomplete:
        raise typer.Exit(1)


def _open(output: Path) -> TextIO:
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")


def _score_batch(
    client: TeacherClient,
    batch: list[Item | BadLine],
    options: dict[str, Any],
    file: Path,
    sink: TextIO,
) -> bool:
    """Write the batch's lines in order; True if any response in it was not scored."""
    groups = [item.group for item in batch if isinstance(item, Item)]
    scores = iter(client.scores(groups, **options))
    incomplete = False
    for item in batch:
        if isinstance(item, BadLine):
            incomplete = True
            print(f"{file}:{item.line}: {item.error}", file=sys.stderr)
            row = refused(item)
        else:
            row, complete = scored(item, next(scores))
            incomplete |= not complete
        sink.write(json.dumps(row, allow_nan=False) + "\n")
    sink.flush()
    return incomplete


def _batches(items: Iterator[Item | BadLine]) -> Iterator[list[Item | BadLine]]:
    batch: list[Item | BadLine] = []
    tokens = size = 0
    for item in items:
        batch.append(item)
        if isinstance(item, Item):
            tokens += item.tokens
            size += item.group.ByteSize()
        if tokens >= _BATCH_TOKENS or size >= _BATCH_BYTES or len(batch) >= _BATCH_GROUPS:
            yield batch
            batch, tokens, size = [], 0, 0
    if batch:
        yield batch


def _progress(to_terminal: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("scoring"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # On a terminal the lines themselves show how far it is, and a bar would tear them.
        disable=not console.is_terminal or to_terminal,
    )
