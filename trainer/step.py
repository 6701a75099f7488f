"""One step: old logprobs, advantages over the whole batch, surrogate loss, optimiser steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modeling.groups import TokenGroup
from modeling.logprobs import TokenScores
from trainer.deal import MicroBatch, Share
from trainer.estimator_settings import EstimatorSettings, LossSettings
from trainer.estimators.batch import TokenBatch
from trainer.estimators.estimate import Estimate, estimate
from trainer.estimators.gndpo import Running
from trainer.student import Student
from trainer.surrogates import aggregate, correction, denominator, surrogate, top_k_reverse_kl
from trainer.tally import Tally
from trainer.world import World


@dataclass(frozen=True)
class StepResult:
    """What one step did, on all ranks together.

    Attributes:
        metrics: by name, as docs/metrics.md explains them.
        finite: all gradients were finite; at the first that was not, the step ended without it.
        running: the estimator's statistics to go on with.
    """

    metrics: dict[str, float]
    finite: bool
    running: Running | None


class NothingToTrain(ValueError):
    """A batch without a single token to train on."""


def train_step(
    student: Student,
    share: Share,
    world: World,
    *,
    estimator: EstimatorSettings,
    loss: LossSettings,
    max_new_tokens: int,
    running: Running | None,
) -> StepResult:
    """Train on this rank's share of a scored rollout batch. All ranks call it together.

    Args:
        student: updated in place.
        share: of the batch; see trainer/deal.py.
        world: who takes part.
        estimator, loss: settings.
        max_new_tokens: longest response, for aggregation "fixed-length".
        running: what the step before returned.

    Raises:
        NothingToTrain: no token of any sample was written by the student.
        NonFinite, SmallBatch: see trainer/estimators. All on every rank alike.
    """
    passes = share.micro_batches
    # With a single pass its logprobs are old and new: the weights are the same.
    kept = student.scores(_tokens(passes[0]), entropy=True) if len(passes) == 1 else None
    scored = [kept] if kept is not None else _old_scores(student, passes)
    batch = _token_batch(passes, scored, share.label_count)
    parts = _Part.cut(share, batch)
    totals = _totals(parts, share, loss, max_new_tokens, world)
    if sum(totals) == 0:
        raise NothingToTrain(
            f"step {share.step}: no token of any sample was written by the student"
        )
    marks = estimate(batch, estimator, running, world.gather)
    weights_N, tally = correction(batch.old_N, batch.behaviour_N, marks.mask_N, loss)
    tally = tally.merged(marks.tally)
    entropy_N = torch.cat([one.entropy_T for one in scored]).cpu()
    tally.add_mean("entropy", entropy_N, batch.mask_N)

    norms: list[float] = []
    finite = True
    for number, total in enumerate(totals):
        student.zero_gradients()
        for part in (one for one in parts if one.minibatch == number):
            new = kept if kept is not None else student.scores(_tokens(part.groups))
            value = _loss(new, part, marks, weights_N, loss, total, tally)
            # FSDP takes the mean of the ranks' gradients; the batch's is their sum.
            (value * world.size).backward()
        norm, finite = student.apply_gradients(share.step)
        norms.append(norm)
        if not finite:
            break
    sums, maxima = tally.flat()
    metrics = tally.from_flat(world.sum(sums), world.max(maxima)).metrics() | {
        "gradient_norm": max(norms),
        "learning_rate": student.learning_rate(share.step),
    }
    return StepResult(metrics, finite, marks.running if finite else running)


@dataclass(frozen=True)
class _Part:
    """A micro-batch and where its tokens and sequences lie in the rank's batch."""

    minibatch: int
    groups: MicroBatch
    batch: TokenBatch
    tokens: slice
    first_row: int
    sequences: int

    @classmethod
    def cut(cls, share: Share, batch: TokenBatch) -> list[_Part]:
        parts, token, row = [], 0, 0
        for minibatch, micro_batches in enumerate(share.minibatches):
            for groups in micro_batches:
                lengths = [len(sample.ids) for group in groups for sample in group.samples]
                tokens = slice(token, token + sum(lengths))
                parts.append(cls(minibatch, groups, batch, tokens, row, len(lengths)))
                token, row = tokens.stop, row + len(lengths)
        return parts

    @property
    def rows_N(self) -> Tensor:
        return self.batch.rows_N[self.tokens] - self.first_row


