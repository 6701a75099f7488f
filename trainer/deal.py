"""Who trains on what: minibatches, ranks and micro-batches of a rollout batch.

Pure functions of the batch, so that rank 0 decides for all. A group is never cut: its prompt is
computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.groups import Group

MicroBatch = list[Group]
Minibatch = list[MicroBatch]


@dataclass(frozen=True)
class Share:
    """One rank's part of a step.

    Attributes:
        step: counted from 0, for the schedule.
        minibatches: each leads to an optimiser step. All ranks have as many micro-batches in each;
            some may be empty.
        label_count: labels of the whole batch, see Group.label.
    """

    step: int
    minibatches: list[Minibatch]
    label_count: int

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """All of them, in order."""
        return [batch for minibatch in self.minibatches for batch in minibatch]


def deal(
    groups: Sequence[Group], step: int, *, ranks: int, minibatches: int, micro_batch_tokens: int
) -> list[Share]:
    """Every rank's share of a batch.

    Args:
        groups: with at least one sample each, in task order.
        step: counted from 0.
        ranks: how many.
        minibatches: how many; consecutive groups, as even in number as can be. Which group is in
            which does not depend on the ranks.
        micro_batch_tokens: upper bound of tokens in one pass; a group above it goes alone.
    """
    labels = max((group.label for group in groups), default=0) + 1
    shares: list[list[Minibatch]] = [[] for _ in range(ranks)]
    for part in _split(groups, minibatches):
        batches = [_micro_batches(mine, micro_batch_tokens) for mine in _by_tokens(part, ranks)]
        most = max(len(one) for one in batches)
        for share, mine in zip(shares, batches, strict=True):
            share.append(mine + [[]] * (most - len(mine)))
    return [Share(step, share, labels) for share in shares]


def _split(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """Consecutive parts; with fewer groups than parts, fewer parts."""
    parts = min(parts, len(groups))
    ends = [len(groups) * (part + 1) // parts for part in range(parts)]
    return [groups[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _by_tokens(groups: Sequence[Group], ranks: int) -> list[list[Group]]:
    """The largest group first, each to the rank with the fewest tokens so far."""
    shares: list[list[Group]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for group in sorted(groups, key=lambda one: -_tokens(one)):
        rank = tokens.index(min(tokens))
        shares[rank].append(group)
        tokens[rank] += _tokens(group)
    return [sorted(share, key=lambda one: one.task.id.slot) for share in shares]


def _micro_batches(groups: Sequence[Group], tokens: int) -> Minibatch:
    batches: Minibatch = []
    size = 0
    for group in groups:
        cost = _tokens(group)
        if not batches or size + cost > tokens:
            batches.append([])
            size = 0
        batches[-1].append(group)
        size += cost
    return batches


def _tokens(group: Group) -> int:
    return len(group.tokens.prompt_ids) + sum(len(one.ids) for one in group.samples)
