"""Checkpoints: everything a run resumes from, whole or not there.

A checkpoint at step s was taken after s steps. Weights and optimiser state are in torch's
distributed format, the rest is JSON; data order, sampling seeds and learning rate are pure
functions of the step, so the step is their cursor.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preceptor.manifest import CorruptFolder, open_folder, seal_folder, sweep, verify_folder
from trainer.crew import Crew
from trainer.lineage import Lineage
from trainer.settings import CheckpointSettings

logger = logging.getLogger(__name__)

STATE = "state.json"
TENSORS = "tensors"


class UnusableCheckpoint(RuntimeError):
    """There are checkpoints, but none that this run can go on from."""


class DiskFull(RuntimeError):
    """A checkpoint would not fit on the disk."""


@dataclass(frozen=True)
class TrainerState:
    """What a run must remember besides weights and optimiser.

    Attributes:
        step: optimiser steps taken; the next one to take.
        lineage: accepted history of policies.
        skipped_in_a_row: steps skipped for a non-finite gradient, up to now.
        strikes: steps in a row beyond a guard's limit, by guard.
        running: the estimator's statistics that outlive a step; None without.
        evaluated: the step last evaluated; -1 before the first.
        accuracy: of this very step's weights on the prompts that all evaluations have; None if
            they were not evaluated.
        best: highest of these so far.
        ledger_bytes, metrics_bytes: lengths of the journals.
        identity: settings a run cannot change midway, by name.
    """

    step: int
    lineage: Lineage
    skipped_in_a_row: int
    strikes: dict[str, int]
    running: dict[str, Any] | None
    evaluated: int
    accuracy: float | None
    best: float | None
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
    """The folder of a run's checkpoints, named STEP-INCARNATION and never rewritten.

    Rank 0's; the tensors in them are written and read by all ranks.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        """
        Args:
            folder: one subfolder a checkpoint. What a killed writer left there is swept.
            settings: which to keep.
        """
        self._folder = folder
        self._settings = settings
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        sweep(folder)

    def save(self, crew: Crew, state: TrainerState) -> Path:
        """Begin to write a checkpoint; training may go on. `wait` says whether it got there.

        Waits for the one before. Once it is whole, older ones beyond those to keep are deleted.

        Raises:
            DiskFull: there is no room for it. The ones before are untouched.
            Exception: what kept the one before from being written.
        """
        self.wait()
        folder = self._folder / f"{state.step:06d}-{state.lineage.incarnation}"
        # A run that is stopped right after a checkpoint has nothing to add to it.
        if folder.exists():
            return folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_space(crew.student.state_bytes)
        temporary = open_folder(folder)
        crew.save(temporary / TENSORS)
        self._writer = threading.Thread(
            target=self._finish, args=(crew, state, temporary, folder), name="checkpoint"
        )
        self._writer.start()
        if not self._settings.asynchronous:
            self.wait()
        return folder

    def wait(self) -> None:
        """Until the checkpoint being written is whole.

        Raises:
            Exception: what kept it from being written. Nothing of it stays.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def restore(self, crew: Crew, identity: dict[str, Any]) -> TrainerState | None:
        """Load the newest checkpoint that is whole; None if there never was one.

        A damaged one is named in the log and, once another was found, deleted: the run will come by
        its step again.

        Args:
            crew: gets weights, optimiser and running statistics, on all ranks.
            identity: settings that must be what they were.

        Raises:
            UnusableCheckpoint: all are damaged, or they are of another run or other settings.
                Nothing was changed.
        """
        damaged = []
        for folder in newest_first(self._folder):
            try:
                verify_folder(folder)
            except CorruptFolder as error:
                logger.error("checkpoint %s is damaged and passed over: %s", folder.name, error)
                damaged.append(folder)
                continue
            state = read_state(folder)
            _compare(folder, state.identity, identity)
            crew.restore(folder / TENSORS, state.running)
            for one in damaged:
                shutil.rmtree(one)
            return state
        if damaged:
            raise UnusableCheckpoint(
                f"all {len(damaged)} checkpoints in {self._folder} are damaged (see the log); "
                "bring one back from a copy, or start afresh with another run.dir"
            )
        return None

    def _finish(self, crew: Crew, state: TrainerState, temporary: Path, folder: Path) -> None:
        try:
            crew.saved()
            (temporary / STATE).write_text(state.to_json())
            seal_folder(temporary, folder, {"step": state.step})
            self._prune()
            logger.info("checkpoint %s", folder)
        except BaseException as error:  # noqa: BLE001  (handed to the next save or wait)
            shutil.rmtree(temporary, ignore_errors=True)
            self._failure = error

    def _prune(self) -> None:
        found = newest_first(self._folder)
        kept = found[: self._settings.keep]
        best = best_checkpoint(found) if self._settings.keep_best else None
        for folder in found:
            if folder not in kept and folder != best:
                shutil.rmtree(folder)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        # What is written beside the tensors, and by others meanwhile.
        needed += needed // 10
        if free < needed:
            raise DiskFull(
                f"a checkpoint needs {needed / 1e9:.3g} GB in {self._folder}, where "
                f"{free / 1e9:.3g} GB are free; the ones before are untouched. Free some, lower "
                "trainer.checkpoint.keep, or move run.dir to a larger disk"
            )


def newest_first(folder: Path) -> list[Path]:
    """A run's checkpoints that were sealed, damaged or not."""
    found = [path for path in folder.glob("[0-9]*-[0-9]*") if path.is_dir()]
    return sorted(found, key=lambda path: [*map(int, path.name.split("-"))], reverse=True)


def read_state(folder: Path) -> TrainerState:
    """The state in a checkpoint that was verified."""
    return TrainerState.from_json((folder / STATE).read_text())


def best_checkpoint(folders: Sequence[Path]) -> Path | None:
    """The one whose weights did best in evaluation, the newest of equals; None if none was."""
    graded = []
    for folder in folders:
        try:
            accuracy = read_state(folder).accuracy
        except (OSError, ValueError, LookupError, TypeError) as error:
            # It is no candidate; whoever wants to restore it is told in full.
            logger.warning("checkpoint %s has no readable state: %s", folder.name, error)
            continue
        if accuracy is not None:
            graded.append((accuracy, folder))
    # max keeps the first of equals, and the newest comes first.
    return max(graded, default=(0.0, None), key=lambda one: one[0])[1]


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
