"""Surrogate losses: token-level GSPO.

Group sequence policy optimisation takes one ratio a sequence, from the mean of its tokens'
log-differences (GSPO, arXiv 2507.18071). Its token-level form (GSPO-token, ibid. section 4.3) keeps
that value and lets the gradient pass through each token's own logprob, so that every token can have
an advantage of its own:

    s_i   = exp( mean_t (new - old) )                      one sequence, valid tokens
    s_i,t = sg[s_i] * exp(new_t - sg[new_t])
    L     = -min( s_i,t A_t, clip(s_i,t, 1 - low, 1 + high) A_t )
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["sequence-mean", "token-mean"]


def gspo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Token losses of the token-level GSPO surrogate.

    Args:
        new: float [B, T], the student's logprobs under the current weights, with gradient.
        old: float [B, T], under the weights before the update.
        advantages: float [B, T].
        mask: bool [B, T]. Positions where it is false may hold anything, NaN and inf included.
        clip_low, clip_high: the ratio's range is [1 - clip_low, 1 + clip_high].

    Returns:
        Losses [B, T], zero outside the mask, and a bool [B, T]: the clip took the gradient.
    """
    # where() before any arithmetic: 0 * NaN would still poison the gradient.
    new = torch.where(mask, new, 0.0)
    old = torch.where(mask, old, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = ((new - old).sum(-1, keepdim=True) / lengths).detach()
    ratio = torch.exp(log_ratio + new - new.detach())
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(free, clipped), mask & (clipped > free)


def denominator(mask: Tensor, aggregation: Aggregation) -> int:
    """What the whole batch's summed losses are divided by: sequences with a valid token, or tokens.

    Args:
        mask: bool [B, T] of the whole batch, all micro-batches together.
        aggregation: "sequence-mean" is the mean over sequences of the mean over their tokens.
    """
    if aggregation == "token-mean":
        return int(mask.sum())
    return int(mask.any(-1).sum())


def aggregate(losses: Tensor, mask: Tensor, aggregation: Aggregation, total: int) -> Tensor:
    """A micro-batch's share of the batch's loss; the shares add up to it however it is split.

    Args:
        losses, mask: [B, T] of the micro-batch.
        aggregation: as for `denominator`.
        total: the whole batch's `denominator`. A local mean would weigh micro-batches wrongly.

    Returns:
        A scalar.
    """
    losses = torch.where(mask, losses, 0.0)
    if aggregation == "token-mean":
        return losses.sum() / total
    lengths = mask.sum(-1).clamp(min=1)
    return (losses.sum(-1) / lengths).sum() / total
