"""A crew of several ranks is saved, taken up again by another number of them, and hit by a NaN."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from tests.trainer import rank_life
from tests.trainer.rank_processes import run_to_end
from tests.trainer.rank_scenarios import LEARNING_RATE
from trainer.world import World

pytestmark = pytest.mark.slow


class Life:
    """One crew after another over the same checkpoints."""

    def __init__(self, model, folder):
        self.model, self.folder = model, folder
        self.count = 0

    def live(self, ranks, first, last, *bad_step):
        """Train the steps; returns the weights and which steps were taken."""
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir(parents=True)
        given = (self.model, self.folder / "checkpoints", place / "weights")
        if ranks == 1:
            model, *places = given
            rank_life.live(model, World(0, 1), *places, first, last, *bad_step)
        else:
            arguments = [str(one) for one in (*given, first, last, *bad_step)]
            run_to_end(["tests.trainer.rank_life", *arguments], ranks, place)
        return load_file(place / "weights"), json.loads((place / "weights.json").read_text())


@pytest.fixture
def life(llama, tmp_path):
    return lambda name: Life(llama, tmp_path / name)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


@pytest.mark.pitfall("T3")
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_six_steps_are_three_and_three_on_another_number_of_ranks(life, before, after):
    whole, _ = life("whole").live(1, 0, 6)
    parts = life("parts")
    half, _ = parts.live(before, 0, 3)
    resumed, taken = parts.live(after, 3, 6)
    assert taken == [True] * 3
    # Of AdamW, after sums in another order.
    assert largest_difference(whole, resumed) < 0.05 * LEARNING_RATE
    assert largest_difference(half, resumed) > LEARNING_RATE / 2


@pytest.mark.pitfall("A8")
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(life):
    before, _ = life("before").live(2, 0, 2)
    bad, taken = life("bad").live(2, 0, 3, 2)
    assert taken == [True, True, False]
    assert largest_difference(before, bad) < 1e-6
    # All go on together: none waits for a step that another skipped.
    later, taken = life("later").live(2, 0, 4, 2)
    assert taken == [True, True, False, True]
    assert largest_difference(before, later) > LEARNING_RATE / 10
