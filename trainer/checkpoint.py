"""Checkpoints: everything a run resumes from, whole or not there.

A checkpoint at step s was taken after s optimiser steps. Weights and AdamW's state are
safetensors, the rest is JSON; data order, sampling seeds and learning rate are pure functions of
the step, so the step is their cursor.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preceptor.manifest import CorruptFolder, verify_folder, write_folder
from trainer.lineage import Lineage
from trainer.student import Student

logger = logging.getLogger(__name__)

STATE = "state.json"
MODEL = "model"


@dataclass(frozen=True)
class TrainerState:
    """What a run must remember besides weights and optimiser.

    Attributes:
        step: optimiser steps taken; the next one to take.
        lineage: accepted history of policies.
        skipped_in_a_row: steps skipped for a non-finite gradient, up to now.
        ledger_bytes, metrics_bytes: lengths of the journals.
    """

    step: int
    lineage: Lineage
    skipped_in_a_row: int
    ledger_bytes: int
    metrics_bytes: int

    def to_json(self) -> str:
        """As text."""
        values = dict(vars(self))
        values["lineage"] = {
            "incarnation": self.lineage.incarnation,
            "ends": {str(old): end for old, end in self.lineage.ends.items()},
        }
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str) -> TrainerState:
        """From text."""
        values: dict[str, Any] = json.loads(text)
        lineage = values.pop("lineage")
        ends = {int(old): end for old, end in lineage["ends"].items()}
        return cls(lineage=Lineage(lineage["incarnation"], ends), **values)


class Checkpoints:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, keep: int) -> None:
        """
        Args:
            folder: one subfolder a checkpoint.
            keep: newest to keep.
        """
        self._folder = folder
        self._keep = keep

    def save(self, student: Student, state: TrainerState) -> Path:
        """Write a checkpoint, then delete the oldest beyond `keep`.

        Raises:
            OSError: it could not be written; the ones before are untouched.
        """

        def write(folder: Path) -> None:
            student.save_weights(folder / MODEL)
            student.save_optimiser(folder)
            (folder / STATE).write_text(state.to_json())

        folder = self._folder / f"{state.step:06d}"
        if folder.exists():
            # A checkpoint that failed its verification, or a run stopped where it resumed.
            shutil.rmtree(folder)
        write_folder(folder, write, {"step": state.step})
        for old in self._newest_first()[self._keep :]:
            shutil.rmtree(old)
        return folder

    def restore(self, student: Student) -> TrainerState | None:
        """Load the newest checkpoint that is whole; None if there is none.

        A damaged one is passed over and named in the log.
        """
        for folder in self._newest_first():
            try:
                verify_folder(folder)
            except CorruptFolder as error:
                logger.error("checkpoint %s is damaged and passed over: %s", folder.name, error)
                continue
            student.load(folder / MODEL, folder)
            return TrainerState.from_json((folder / STATE).read_text())
        return None

    def _newest_first(self) -> list[Path]:
        found = [path for path in self._folder.glob("[0-9]*") if path.is_dir()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)
