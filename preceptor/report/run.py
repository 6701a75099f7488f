"""A run folder, read for the report."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from preceptor.launch.metrics import METRICS_FILE, Row, read_metrics
from preceptor.launch.progress import number

# A report is meant to be passed on; a URL's credentials are not.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class ReportError(RuntimeError):
    """The run folder holds nothing to report."""


@dataclass(frozen=True)
class Run:
    """What the folder says.

    Attributes:
        name: of the folder.
        steps, evaluations: rows in order of step; a step done again after a resume is there once,
            as it was done last.
        warnings: their words.
        resumes: how often the trainer resumed.
        seconds: from the first row to the last, pauses included.
        unreadable: lines of metrics that could not be read.
        ledger: rollouts in it and distinct (step, slot, sample) among them; None without one.
        config: the settings, credentials blanked; "" where the folder has none.
    """

    name: str
    steps: list[Row]
    evaluations: list[Row]
    warnings: list[str]
    resumes: int
    seconds: float
    unreadable: int
    ledger: tuple[int, int] | None
    config: str


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ReportError: no metrics in it.
    """
    try:
        batch = read_metrics(folder / METRICS_FILE)
    except OSError as error:
        raise ReportError(
            f"cannot read {folder / METRICS_FILE} ({error.strerror}); name the folder of a run "
            "(run.dir) that has taken a step"
        ) from error
    if not batch.rows:
        raise ReportError(f"{folder / METRICS_FILE} holds no metrics yet")
    times = [time for row in batch.rows if (time := number(row, "time")) is not None]
    config = folder / "config.yaml"
    return Run(
        name=folder.resolve().name,
        steps=_by_step(batch.rows, "step"),
        evaluations=_by_step(batch.rows, "evaluation"),
        warnings=[str(row.get("message", row)) for row in _of(batch.rows, "warning")],
        resumes=len(_of(batch.rows, "resume")),
        seconds=max(times) - min(times) if times else 0.0,
        unreadable=batch.unreadable,
        ledger=_ledger(folder / "ledger.jsonl"),
        config=_CREDENTIALS.sub("***", config.read_text()) if config.exists() else "",
    )


def _of(rows: list[Row], event: str) -> list[Row]:
    return [row for row in rows if row.get("event") == event]


def _by_step(rows: list[Row], event: str) -> list[Row]:
    by_step = {number(row, "step"): row for row in _of(rows, event)}
    return [by_step[step] for step in sorted(step for step in by_step if step is not None)]


def _ledger(path: Path) -> tuple[int, int] | None:
    if not path.exists():
        return None
    # The trainer may be writing its last line.
    lines = path.read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    ids = [
        (entry["step"], entry["slot"], int(sample))
        for entry in entries
        for sample in (*entry["samples"], *entry["dropped"])
    ]
    return len(ids), len(set(ids))
