"""Surrogate losses token by token, and how they add up to a batch's loss.

gspo: group sequence policy optimisation takes one ratio a sequence, from the mean of its tokens'
log-differences (GSPO, arXiv 2507.18071). Its token-level form (GSPO-token, ibid. section 4.3) keeps
that value and lets the gradient pass through each token's own logprob, so that every token can have
an advantage of its own:

    s_i   = exp( mean_t (new - old) )                      one sequence, valid tokens
    s_i,t = sg[s_i] * exp(new_t - sg[new_t])
    L     = -min( s_i,t A_t, clip(s_i,t, 1 - low, 1 + high) A_t )

ppo: the same clip on each token's own ratio exp(new_t - old_t) (PPO, arXiv 1707.06347, equation 7).

importance: -exp(new_t - old_t) A_t, not clipped: the policy gradient, reweighted to where the
sample came from (ibid., equation 6).

Everywhere: tokens are flat [N], of B sequences named by rows_N (int64, 0 to B - 1). Positions where
the mask is false may hold anything, NaN and inf included; padded batches are such.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.estimator_settings import LossSettings
from trainer.tally import Tally

Aggregation = Literal["sequence-mean", "token-mean", "fixed-length"]

LOGPROB_FLOOR = -30.0
"""Nats. Log-probabilities below it count as it in the top-k term, so that the teacher's -inf is a
strong pull (30 nats) and no infinite one."""

REST_FLOOR = 1e-8
"""Least probability of all ids that were not named: float32 logprobs tell no less from 0."""


def surrogate(
    new_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    rows_N: Tensor,
    sequences: int,
    settings: LossSettings,
) -> tuple[Tensor, Tensor]:
    """Token losses of the surrogate that the settings name.

    Args:
        new_N: float, the student's logprobs under the current weights, with gradient, nats.
        old_N: float, under the weights before the update.
        advantages_N: float.
        mask_N: bool.
        rows_N, sequences: each token's sequence, and B. A sequence is never split over calls.
        settings: name, clip_low and clip_high; the ratio's range is [1 - clip_low, 1 + clip_high].

    Returns:
        Losses [N], zero outside the mask, and a bool [N]: the clip took the gradient.
    """
    match settings.name:
        case "gspo":
            log_ratio_N = gspo_log_ratio(new_N, old_N, mask_N, rows_N, sequences)
        case "ppo" | "importance":
            log_ratio_N = token_log_ratio(new_N, old_N, mask_N)
    ratio_N = log_ratio_N.exp()
    advantages_N = torch.where(mask_N, advantages_N, 0.0)
    free_N = -ratio_N * advantages_N
    if settings.name == "importance":
        return free_N, torch.zeros_like(mask_N)
    range_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    clipped_N = -range_N * advantages_N
    return torch.maximum(free_N, clipped_N), mask_N & (clipped_N > free_N)


def token_log_ratio(new_N: Tensor, old_N: Tensor, mask_N: Tensor) -> Tensor:
    """new - old, 0 outside the mask."""
    # where() before any arithmetic: 0 * NaN would still poison the gradient.
    return torch.where(mask_N, new_N, 0.0) - torch.where(mask_N, old_N, 0.0)


def gspo_log_ratio(
    new_N: Tensor, old_N: Tensor, mask_N: Tensor, rows_N: Tensor, sequences: int
) -> Tensor:
    """log s_i,t: the value of the sequence's mean log-difference, the gradient of the token's."""
    log_ratio_N = token_log_ratio(new_N, old_N, mask_N)
    value_N = log_ratio_N.detach()
    sums_B = value_N.new_zeros(sequences, dtype=torch.float64)
    sums_B = sums_B.index_add(0, rows_N, value_N.double())
    means_B = sums_B / lengths(mask_N, rows_N, sequences).clamp(min=1)
    return means_B.to(value_N.dtype)[rows_N] + (log_ratio_N - value_N)


def lengths(mask_N: Tensor, rows_N: Tensor, sequences: int) -> Tensor:
    """Valid tokens of each sequence: float64 [B]."""
    counts_B = torch.zeros(sequences, dtype=torch.float64, device=mask_N.device)
    return counts_B.index_add(0, rows_N, mask_N.double())


def denominator(
    mask_N: Tensor, rows_N: Tensor, sequences: int, aggregation: Aggregation, fixed_length: int
) -> int:
    """What summed losses are divided by. Add it up over all ranks and micro-batches.

    Args:
        mask_N, rows_N, sequences: as for `surrogate`.
        aggregation: "sequence-mean" is the mean over sequences with a valid token of the mean over
            those tokens; "token-mean" the mean over tokens; "fixed-length" the mean over sequences
            of their sum over fixed_length (Dr. GRPO, arXiv 2503.20783, section 3.2).
        fixed_length: tokens; for "fixed-length" alone.
    """
    if aggregation == "token-mean":
        return int(torch.count_nonzero(mask_N))
    count = int(torch.count_nonzero(lengths(mask_N, rows_N, sequences)))
    return count * fixed_length if aggregation == "fixed-length" else count


def aggregate(
    losses_N: Tensor,
    mask_N: Tensor,
    rows_N: Tensor,
    sequences: int,
    aggregation: Aggregation,
    total: float,
) -> Tensor:
    """A part's share of the batch's loss, a scalar; the shares add up to it however it is split.

    Args:
        losses_N: float, with gradient.
        mask_N, rows_N, sequences: as for `surrogate`.
        aggregation: as for `denominator`.
        total: the whole batch's `denominator`. A local mean would weigh parts wrongly.
    """
    losses_N = torch.where(mask_N, losses_N, 0.0)
    if aggregation == "sequence-mean":
        lengths_B = lengths(mask_N, rows_N, sequences).clamp(min=1)
        losses_N = losses_N / lengths_B.to(losses_N.dtype)[rows_N]
    return losses_N.sum() / total


def correction(
    old_N: Tensor, behaviour_N: Tensor, mask_N: Tensor, settings: LossSettings
) -> tuple[Tensor, Tally]:
    """Weights that make up for a sampler that computes other logprobs than the trainer.

    With w = exp(old - behaviour):

        truncate    min(w, high): truncated importance sampling (TIS; Yao et al. 2025, "Your
                    Efficient RL Framework Secretly Brings You Off-Policy RL Training")
        mask        w where low <= w <= high, else 0: such tokens contribute nothing (MIS; IcePop,
                    Ling Team 2025, arXiv 2510.18855)

    Multiply token losses by the weights before `aggregate`, and leave its mask and denominator
    alone: they stay those of the whole batch, so that a token with weight 0 lowers the loss instead
    of raising its neighbours' share.

    Args:
        old_N: float, the trainer's logprobs before the update, nats.
        behaviour_N: float, those the tokens were sampled with.
        mask_N: bool.
        settings: correction, correction_low, correction_high.

    Returns:
        Weights [N], without gradient, of old's dtype, 1 outside the mask; and their metrics.
    """
    tally = Tally()
    if settings.correction == "none":
        return torch.ones_like(old_N), tally
    high = settings.correction_high
    ratio_N = token_log_ratio(old_N, behaviour_N, mask_N).detach().exp()
    above_N = ratio_N > high
    if settings.correction == "truncate":
        weights_N = ratio_N.clamp(max=high)
        name, changed_N = "correction_truncated", above_N
    else:
        changed_N = above_N | (ratio_N < settings.correction_low)
        weights_N = torch.where(changed_N, 0.0, ratio_N)
        name = "correction_masked"
    tally.add_mean("correction_mean", weights_N, mask_N)
    tally.add_mean(name, changed_N.double(), mask_N)
    return weights_N, tally


def top_k_reverse_kl(student_NK: Tensor, teacher_NK: Tensor, mask_N: Tensor) -> Tensor:
    """KL(student || teacher) over K ids and all others as one more outcome: a loss, nats a token.

    A KL between two coarser distributions: never negative, and a lower bound of that over the whole
    vocabulary (data processing inequality; Cover and Thomas, theorem 2.7.1). It is a loss with
    a gradient of its own and no reward: it does not depend on the token that was sampled, so that
    its expected policy gradient is zero.

    Args:
        student_NK: float, the student's logprobs of K ids at each position, with gradient. K may
            be 0.
        teacher_NK: float, the teacher's of the same ids; -inf becomes LOGPROB_FLOOR.
        mask_N: bool. Other positions may hold anything.

    Returns:
        [N], of student's dtype, zero outside the mask. Its gradient with respect to student_NK is
        exact: p_k (log p_k / q_k - log p_rest / q_rest), with p_rest = 1 - sum of p_k.
    """
    valid_N1 = mask_N.unsqueeze(-1)
    student_NK = torch.where(valid_N1, student_NK, LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR)
    log_p_NL = _with_rest(student_NK.detach())
    log_q_NL = _with_rest(torch.where(valid_N1, teacher_NK, LOGPROB_FLOOR))
    p_NL, gaps_NL = log_p_NL.exp(), log_p_NL - log_q_NL
    value_N = (p_NL * gaps_NL).sum(-1).clamp(min=0.0)
    # Written out: autograd through log(1 - sum p) loses the gradient where that sum is nearly 1.
    slope_NK = p_NL[:, :-1] * (gaps_NL[:, :-1] - gaps_NL[:, -1:])
    first_order_N = (slope_NK * (student_NK - student_NK.detach())).sum(-1)
    return torch.where(mask_N, value_N + first_order_N, 0.0).to(student_NK.dtype)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """log p of K ids and, last, of all others together: float64 [N, K + 1], summing to 1."""
    floored_NK = logprobs_NK.double().clamp(min=LOGPROB_FLOOR)
    rest_N1 = -torch.expm1(floored_NK.logsumexp(-1, keepdim=True))
    # Rounded logprobs may sum to more than 1.
    return torch.cat([floored_NK, rest_N1.clamp(min=REST_FLOOR).log()], -1).log_softmax(-1)
