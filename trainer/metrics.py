"""Metrics of a run: JSONL for machines (metrics.jsonl), TensorBoard for people."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from trainer.journal import Journal


class Metrics:
    """Writes every row to both places."""

    def __init__(self, folder: Path, length: int, step: int) -> None:
        """
        Args:
            folder: of the run.
            length: bytes of metrics.jsonl to keep, from a checkpoint.
            step: the step a run resumes at; TensorBoard hides what it had beyond.
        """
        self._journal = Journal(folder / "metrics.jsonl", length)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step or None)

    def write(self, event: str, step: int, values: Mapping[str, float | int | str]) -> None:
        """One row: {"event", "step", "time" (unix seconds), **values}.

        JSON has no infinity and no NaN (the gradient norm of a skipped step): they become null.
        """
        row = {"event": event, "step": step, "time": round(time.time(), 3)}
        row |= {name: value if _is_json(value) else None for name, value in values.items()}
        self._journal.append(row)
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def durable_length(self) -> int:
        """Bytes of metrics.jsonl, all of them on the disk."""
        return self._journal.durable_length()

    def close(self) -> None:
        """Flush and close both."""
        self._journal.close()
        self._board.close()


def _is_json(value: float | int | str) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
