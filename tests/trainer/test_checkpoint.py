"""Checkpoints: a run resumed is the run uninterrupted, and a damaged one is passed over."""

import logging
import shutil
from collections import namedtuple

import pytest

from tests.trainer.recorded import (
    largest_difference,
    make_groups,
    make_student,
    run_step,
    weights_of,
)
from trainer.checkpoint import Checkpoints, DiskFull, TrainerState, UnusableCheckpoint
from trainer.crew import Crew
from trainer.lineage import Lineage
from trainer.settings import CheckpointSettings, TrainerSettings
from trainer.student import ALONE

IDENTITY = {"run.seed": 0}
SCHEDULE = {"schedule": "cosine", "warmup_steps": 2}


def state(step: int, accuracy: float | None = None) -> TrainerState:
    return TrainerState(
        step,
        Lineage(2, {0: 1, 1: 4}),
        skipped_in_a_row=1,
        strikes={"repetition": 1},
        running={"count": 5.0, "mean": -0.5, "m2": 1.0},
        evaluated=0,
        accuracy=accuracy,
        best=accuracy,
        ledger_bytes=10,
        metrics_bytes=20,
        identity=IDENTITY,
    )


class Folder:
    """Checkpoints of one student after another, each written to its end."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.checkpoints = Checkpoints(folder, CheckpointSettings(**settings))

    def save(self, student, state):
        path = self.checkpoints.save(crew_of(student), state)
        self.checkpoints.wait()
        return path

    def restore(self, student, identity=IDENTITY):
        return self.checkpoints.restore(crew_of(student), identity)

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


def crew_of(student):
    settings = TrainerSettings(student="unused", data={"train": "unused"})
    return Crew(ALONE, student, settings)


def train(student, steps):
    for step in steps:
        run_step(student, make_groups(step), step)


@pytest.mark.pitfall("T3")
def test_six_steps_are_three_and_a_restart_and_three(llama, tmp_path):
    whole = make_student(llama, **SCHEDULE)
    train(whole, range(6))
    first = make_student(llama, **SCHEDULE)
    train(first, range(3))
    Folder(tmp_path).save(first, state(3))
    second = make_student(llama, **SCHEDULE)
    restored = Folder(tmp_path).restore(second)
    assert restored == state(3)
    train(second, range(restored.step, 6))
    assert largest_difference(weights_of(whole), weights_of(second)) < 1e-6


@pytest.mark.pitfall("T1")
@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "tensors/.metadata", "state.json"])
def test_a_cut_checkpoint_is_passed_over_for_the_one_before(llama, tmp_path, caplog, name):
    student = make_student(llama)
    checkpoints = Folder(tmp_path, keep=2)
    train(student, range(1))
    checkpoints.save(student, state(1))
    kept = weights_of(student)
    train(student, range(1, 2))
    newest = checkpoints.save(student, state(2)) / name
    newest.write_bytes(newest.read_bytes()[:-1])
    fresh = make_student(llama)
    with caplog.at_level(logging.ERROR):
        restored = checkpoints.restore(fresh)
    assert restored.step == 1
    assert "000002-2 is damaged and passed over" in caplog.text
    assert largest_difference(kept, weights_of(fresh)) == 0.0


@pytest.mark.pitfall("T1")
def test_a_disk_full_in_save_leaves_the_old_one_intact(llama, tmp_path, monkeypatch):
    student = make_student(llama)
    checkpoints = Folder(tmp_path, keep=1)
    train(student, range(1))
    checkpoints.save(student, state(1))

    def full_disk(temporary, folder, info):
        raise OSError(28, "No space left on device")

    # Found out at the end of the write, long after save() has returned.
    monkeypatch.setattr("trainer.checkpoint.seal_folder", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(student, state(2))
    assert checkpoints.names() == ["000001-2"]
    assert checkpoints.restore(make_student(llama)).step == 1


@pytest.mark.pitfall("T1")
def test_a_disk_without_room_is_found_before_anything_is_written(llama, tmp_path, monkeypatch):
    student = make_student(llama)
    checkpoints = Folder(tmp_path, keep=1)
    checkpoints.save(student, state(1))
    usage = namedtuple("usage", "free")(student.state_bytes)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DiskFull, match=r"needs .* GB .* trainer\.checkpoint\.keep"):
        checkpoints.save(student, state(2))
    assert checkpoints.names() == ["000001-2"]


def test_what_is_trained_after_a_save_is_not_in_it(llama, tmp_path):
    """The write goes on beside training, from a copy."""
    student = make_student(llama)
    checkpoints = Folder(tmp_path)
    train(student, range(1))
    kept = weights_of(student)
    checkpoints.checkpoints.save(crew_of(student), state(1))
    train(student, range(1, 4))
    checkpoints.checkpoints.wait()
    fresh = make_student(llama)
    checkpoints.restore(fresh)
    assert largest_difference(kept, weights_of(fresh)) == 0.0


def test_the_best_is_kept_beside_the_newest(llama, tmp_path):
    student = make_student(llama)
    checkpoints = Folder(tmp_path, keep=1)
    for step, accuracy in ((1, 0.5), (2, 0.8), (3, None), (4, 0.8), (5, 0.1), (6, None)):
        checkpoints.save(student, state(step, accuracy))
    # Of equals the newer one.
    assert checkpoints.names() == ["000004-2", "000006-2"]
    alone = Folder(tmp_path, keep=1, keep_best=False)
    alone.save(student, state(7))
    assert alone.names() == ["000007-2"]


def test_the_newest_are_kept(llama, tmp_path):
    student = make_student(llama)
    checkpoints = Folder(tmp_path, keep=2)
    train(student, range(1))
    for step in (8, 9, 10, 11):
        checkpoints.save(student, state(step))
    assert checkpoints.names() == ["000010-2", "000011-2"]


def test_no_checkpoint_is_a_fresh_start(llama, tmp_path):
    assert Folder(tmp_path / "none", keep=1).restore(make_student(llama)) is None


@pytest.mark.pitfall("T1")
def test_a_damaged_newest_does_not_push_out_what_is_saved_after_it(llama, tmp_path):
    student = make_student(llama)
    train(student, range(1))
    checkpoints = Folder(tmp_path, keep=1)
    checkpoints.save(student, state(8))
    damaged = shutil.copytree(tmp_path / "000008-2", tmp_path / "000012-2") / "state.json"
    damaged.write_text("{")
    assert checkpoints.restore(student).step == 8
    checkpoints.save(student, state(10))
    assert checkpoints.restore(student).step == 10


@pytest.mark.pitfall("T1")
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(llama, tmp_path):
    student = make_student(llama)
    train(student, range(1))
    checkpoints = Folder(tmp_path, keep=2)
    for step in (1, 2):
        (checkpoints.save(student, state(step)) / "state.json").unlink()
    with pytest.raises(UnusableCheckpoint, match="all 2 checkpoints"):
        checkpoints.restore(student)


def test_a_run_does_not_go_on_with_other_settings(llama, tmp_path):
    student = make_student(llama)
    checkpoints = Folder(tmp_path, keep=2)
    checkpoints.save(student, state(1))
    with pytest.raises(UnusableCheckpoint, match=r"run\.seed was 0 and is now 1"):
        checkpoints.restore(student, {"run.seed": 1})


def test_what_a_killed_writer_left_is_swept(llama, tmp_path):
    half = tmp_path / ".000004-0.tmp-123"
    half.mkdir()
    (half / "state.json").write_text("{")
    assert Folder(tmp_path, keep=2).restore(make_student(llama)) is None
    assert list(tmp_path.iterdir()) == []
