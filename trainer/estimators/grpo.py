"""Advantages of outcomes: a verifiable reward against its prompt group's others.

GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2):

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)               std with Bessel's correction

Dr. GRPO (arXiv 2503.20783, section 3.2) leaves the division out: it favours prompts that are nearly
always or nearly never solved. A lone sample has nobody to be better than and gets 0, where the
reference implementation takes its reward as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.estimators.difference import NonFinite

EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Outcome:
    """Advantages of a rank's sequences, and how many of its groups carry a signal.

    Attributes:
        advantages_B: float64; 0 throughout a group of one or of equal rewards.
        groups: prompt groups.
        flat: those whose rewards are all equal.
    """

    advantages_B: Tensor
    groups: int
    flat: int


def outcome(rewards_B: Tensor, groups_B: Tensor, *, std: bool) -> Outcome:
    """Group-normalised advantages, one a sequence.

    A group is never split over ranks, so nothing is gathered.

    Args:
        rewards_B: float64.
        groups_B: int64, each sequence's group, any numbers.
        std: divide by the group's standard deviation.
    """
    names_G, group_B = groups_B.unique(return_inverse=True)
    groups = len(names_G)

    def mean(values_B: Tensor, sizes_G: Tensor) -> Tensor:
        return rewards_B.new_zeros(groups).index_add(0, group_B, values_B) / sizes_G

    sizes_G = torch.bincount(group_B, minlength=groups)
    low_G, high_G = (
        rewards_B.new_zeros(groups).scatter_reduce(0, group_B, rewards_B, how, include_self=False)
        for how in ("amin", "amax")
    )
    # By comparison: rounding in the mean would leave equal rewards 1e-17 apart, and 1e-6 is small.
    flat_G = low_G == high_G
    centred_B = rewards_B - mean(rewards_B, sizes_G)[group_B]
    advantages_B = torch.where(flat_G[group_B], 0.0, centred_B)
    if std:
        std_G = mean(centred_B.square(), (sizes_G - 1).clamp(min=1)).sqrt()
        advantages_B = advantages_B / (std_G + EPSILON)[group_B]
    return Outcome(advantages_B, groups, int(flat_G.sum()))


def refuse_bad_rewards(bad: int, sequences: int) -> None:
    """Stop if the whole batch has sequences without a reward that is a number.

    Raises:
        NonFinite: it has.
    """
    if bad:
        raise NonFinite(
            f"{bad} of {sequences} responses have no finite reward, which trainer.estimator.name "
            "grpo and trainer.estimator.outcome_weight need: every training prompt must have an "
            "answer to grade by (trainer.data.reward)"
        )
