"""Passes in bfloat16 over float32 masters."""

from __future__ import annotations

import pytest
import torch

from modeling.load import load_model
from tests.trainer.recorded import make_groups, make_student
from trainer.crew import Crew
from trainer.ranks import loopback
from trainer.settings import OptimiserSettings, ScaleSettings, TrainerSettings
from trainer.student import Student, whole
from trainer.world import join, leave

STEPS, RATE = 3, 1e-5


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    yield join("cpu", sharded=True)
    leave()


@pytest.fixture
def student(llama, world):
    return Student(
        load_model(llama),
        OptimiserSettings(learning_rate=RATE),
        STEPS,
        scale=ScaleSettings(compute_dtype="bfloat16"),
        world=world,
    )


def logprobs(student):
    with torch.no_grad():
        return student.scores([group.tokens for group in make_groups(0)]).logprobs_T


def test_scores_are_those_of_the_published_weights(student, llama):
    exact, rounded = logprobs(make_student(llama)), logprobs(student)
    difference = (exact - rounded).abs()
    assert rounded.dtype == torch.float32
    # It does compute in bfloat16, to its 8 bits.
    assert 1e-4 < float(difference.max()) < 0.3
    published = student.gathered()
    assert {one.dtype for one in published.values()} == {torch.bfloat16}


def test_updates_that_bfloat16_would_swallow_are_kept(student, world):
    before = {name: whole(one.detach()).clone() for name, one in student.parameters.items()}
    settings = TrainerSettings(student="unused", data={"train": "unused"}, max_new_tokens=12)
    crew = Crew(world, student, settings)
    for step in range(STEPS):
        assert crew.train(make_groups(step), step).finite
    moved = total = 0
    for name, parameter in student.parameters.items():
        now = whole(parameter.detach())
        gradient = whole(parameter.grad)
        assert now.dtype == gradient.dtype == torch.float32
        change = (now - before[name]).abs()
        assert float(change.max()) <= 1.01 * STEPS * RATE
        # Of weights about 0.3 in size, whose neighbours in bfloat16 are 0.002 away.
        large = (before[name].abs() > 0.25) & (gradient != 0)
        moved += int(torch.count_nonzero(change[large]))
        total += int(large.sum())
    assert total > 1000
    assert moved > 0.99 * total
