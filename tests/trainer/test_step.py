"""A step on a real model: what must and what must not change the update."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.recorded import (
    largest_difference,
    make_groups,
    make_sample,
    make_student,
    make_task,
    own_logprobs,
    run_step,
    weights_of,
)
from trainer.groups import Group
from trainer.rollout_metrics import rollout_metrics
from trainer.step import NothingToTrain


def gradients(student):
    return {name: p.grad.numpy().copy() for name, p in student.parameters.items()}


@pytest.mark.pitfall("A3")
@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean"])
def test_gradients_do_not_depend_on_micro_batches(llama, aggregation):
    groups = make_groups(0)
    results = []
    for tokens in (10**6, 40, 1):
        student = make_student(llama, max_gradient_norm=1e9)
        result = run_step(student, groups, micro_batch_tokens=tokens, aggregation=aggregation)
        results.append((gradients(student), result.metrics))
    for other, metrics in results[1:]:
        assert largest_difference(results[0][0], other) < 1e-6
        assert metrics["loss"] == pytest.approx(results[0][1]["loss"], abs=1e-6)
        assert metrics["raw_kl"] == pytest.approx(results[0][1]["raw_kl"], abs=1e-6)


@pytest.mark.pitfall("A10")
def test_the_teachers_marks_decide_the_update(llama):
    groups = make_groups(0)
    turned = [
        replace(
            group,
            samples=tuple(
                replace(one, teacher=-10 - one.teacher.astype(np.float32)) for one in group.samples
            ),
        )
        for group in groups
    ]
    updates = []
    for batch in (groups, turned):
        student = make_student(llama, max_gradient_norm=1e9)
        before = weights_of(student)
        result = run_step(student, batch)
        updates.append(gradients(student))
        assert largest_difference(before, weights_of(student)) > 1e-4
        assert result.metrics["tokens_with_teacher"] == result.metrics["tokens"]
    assert largest_difference(*updates) > 1e-3


def test_a_student_scored_by_itself_has_no_kl(llama):
    student = make_student(llama)
    groups = make_groups(0)
    with torch.no_grad():
        rows = iter(own_logprobs(student, groups))
    own = [
        replace(
            group, samples=tuple(replace(one, teacher=next(rows).numpy()) for one in group.samples)
        )
        for group in groups
    ]
    perturbed = own[0].samples[0].teacher.copy()
    perturbed[0] -= 1e-3
    first = replace(own[0].samples[0], teacher=perturbed)
    own[0] = replace(own[0], samples=(first, *own[0].samples[1:]))
    assert run_step(student, own).metrics["raw_kl"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.pitfall("A9")
def test_a_lone_eos_trains_and_an_empty_response_is_dropped(llama):
    eos = make_sample(0, [2], [-0.5])
    other = make_sample(0, [9, 10, 2], [-3.0, -1.0, -0.1])
    batch = [
        Group(make_task(0, 0), (eos,), dropped={1: "empty"}),
        Group(make_task(0, 1), (), dropped={0: "empty", 1: "empty"}),
        Group(make_task(0, 2), (other,), dropped={1: "REFUSAL_TOO_LONG"}),
    ]
    student = make_student(llama)
    before = weights_of(student)
    metrics = rollout_metrics(batch) | run_step(student, batch).metrics
    assert metrics["sequences"] == 2
    assert metrics["tokens"] == 4
    assert metrics["dropped"] == 4
    assert largest_difference(before, weights_of(student)) > 1e-4


def test_a_batch_of_nothing_is_an_error(llama):
    with pytest.raises(NothingToTrain):
        run_step(make_student(llama), [Group(make_task(), (), {0: "empty", 1: "empty"})])


@pytest.mark.pitfall("L7")
def test_an_eos_that_is_also_the_padding_counts_and_a_cut_response_has_none(llama):
    # Responses of 3 and 6 tokens: whatever pads the shorter one, 3 + 6 tokens are valid.
    short = make_sample(0, [7, 8, 2], [-1.0, -2.0, -3.0])
    long = make_sample(1, [9, 10, 11, 12, 13, 14], [-1.0, -2.0, -1.0, -2.0, -1.0, -2.0])
    metrics = run_step(make_student(llama), [Group(make_task(), (short, long))]).metrics
    assert metrics["tokens"] == 9


def test_injected_tokens_are_scored_and_not_trained(llama):
    results = []
    for injected_mark in (-1.0, -30.0):
        sample = make_sample(0, [7, 8, 9, 2], [-1, -2, injected_mark, -0.5], mask=[1, 1, 0, 1])
        student = make_student(llama)
        metrics = run_step(student, [Group(make_task(), (sample,))]).metrics
        assert metrics["tokens"] == 3
        results.append(weights_of(student))
    assert largest_difference(*results) == 0.0


def test_what_is_logged_of_lengths_and_kl_is_of_the_samples_and_not_of_the_clamped_k(llama):
    cut = replace(make_sample(0, [7, 8, 9, 10], [-300.0, -1.0, -1.0, -1.0]), truncated=True)
    short = make_sample(1, [9, 2], [-1.0, -1.0])
    student = make_student(llama)
    batch = [Group(make_task(), (cut, short))]
    with torch.no_grad():
        old = torch.cat(own_logprobs(student, batch))
    metrics = rollout_metrics(batch) | run_step(student, batch).metrics
    assert metrics["truncated"] == 0.5
    assert metrics["response_tokens_mean"] == 3.0
    wanted = float(old.mean()) + (300.0 + 5 * 1.0) / 6
    assert metrics["raw_kl"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["behaviour_difference"] == pytest.approx(
        float((-1 - old).abs().mean()), rel=1e-5
    )


def test_the_learning_rate_warms_up_and_falls_as_its_schedule_says(llama):
    def rates(**changes):
        student = make_student(llama, **changes)
        return [student.learning_rate(step) / 1e-2 for step in (0, 1, 2, 7, 12)]

    assert rates() == [1, 1, 1, 1, 1]
    assert rates(schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert rates(schedule="linear", warmup_steps=2, final_fraction=0.2) == pytest.approx(
        [0.5, 1, 1, 0.6, 0.2]
    )
    assert rates(schedule="cosine", warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_the_rate_and_the_decay_of_the_settings_are_those_of_the_update(llama):
    def moved(step, **changes):
        student = make_student(llama, **changes)
        before = weights_of(student)
        run_step(student, make_groups(0), step)
        return largest_difference(before, weights_of(student))

    # Adam's first step moves every weight by the rate, whatever the gradient's size.
    assert moved(0) == pytest.approx(1e-2, rel=1e-2)
    assert moved(0, warmup_steps=4) == pytest.approx(0.25e-2, rel=1e-2)
    assert moved(0, weight_decay=0.5) > 1.1e-2


@pytest.mark.pitfall("A11")
def test_small_updates_are_not_swallowed(llama):
    student = make_student(llama)
    parameter = next(iter(student.parameters.values()))
    with torch.no_grad():
        parameter.fill_(1.0)
    student._settings = student._settings.model_copy(update={"learning_rate": 1e-6})
    for step in range(5):
        run_step(student, make_groups(step), step)
    assert (parameter != 1.0).any()


@pytest.mark.pitfall("A8")
def test_a_gradient_that_is_not_finite_changes_nothing(llama):
    student = make_student(llama)
    run_step(student, make_groups(0), 0)
    before = weights_of(student)
    parameter = next(iter(student.parameters.values()))
    handle = parameter.register_hook(lambda gradient: gradient * torch.nan)
    result = run_step(student, make_groups(1), 1)
    assert not result.finite
    assert largest_difference(before, weights_of(student)) == 0.0
    handle.remove()
    assert run_step(student, make_groups(1), 1).finite
