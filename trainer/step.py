"""One step: old logprobs, advantages over the whole batch, surrogate loss, one optimiser step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.advantages import gndpo
from trainer.groups import Group
from trainer.losses import aggregate, denominator, gspo
from trainer.settings import EstimatorSettings, LossSettings
from trainer.student import Student


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        metrics: by name, as docs/metrics.md explains them.
        finite: the gradient was finite; if not, nothing was updated.
    """

    metrics: dict[str, float]
    finite: bool


class NothingToTrain(ValueError):
    """A batch without a single scored sample."""


def train_step(
    student: Student,
    groups: Sequence[Group],
    step: int,
    *,
    estimator: EstimatorSettings,
    loss: LossSettings,
    micro_batch_tokens: int,
) -> StepResult:
    """Train on a scored rollout batch.

    Args:
        student: updated in place.
        groups: all groups of the step, in task order; samples carry their teacher logprobs.
        step: counted from 0, for the schedule.
        estimator, loss: settings.
        micro_batch_tokens: upper bound of tokens in one pass; see `micro_batches`.

    Raises:
        NothingToTrain: every sample was empty or refused.
        trainer.advantages.SmallBatch, trainer.advantages.NonFinite: see gndpo.
    """
    dropped = sum(len(group.dropped) for group in groups)
    groups = [group for group in groups if group.samples]
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        raise NothingToTrain(
            f"step {step}: the teacher scored none of the samples; see the log for its reasons"
        )
    mask = pad_sequence([torch.from_numpy(one.mask) for one in samples], batch_first=True)
    teacher = _pad([_scored(one.teacher) for one in samples])
    behaviour = _pad([one.behaviour for one in samples])
    if not mask.any():
        raise NothingToTrain(f"step {step}: no token of any sample was written by the student")
    batches = list(micro_batches(groups, micro_batch_tokens))
    student.zero_gradients()
    # With a single micro-batch one forward pass serves as old and new: the weights are the same.
    kept: list[Tensor] | None = None
    if len(batches) == 1:
        kept = student.logprobs([group.tokens for group in groups])
        old_rows = [row.detach() for row in kept]
    else:
        with torch.no_grad():
            old_rows = [
                row
                for batch in batches
                for row in student.logprobs([group.tokens for group in batch])
            ]
    old = pad_sequence(old_rows, batch_first=True).cpu()
    advantages, metrics = gndpo(
        teacher, old, mask, clip=estimator.clip, small_batch=estimator.small_batch
    )
    total = denominator(mask, loss.aggregation)
    loss_sum, clipped_sum, start = 0.0, 0, 0
    for batch in batches:
        rows = kept or student.logprobs([group.tokens for group in batch])
        part = slice(start, start + len(rows))
        start += len(rows)
        new = pad_sequence(rows, batch_first=True).cpu()
        width = slice(0, new.shape[1])
        losses, clipped = gspo(
            new,
            old[part, width],
            advantages[part, width],
            mask[part, width],
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
        )
        share = aggregate(losses, mask[part, width], loss.aggregation, total)
        share.backward()
        loss_sum += share.item()
        clipped_sum += int(clipped.sum())
    norm, finite = student.apply_gradients(step)
    tokens = int(mask.sum())
    metrics |= {
        "loss": loss_sum,
        "gradient_norm": norm,
        "learning_rate": student.learning_rate(step),
        "ratio_clipped": clipped_sum / max(tokens, 1),
        "behaviour_difference": float((behaviour - old)[mask].abs().mean()),
        "sequences": len(samples),
        "tokens": tokens,
        "tokens_with_teacher": sum(len(_scored(one.teacher)) for one in samples),
        "response_tokens_mean": float(np.mean([len(one.ids) for one in samples])),
        "truncated": float(np.mean([one.truncated for one in samples])),
        "dropped": dropped,
    }
    return StepResult(metrics, finite)


def micro_batches(groups: Sequence[Group], tokens: int) -> Iterator[list[Group]]:
    """Consecutive runs of groups of at most `tokens` prompt and response tokens.

    A group is never cut, so that its prompt is computed once; one above the limit goes alone.
    """
    batch: list[Group] = []
    size = 0
    for group in groups:
        cost = len(group.tokens.prompt_ids) + sum(len(one.ids) for one in group.samples)
        if batch and size + cost > tokens:
            yield batch
            batch, size = [], 0
        batch.append(group)
        size += cost
    if batch:
        yield batch


def _scored(teacher: np.ndarray | None) -> np.ndarray:
    if teacher is None:
        raise ValueError("a sample without teacher logprobs reached the step")
    return teacher


def _pad(rows: Sequence[np.ndarray]) -> Tensor:
    # np.array copies: arrays off the wire are read-only, which torch warns about.
    return pad_sequence([torch.from_numpy(np.array(row)) for row in rows], batch_first=True)
