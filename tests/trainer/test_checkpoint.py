"""Checkpoints: a run resumed is the run uninterrupted, and a damaged one is passed over."""

import logging

import pytest

from tests.trainer.recorded import (
    largest_difference,
    make_groups,
    make_student,
    run_step,
    weights_of,
)
from trainer.checkpoint import Checkpoints, TrainerState
from trainer.lineage import Lineage

SCHEDULE = {"schedule": "cosine", "warmup_steps": 2}


def state(step: int) -> TrainerState:
    return TrainerState(step, Lineage(2, {0: 1, 1: 4}), 1, ledger_bytes=10, metrics_bytes=20)


def train(student, steps):
    for step in steps:
        run_step(student, make_groups(step), step)


@pytest.mark.pitfall("T3")
def test_six_steps_are_three_and_a_restart_and_three(llama, tmp_path):
    whole = make_student(llama, **SCHEDULE)
    train(whole, range(6))
    first = make_student(llama, **SCHEDULE)
    train(first, range(3))
    Checkpoints(tmp_path, keep=2).save(first, state(3))
    second = make_student(llama, **SCHEDULE)
    restored = Checkpoints(tmp_path, keep=2).restore(second)
    assert restored == state(3)
    train(second, range(restored.step, 6))
    assert largest_difference(weights_of(whole), weights_of(second)) < 1e-6


@pytest.mark.pitfall("T1")
@pytest.mark.parametrize("name", ["model/model.safetensors", "optimiser.safetensors", "state.json"])
def test_a_cut_checkpoint_is_passed_over_for_the_one_before(llama, tmp_path, caplog, name):
    student = make_student(llama)
    checkpoints = Checkpoints(tmp_path, keep=2)
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
    assert "000002 is damaged and passed over" in caplog.text
    assert largest_difference(kept, weights_of(fresh)) == 0.0


@pytest.mark.pitfall("T1")
def test_a_disk_full_in_save_leaves_the_old_one_intact(llama, tmp_path, monkeypatch):
    student = make_student(llama)
    checkpoints = Checkpoints(tmp_path, keep=1)
    train(student, range(1))
    checkpoints.save(student, state(1))

    def full_disk(folder):
        (folder / "optimiser.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(student, "save_optimiser", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(student, state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]
    assert checkpoints.restore(make_student(llama)).step == 1


def test_the_newest_are_kept(llama, tmp_path):
    student = make_student(llama)
    checkpoints = Checkpoints(tmp_path, keep=2)
    train(student, range(1))
    for step in (8, 9, 10, 11):
        checkpoints.save(student, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000010", "000011"]


def test_no_checkpoint_is_a_fresh_start(llama, tmp_path):
    assert Checkpoints(tmp_path / "none", keep=1).restore(make_student(llama)) is None