def _totals(
    parts: Sequence[_Part], share: Share, loss: LossSettings, max_new_tokens: int, world: World
) -> list[float]:
    """What each minibatch's losses are divided by, over all ranks. Tokens that an estimator or a
    correction masks still count: what is divided by does not depend on the marks."""
    own = torch.zeros(len(share.minibatches), dtype=torch.float64)
    for part in parts:
        mask_N = part.batch.mask_N[part.tokens]
        own[part.minibatch] += denominator(
            mask_N,
            part.rows_N,
            part.sequences,
            loss.aggregation,
            loss.fixed_length or max_new_tokens,
        )
    totals: list[float] = world.sum(own).tolist()
    return totals


def _loss(
    new: TokenScores,
    part: _Part,
    marks: Estimate,
    weights_N: Tensor,
    loss: LossSettings,
    total: float,
    tally: Tally,
) -> Tensor:
    """The micro-batch's share of its minibatch's loss."""
    here, rows_N, mask_N = part.tokens, part.rows_N, marks.mask_N[part.tokens]
    # A minibatch without a token to train on has no loss.
    total = max(total, 1.0)
    losses_N, clipped_N = surrogate(
        new.logprobs_T.cpu(),
        part.batch.old_N[here],
        marks.advantages_N[here],
        mask_N,
        rows_N,
        part.sequences,
        loss,
    )
    losses_N = losses_N * weights_N[here]
    if loss.top_k:
        divergence_N = top_k_reverse_kl(new.named_logprobs_TM.cpu(), _named_teacher(part), mask_N)
        tally.add_mean("top_k_kl", divergence_N, mask_N)
        losses_N = losses_N + loss.top_k_weight * divergence_N
    # Lengths are of all the student wrote, as the denominators.
    written_N = part.batch.mask_N[here]
    value = aggregate(losses_N, written_N, rows_N, part.sequences, loss.aggregation, total)
    tally.add_total("loss", value.item())
    tally.add_mean("ratio_clipped", clipped_N.double(), mask_N)
    return value


@torch.no_grad()
def _old_scores(student: Student, passes: Sequence[MicroBatch]) -> list[TokenScores]:
    return [student.scores(_tokens(groups), entropy=True) for groups in passes]


def _tokens(groups: MicroBatch) -> list[TokenGroup]:
    return [group.tokens for group in groups]


def _token_batch(
    passes: Sequence[MicroBatch], scored: Sequence[TokenScores], label_count: int
) -> TokenBatch:
    groups = [group for batch in passes for group in batch]
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        if sample.teacher is None:
            raise ValueError("a sample without teacher logprobs reached the step")
    counts = [len(group.samples) for group in groups]
    rewards = [np.nan if one.reward is None else one.reward for one in samples]
    return TokenBatch(
        teacher_N=_flat([one.teacher for one in samples], np.float32),
        old_N=torch.cat([one.logprobs_T.detach() for one in scored]).cpu(),
        behaviour_N=_flat([one.behaviour for one in samples], np.float32),
        mask_N=_flat([one.mask for one in samples], np.bool_),
        rows_N=torch.from_numpy(np.repeat(np.arange(len(samples)), [len(s.ids) for s in samples])),
        sequences=len(samples),
        groups_B=torch.from_numpy(np.repeat(np.arange(len(groups)), counts)),
        rewards_B=torch.tensor(rewards, dtype=torch.float64),
        labels_B=torch.from_numpy(
            np.repeat(np.array([one.label for one in groups], dtype=np.int64), counts)
        ),
        label_count=label_count,
    )


def _named_teacher(part: _Part) -> Tensor:
    samples = [sample for group in part.groups for sample in group.samples]
    return _flat([sample.named_teacher for sample in samples], np.float32)


def _flat(rows: Sequence[Any], dtype: type) -> Tensor:
    """All rows end to end. concatenate copies: arrays off the wire are read-only, which torch
    warns about."""
    return torch.from_numpy(np.concatenate(rows) if rows else np.empty(0, dtype))
