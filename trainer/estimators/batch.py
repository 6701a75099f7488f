"""What an estimator works on: the tokens of one rank's share of a rollout batch, flat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N response tokens of B sequences, in any order, without padding or with masked padding.

    Positions outside the mask may hold anything, NaN and inf included. A rank without tokens has
    N = B = 0 and takes part all the same.

    Attributes:
        teacher_N: float, the teacher's logprobs, nats; -inf is legal. None: nobody asked it, which
            grpo alone admits.
        old_N: float, the student's own, recomputed with the weights to be updated, nats.
        behaviour_N: float, what the worker sampled with, nats.
        mask_N: bool, true at tokens the student wrote.
        rows_N: int64, each token's sequence, 0 to B - 1.
        sequences: B.
        rewards_B: float64, verifiable rewards, NaN where there is none; None: nothing was graded.
        groups_B: int64, each sequence's prompt group, any numbers. A group is never split over
            ranks.
        labels_B: int64, whose statistics a sequence's tokens belong to, 0 to label_count - 1.
        label_count: labels of the whole batch, the same on every rank.
    """

    teacher_N: Tensor | None
    old_N: Tensor
    behaviour_N: Tensor
    mask_N: Tensor
    rows_N: Tensor
    sequences: int
    rewards_B: Tensor | None
    groups_B: Tensor
    labels_B: Tensor
    label_count: int

    @property
    def marked_N(self) -> Tensor:
        """bool, valid tokens with a teacher's mark: all of them, or none."""
        return self.mask_N if self.teacher_N is not None else torch.zeros_like(self.mask_N)
