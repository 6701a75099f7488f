"""metrics.jsonl, read while the trainer writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Batch:
    """What one read found.

    Attributes:
        rows: in the file's order.
        from_start: the rows begin at the file's start; what earlier reads gave is void.
        unreadable: lines that are no JSON object.
    """

    rows: list[Row]
    from_start: bool
    unreadable: int


class MetricsTail:
    """Reads what was added since the last read.

    A line without its newline is left for the next read. A trainer that resumes cuts the file back
    to its checkpoint; then reading begins anew. It is noticed even if the file has grown past the
    old end since, by the last line read no longer standing where it stood.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._last_line = b""

    def read(self) -> Batch:
        """The new lines; none if the file is not there (yet)."""
        if not self._path.exists():
            restarted, self._end, self._last_line = self._end > 0, 0, b""
            return Batch([], from_start=restarted, unreadable=0)
        with self._path.open("rb") as file:
            file.seek(self._end - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._end, self._last_line = 0, b""
                file.seek(0)
            from_start = self._end == 0
            # A line may be half written, and a crash may have left one that is never completed.
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
        self._end += sum(map(len, lines))
        self._last_line = lines[-1] if lines else self._last_line
        rows = [row for line in lines if (row := _parse(line)) is not None]
        return Batch(rows, from_start, unreadable=len(lines) - len(rows))


def read_metrics(path: Path) -> Batch:
    """The whole file at once.

    Raises:
        OSError: it cannot be read.
    """
    path.stat()
    return MetricsTail(path).read()


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        # A trainer killed in the middle of a line; counted by the caller.
        return None
    return row if isinstance(row, dict) else None
