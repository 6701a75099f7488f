"""The one entry: advantages of a rank's tokens, with statistics of the whole rollout batch.

Ranks meet once, in `gather`. Whatever can fail is counted before and raised after, so that it
fails on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.estimator_settings import EstimatorSettings
from trainer.estimators import metrics
from trainer.estimators.batch import TokenBatch
from trainer.estimators.difference import bad_tokens, difference, refuse_bad_tokens
from trainer.estimators.gndpo import Running, Whitening, run_on, whiten, whitening
from trainer.estimators.grpo import Outcome, outcome, refuse_bad_rewards
from trainer.estimators.moments import EMPTY, Moments, merge_all, moments
from trainer.estimators.opd import opd, opd_raw
from trainer.estimators.statistics import Gather, Statistics
from trainer.tally import Tally


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a loss needs of marks and rewards.

    Attributes:
        advantages_N: float of old_N's dtype, 0 outside mask_N.
        mask_N: bool, the tokens that take part: the batch's mask, without tokens of -inf where the
            estimator has no clamp for them.
        running: statistics to hand to the next step, the same on every rank; None unless
            settings.statistics is "ema".
        tally: of this rank; merged over ranks it holds the metrics of the whole batch.
    """

    advantages_N: Tensor
    mask_N: Tensor
    running: Running | None
    tally: Tally


def estimate(
    tokens: TokenBatch, settings: EstimatorSettings, running: Running | None, gather: Gather
) -> Estimate:
    """Advantages of this rank's tokens. All ranks call it together, be it with no tokens.

    Args:
        tokens: this rank's share.
        settings: the same on every rank.
        running: what the step before returned, the same on every rank.
        gather: called exactly once; alone it is `lambda x: x[None]`.

    Raises:
        NonFinite: a valid token without a finite difference, or a sequence without a finite reward
            where the estimator needs one.
        SmallBatch: see gndpo.whitening.
    """
    raw_N = difference(_teacher(tokens, settings), tokens.old_N, tokens.mask_N)
    k_N, mask_N = _limited(raw_N, tokens.mask_N, settings)
    marked_N = mask_N & tokens.marked_N
    outcomes = _outcomes(tokens, settings)
    signal_N = k_N
    if _whitens_the_sum(settings):
        signal_N = k_N + settings.outcome_weight * _to_tokens(outcomes, tokens)
    labels_N = tokens.labels_B[tokens.rows_N] if settings.statistics == "per_teacher" else None

    stats = Statistics(
        tokens=int(torch.count_nonzero(tokens.mask_N)),
        bad_tokens=bad_tokens(raw_N),
        sequences=tokens.sequences,
        bad_rewards=_bad_rewards(tokens) if settings.needs_rewards else 0,
        rewards=_rewards(tokens),
        signals=_by_label(signal_N, marked_N, labels_N, tokens.label_count),
    ).over_ranks(gather)
    refuse_bad_tokens(int(stats.bad_tokens), int(stats.tokens))
    refuse_bad_rewards(int(stats.bad_rewards), int(stats.sequences))

    used = merge_all(stats.signals)
    next_running = None
    match settings.name:
        case "grpo":
            advantages_N = _to_tokens(outcomes, tokens)
        case "opd" | "opd_raw":
            advantages_N = k_N
        case "gndpo":
            if settings.statistics == "ema":
                next_running = run_on(running, used, settings.ema_decay)
                used = next_running.moments
            maps = _maps(stats.signals if labels_N is not None else (used,), settings)
            advantages_N = whiten(signal_N, maps, labels_N, settings.post_clip)
    if settings.outcome_weight > 0 and not _whitens_the_sum(settings):
        advantages_N = advantages_N + settings.outcome_weight * _to_tokens(outcomes, tokens)
    advantages_N = torch.where(mask_N, advantages_N, 0.0)

    tally = Tally()
    metrics.add_tokens(tally, tokens)
    metrics.add_marks(tally, raw_N, tokens, settings)
    metrics.add_advantages(tally, advantages_N, k_N, mask_N, marked_N)
    metrics.add_signals(tally, used, stats.signals)
    if outcomes is not None:
        metrics.add_outcomes(tally, outcomes, stats.rewards)
    return Estimate(advantages_N, mask_N, next_running, tally)


def _teacher(tokens: TokenBatch, settings: EstimatorSettings) -> Tensor:
    if tokens.teacher_N is not None:
        return tokens.teacher_N
    # A mark that is needed and not there is counted as bad. Where none is needed, old - old still
    # tells old logprobs that are no numbers.
    return torch.full_like(tokens.old_N, torch.nan) if settings.needs_teacher else tokens.old_N


def _limited(raw_N: Tensor, mask_N: Tensor, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    """k as the estimator takes it, and the tokens that take part."""
    if settings.name == "opd_raw" or settings.clip is None:
        return opd_raw(raw_N, mask_N)
    return opd(raw_N, settings.clip), mask_N


def _whitens_the_sum(settings: EstimatorSettings) -> bool:
    return settings.normalise == "sum" and settings.outcome_weight > 0


def _outcomes(tokens: TokenBatch, settings: EstimatorSettings) -> Outcome | None:
    if not settings.needs_rewards:
        return None
    rewards_B = tokens.rewards_B
    if rewards_B is None:
        rewards_B = torch.full((tokens.sequences,), torch.nan, dtype=torch.float64)
    std = settings.outcome_std and not _whitens_the_sum(settings)
    return outcome(rewards_B, tokens.groups_B, std=std)


def _to_tokens(outcomes: Outcome | None, tokens: TokenBatch) -> Tensor:
    assert outcomes is not None
    return outcomes.advantages_B.to(tokens.old_N.dtype)[tokens.rows_N]


def _rewards(tokens: TokenBatch) -> Moments:
    if tokens.rewards_B is None:
        return EMPTY
    return moments(tokens.rewards_B, tokens.rewards_B.isfinite())


def _bad_rewards(tokens: TokenBatch) -> int:
    return tokens.sequences - int(_rewards(tokens).count)


def _by_label(
    signal_N: Tensor, mask_N: Tensor, labels_N: Tensor | None, label_count: int
) -> tuple[Moments, ...]:
    if labels_N is None:
        return (moments(signal_N, mask_N),)
    return tuple(moments(signal_N, mask_N & (labels_N == one)) for one in range(label_count))


def _maps(signals: tuple[Moments, ...], settings: EstimatorSettings) -> list[Whitening]:
    if len(signals) == 1:
        return [whitening(signals[0], settings)]
    return [
        # A label without a token in this batch needs no map.
        whitening(stats, settings, f" of label {label}") if stats.count else Whitening(0.0, 1.0)
        for label, stats in enumerate(signals)
    ]
