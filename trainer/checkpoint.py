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

from preceptor.manifest import CorruptFolder, sweep, verify_folder, write_folder
from trainer.lineage import Lineage
from trainer.student import Student

logger = logging.getLogger(__name__)

STATE = "state.json"
MODEL = "model"


class UnusableCheckpoint(RuntimeError):
    """There are checkpoints, but none that this run can go on from."""


@dataclass(frozen=True)
class TrainerState:
    """What a run must remember besides weights and optimiser.

    Attributes:
        step: optimiser steps taken; the next one to take.
        lineage: accepted history of policies.
        skipped_in_a_row: steps skipped for a non-finite gradient, up to now.
        evaluated: the step last evaluated; -1 before the first.
        ledger_bytes, metrics_bytes: lengths of the journals.
        identity: settings a run cannot change midway, by name.
    """

    step: int
    lineage: Lineage
    skipped_in_a_row: int
    evaluated: int
    ledger_bytes: int
    metrics_bytes: int
    identity: dict[str, Any]

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
    """The folder of a run's checkpoints, named STEP-INCARNATION and never rewritten."""

    def __init__(self, folder: Path, keep: int) -> None:
        """
        Args:
            folder: one subfolder a checkpoint. What a killed writer left there is swept.
            keep: newest to keep.
        """
        self._folder = folder
        self._keep = keep
        sweep(folder)

    def save(self, student: Student, state: TrainerState) -> Path:
        """Write a checkpoint, then delete the oldest beyond `keep`.

        Raises:
            OSError: it could not be written; the ones before are untouched.
        """

        def write(folder: Path) -> None:
            student.save_weights(folder / MODEL)
            student.save_optimiser(folder)
            (folder / STATE).write_text(state.to_json())

        folder = self._folder / f"{state.step:06d}-{state.lineage.incarnation}"
        # A run that is stopped right after a checkpoint has nothing to add to it.
        if not folder.exists():
            write_folder(folder, write, {"step": state.step})
        for old in self._newest_first()[self._keep :]:
            shutil.rmtree(old)
        return folder

    def restore(self, student: Student, identity: dict[str, Any]) -> TrainerState | None:
        """Load the newest checkpoint that is whole; None if there never was one.

        A damaged one is named in the log and, once another was found, deleted: the run will come by
        its step again.

        Args:
            student: gets weights and optimiser.
            identity: settings that must be what they were.

        Raises:
            UnusableCheckpoint: all are damaged, or they are of another run or other settings.
                Nothing was changed.
        """
        damaged = []
        for folder in self._newest_first():
            try:
                verify_folder(folder)
            except CorruptFolder as error:
                logger.error("checkpoint %s is damaged and passed over: %s", folder.name, error)
                damaged.append(folder)
                continue
            state = TrainerState.from_json((folder / STATE).read_text())
            _compare(folder, state.identity, identity)
            student.load(folder / MODEL, folder)
            for one in damaged:
                shutil.rmtree(one)
            return state
        if damaged:
            raise UnusableCheckpoint(
                f"all {len(damaged)} checkpoints in {self._folder} are damaged (see the log); "
                "bring one back from a copy, or start afresh with another run.dir"
            )
        return None

    def _newest_first(self) -> list[Path]:
        found = [path for path in self._folder.glob("[0-9]*-[0-9]*") if path.is_dir()]
        return sorted(found, key=lambda path: [*map(int, path.name.split("-"))], reverse=True)


def _compare(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{name} was {saved.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if changed:
        raise UnusableCheckpoint(
            f"{folder} is of a run with other settings: {'; '.join(changed)}. Set them back, or "
            "start afresh with another run.dir"
        )
