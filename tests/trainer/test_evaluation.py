"""What an evaluation says of greedy and sampled answers."""

from dataclasses import replace

import numpy as np
import pytest

from tests.trainer.recorded import make_sample, make_task
from trainer.data import Prompt
from trainer.evaluation import grade
from trainer.groups import Group

PROMPTS = [
    Prompt(np.array([7]), (), answer, tag) for answer, tag in zip("1234", "aabb", strict=True)
]


def group(ids, teacher):
    return Group(make_task(), (make_sample(0, ids, teacher),))


def graded(common):
    greedy = [group([answer], [-1.0]) for answer in (1, 2, 9, 9)]
    # Behaviour is -1 throughout: differences 1, 3, and one that the teacher finds impossible.
    sampled = [group([5], [-2.0]), group([5, 6], [-4.0, -np.inf])]
    return grade(
        [*greedy, *sampled],
        PROMPTS,
        decode=lambda ids: str(ids[0]),
        reward=lambda response, answer: float(response == answer),
        common=common,
    )


def test_accuracy_is_of_greedy_answers_and_kl_of_sampled_ones():
    assert graded(common=4) == {
        "prompts": 4,
        "accuracy": 0.5,
        "accuracy_common": 0.5,
        "accuracy/a": 1.0,
        "prompts/a": 2,
        "accuracy/b": 0.0,
        "prompts/b": 2,
        "raw_kl": 2.0,
        "teacher_impossible": 1,
        "tokens_scored": 3,
    }


@pytest.mark.parametrize(("common", "accuracy"), [(2, 1.0), (3, 2 / 3), (100, 0.5)])
def test_evaluations_are_compared_on_their_common_prompts(common, accuracy):
    metrics = graded(common)
    assert metrics["accuracy_common"] == pytest.approx(accuracy)
    assert metrics["accuracy"] == 0.5


def test_a_dropped_answer_counts_nothing():
    first = group([1], [-1.0])
    rest = [replace(first, samples=()) for _ in PROMPTS[1:]]
    metrics = grade([first, *rest], PROMPTS, lambda ids: "1", lambda *_: 1.0, common=4)
    assert metrics["accuracy"] == 0.25
    assert "raw_kl" not in metrics
