"""What is logged of every estimator: is the signal sound? docs/metrics.md explains the names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.estimator_settings import EstimatorSettings
from trainer.estimators.batch import TokenBatch
from trainer.estimators.gndpo import mean_and_sigma
from trainer.estimators.grpo import Outcome
from trainer.estimators.moments import Moments
from trainer.tally import Tally


def add_tokens(tally: Tally, tokens: TokenBatch) -> None:
    """What is trained on, and how far the workers were from the trainer."""
    tally.add_total("tokens", _count(tokens.mask_N))
    distance_N = (tokens.behaviour_N - tokens.old_N).abs_()
    tally.add_mean("behaviour_difference", distance_N, tokens.mask_N)


def add_marks(tally: Tally, raw_N: Tensor, tokens: TokenBatch, settings: EstimatorSettings) -> None:
    """The differences as they came, -inf included.

    The clamp rates of an estimator without a clamp are what the default clip would cut.

    Args:
        tally: filled.
        raw_N: float, teacher - old, nats; 0 outside the mask.
        tokens: they are of.
        settings: for clip.
    """
    clip = settings.clip or EstimatorSettings.model_fields["clip"].default
    marked = _count(tokens.marked_N)
    impossible_N = raw_N == -torch.inf
    impossible = _count(impossible_N)
    finite_N = torch.where(impossible_N, 0.0, raw_N) if impossible else raw_N
    total = float(finite_N.sum(dtype=torch.float64))
    tally.add_total("tokens_with_teacher", marked)
    # Single-sample estimate of KL(student || teacher) per token; tokens the teacher finds
    # impossible are counted beside it instead of making it infinite.
    tally.add_share("raw_kl", -total, marked - impossible)
    tally.add_share("teacher_impossible", impossible, marked)
    tally.add_share("clamped_low", _count(raw_N < -clip), marked)
    tally.add_share("clamped_high", _count(raw_N > clip), marked)
    tally.add_quantiles("k", raw_N, tokens.marked_N)


def add_advantages(
    tally: Tally, advantages_N: Tensor, k_N: Tensor, mask_N: Tensor, marked_N: Tensor
) -> None:
    """What became of the differences.

    Args:
        tally: filled.
        advantages_N: float, 0 outside the mask.
        k_N: float, as the estimator took them; 0 outside the mask.
        mask_N: bool, tokens that take part.
        marked_N: bool, those of them with a teacher's mark.
    """
    tally.add_share("sign_flips", _count(advantages_N * k_N < 0), _count(marked_N))
    largest = -torch.inf
    if mask_N.any():
        low, high = advantages_N.aminmax()
        largest = max(-float(low), float(high))
    tally.add_maximum("advantage_max", largest)


def add_signals(tally: Tally, used: Moments, labels: Sequence[Moments]) -> None:
    """Mean and sigma, and with several labels each one's, as name/label.

    Args:
        tally: filled.
        used: of the whole batch, or running ones, whatever the estimator used.
        labels: of the whole batch, one for each label.
    """
    named = {"": used}
    if len(labels) > 1:
        named |= {f"/{label}": stats for label, stats in enumerate(labels)}
    for suffix, stats in named.items():
        mean, sigma = mean_and_sigma(stats)
        _add_known(tally, f"k_mean{suffix}", mean, stats)
        _add_known(tally, f"k_sigma{suffix}", sigma, stats)


def add_outcomes(tally: Tally, outcomes: Outcome, rewards: Moments) -> None:
    """The rewards, and how many prompt groups they say nothing about.

    Args:
        tally: filled.
        outcomes: this rank's.
        rewards: of the whole batch.
    """
    _add_known(tally, "reward", rewards.mean, rewards)
    _add_known(tally, "reward_std", (rewards.m2 / max(rewards.count - 1, 1)) ** 0.5, rewards)
    tally.add_share("groups_without_signal", outcomes.flat, outcomes.groups)


def _add_known(tally: Tally, name: str, value: float, stats: Moments) -> None:
    """A value that every rank knows: their mean is that value. Of no values it is left out."""
    known = float(stats.count > 0)
    tally.add_share(name, value * known, known)


def _count(mask_N: Tensor) -> int:
    return int(torch.count_nonzero(mask_N))
