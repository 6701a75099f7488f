"""What ranks tell each other about a batch: a few numbers, in one collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from trainer.estimators.moments import Moments, merge_all

Gather = Callable[[Tensor], Tensor]
"""The collective: takes a float64 vector, of one length on every rank; returns [ranks, length]."""


@dataclass(frozen=True)
class Statistics:
    """Of a part of a batch, or of all of it.

    Attributes:
        tokens, bad_tokens: valid tokens, and those whose difference is no number.
        sequences, bad_rewards: sequences, and those without a reward that is needed.
        rewards: moments of the rewards.
        signals: moments of what is whitened, one for each label.
    """

    tokens: float
    bad_tokens: float
    sequences: float
    bad_rewards: float
    rewards: Moments
    signals: tuple[Moments, ...]

    def over_ranks(self, gather: Gather) -> Statistics:
        """Those of all ranks' parts together, the same on every rank to the last bit."""
        counts = [self.tokens, self.bad_tokens, self.sequences, self.bad_rewards]
        parts = [number for one in (self.rewards, *self.signals) for number in astuple(one)]
        ranks_RF = gather(torch.tensor(counts + parts, dtype=torch.float64)).cpu()
        tokens, bad_tokens, sequences, bad_rewards = ranks_RF[:, : len(counts)].sum(0).tolist()
        moments_MR3 = ranks_RF[:, len(counts) :].unflatten(1, (-1, 3)).transpose(0, 1)
        rewards, *signals = (
            merge_all(Moments(*numbers) for numbers in ranks) for ranks in moments_MR3.tolist()
        )
        return Statistics(tokens, bad_tokens, sequences, bad_rewards, rewards, tuple(signals))
