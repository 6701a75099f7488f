"""Who trains on what, and how it gets there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from preceptor.v1 import trainer_pb2
from tests.trainer.recorded import make_groups, make_sample, make_task
from trainer.deal import deal
from trainer.groups import Group
from trainer.shares import decode_share, encode_share


def groups_of(sizes):
    """One group a size: a prompt of one token and a response of size - 1."""
    return [
        Group(
            make_task(0, slot, samples=1, prompt=(7,)),
            (make_sample(0, [9] * (size - 1), [-1.0] * (size - 1)),),
        )
        for slot, size in enumerate(sizes)
    ]


def slots(share):
    return [[[group.task.id.slot for group in batch] for batch in one] for one in share.minibatches]


def test_the_largest_group_goes_to_the_rank_with_the_fewest_tokens():
    shares = deal(groups_of([10, 2, 3, 9, 4]), 0, ranks=2, minibatches=1, micro_batch_tokens=100)
    # 10 -> rank 0, 9 -> rank 1, 4 -> rank 1, 3 -> rank 0, 2 -> rank 0 (13 each way).
    assert [slots(share) for share in shares] == [[[[0, 1, 2]]], [[[3, 4]]]]


def test_every_rank_makes_as_many_passes():
    shares = deal(groups_of([50, 8, 8, 8]), 0, ranks=2, minibatches=1, micro_batch_tokens=20)
    assert [slots(share) for share in shares] == [[[[0], []]], [[[1, 2], [3]]]]


def test_ranks_without_groups_take_part_with_empty_passes():
    shares = deal(groups_of([5]), 0, ranks=3, minibatches=1, micro_batch_tokens=20)
    assert [slots(share) for share in shares] == [[[[0]]], [[[]]], [[[]]]]


@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=20),
    ranks=st.integers(1, 4),
    minibatches=st.integers(1, 5),
    tokens=st.integers(1, 60),
)
def test_each_group_is_dealt_once_whatever_the_cut(sizes, ranks, minibatches, tokens):
    groups = groups_of(sizes)
    shares = deal(groups, 3, ranks=ranks, minibatches=minibatches, micro_batch_tokens=tokens)
    alone = deal(groups, 3, ranks=1, minibatches=minibatches, micro_batch_tokens=10**6)
    assert len(shares) == ranks
    for number, minibatch in enumerate(slots(alone[0])):
        parts = [slots(share)[number] for share in shares]
        assert len({len(part) for part in parts}) == 1
        dealt = sorted(slot for part in parts for batch in part for slot in batch)
        # Which optimiser step a group belongs to does not depend on the ranks.
        assert dealt == sorted(slot for batch in minibatch for slot in batch)
        for part in parts:
            for batch in part:
                assert len(batch) <= 1 or sum(sizes[slot] for slot in batch) <= tokens
    assert sorted(slot for one in slots(alone[0]) for batch in one for slot in batch) == list(
        range(len(sizes))
    )


def test_a_share_survives_the_wire():
    groups = [replace(group, label=index % 2) for index, group in enumerate(make_groups(0))]
    graded = replace(
        groups[0].samples[0], reward=0.5, mask=np.zeros_like(groups[0].samples[0].mask)
    )
    named = replace(
        groups[0].samples[1],
        named_ids=np.tile(np.array([[5, 6]], np.int32), (len(groups[0].samples[1].ids), 1)),
        named_teacher=np.full((len(groups[0].samples[1].ids), 2), -2.5, np.float32),
    )
    groups[0] = replace(groups[0], samples=(graded, named, *groups[0].samples[2:]))
    [share] = deal(groups, 7, ranks=1, minibatches=2, micro_batch_tokens=30)
    data = encode_share(share).SerializeToString()
    back = decode_share(trainer_pb2.TrainOrder.FromString(data))
    assert (back.step, back.label_count, slots(back)) == (7, 2, slots(share))
    for ours, theirs in zip(share.micro_batches, back.micro_batches, strict=True):
        for group, other in zip(ours, theirs, strict=True):
            assert group.label == other.label
            assert group.tokens.prompt_ids.tolist() == other.tokens.prompt_ids.tolist()
            for one, two in zip(group.samples, other.samples, strict=True):
                for name in ("ids", "behaviour", "mask", "teacher", "named_ids"):
                    value, received = getattr(one, name), getattr(two, name)
                    assert (value.dtype, value.tolist()) == (received.dtype, received.tolist())
                assert one.reward == two.reward
    assert back.minibatches[0][0][0].samples[1].named_teacher[0].tolist() == [-2.5, -2.5]
