"""Packing is arithmetic: complete, within the budget, stable."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.teacher.batching import Slice, plan

LENGTHS = st.integers(1, 60)
GROUPS = st.lists(st.tuples(LENGTHS, st.lists(LENGTHS, max_size=6)), max_size=8)


@given(groups=GROUPS, budget=st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_every_response_once_and_batches_within_the_budget(groups, budget):
    prompts = [prompt for prompt, _ in groups]
    responses = [lengths for _, lengths in groups]
    batches = plan(prompts, responses, budget)
    seen = [(one.group, row) for batch in batches for one in batch for row in one.rows]
    assert sorted(seen) == [
        (group, row) for group, lengths in enumerate(responses) for row in range(len(lengths))
    ]
    for batch in batches:
        rows = sum(len(one.rows) for one in batch)
        longest = max(responses[one.group][row] for one in batch for row in one.rows)
        cost = rows * (max(prompts[one.group] for one in batch) + longest)
        assert cost <= budget or rows == 1


def test_slices_of_a_long_group_follow_each_other():
    batches = plan([10, 5], [[10, 30, 20, 10], [5, 5]], budget=60)
    assert batches == [
        [Slice(0, (0, 3))],
        [Slice(0, (2,))],
        [Slice(0, (1,))],
        [Slice(1, (0, 1))],
    ]


def test_similar_groups_run_together():
    assert plan([4, 40, 4], [[4], [40], [4]], budget=80) == [
        [Slice(0, (0,)), Slice(2, (0,))],
        [Slice(1, (0,))],
    ]


def test_nothing_to_do():
    assert plan([], [], 10) == []
    assert plan([3], [[]], 10) == []
