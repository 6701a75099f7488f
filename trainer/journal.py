"""Append-only JSONL files of a run: the metrics and the ledger of consumed rollouts.

A checkpoint remembers how long they were. Resuming cuts them back to that, so that what a crash
undid is in neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JournalTooShort(ValueError):
    """A journal lacks rows that its run's checkpoint counts on."""


class Journal:
    """One JSON object a line."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """
        Args:
            path: made if missing.
            length: bytes to keep of what is there, from a checkpoint; 0 starts afresh.

        Raises:
            JournalTooShort: fewer bytes than `length`; the checkpoint belongs to another file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        if self._file.tell() < length:
            raise JournalTooShort(
                f"{path} has {self._file.tell()} bytes, its checkpoint says {length}; restore the "
                "file or remove the checkpoint"
            )
        self._file.truncate(length)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Add rows; readers see them at once, the disk may not yet."""
        text = "".join(
            json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n" for row in rows
        )
        self._file.write(text.encode())
        self._file.flush()

    def durable_length(self) -> int:
        """Bytes written so far, everything before included, all of them on the disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
