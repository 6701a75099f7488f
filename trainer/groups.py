"""Rollout groups on their way to a step: checked against their task, then scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from modeling.groups import TokenGroup
from preceptor.codec import (
    CodecError,
    Score,
    TeacherRefusal,
    decode_id_table,
    decode_ids,
    decode_logprobs,
    decode_mask,
)
from preceptor.policy import Version
from preceptor.v1 import common_pb2, queue_pb2, teacher_pb2
from trainer.lineage import Lineage


class InvalidGroup(ValueError):
    """A rollout group that does not answer its task."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One rollout of n tokens.

    Attributes:
        index: its sample index in the group.
        ids: int32 [n], the EOS that ended it included. Empty: the student wrote nothing.
        behaviour: float32 [n], logprobs the worker sampled with, nats.
        mask: bool [n], true where the student wrote.
        truncated: it ended at max_new_tokens.
        version: oldest policy among its tokens'.
        named_ids: int32 [n, K], the student's likeliest ids at each token; K may be 0.
        teacher: float32 [n], the teacher's logprobs, nats; None until scored.
        named_teacher: float32 [n, K], the teacher's logprobs of named_ids; None until scored.
        reward: verifiable reward; None until graded, and without an answer to grade by.
    """

    index: int
    ids: NDArray[np.int32]
    behaviour: NDArray[np.float32]
    mask: NDArray[np.bool_]
    truncated: bool
    version: Version
    named_ids: NDArray[np.int32]
    teacher: NDArray[np.float32] | None = None
    named_teacher: NDArray[np.float32] | None = None
    reward: float | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt with its rollouts, as a step uses them.

    Attributes:
        task: what was asked for.
        samples: those that count.
        dropped: sample index -> why it does not (empty, refused by the teacher).
        label: whose statistics its tokens belong to, counted from 0; see estimators.
    """

    task: queue_pb2.PromptTask
    samples: tuple[Sample, ...]
    dropped: dict[int, str] = field(default_factory=dict)
    label: int = 0

    @property
    def tokens(self) -> TokenGroup:
        """The group as modeling wants it."""
        return TokenGroup(
            prompt_ids=decode_ids(self.task.prompt.token_ids),
            responses=tuple(sample.ids for sample in self.samples),
            images=tuple(image.data for image in self.task.prompt.images),
            named_ids=tuple(sample.named_ids for sample in self.samples),
        )


def check_group(
    task: queue_pb2.PromptTask,
    group: queue_pb2.RolloutGroup,
    lineage: Lineage,
    max_staleness: int,
    vocabulary: int,
) -> Group:
    """Hold a rollout group against the task it answers, and read it.

    A sample without tokens is dropped and counted; it is no fault.

    Args:
        task: what was asked for.
        group: what came.
        lineage, max_staleness: which policies' tokens are accepted.
        vocabulary: the student's embedding rows.

    Raises:
        InvalidGroup: another prompt, other sampling settings or sample indices than asked for,
            arrays that do not fit each other, ids outside the vocabulary, suppressed or too many,
            a finish reason they belie, a policy outside the lineage or too old.
    """
    if group.sampling != task.sampling:
        raise InvalidGroup(f"it was sampled with {_line(group.sampling)}")
    ours, theirs = task.prompt, group.prompt
    same_images = [one.sha256 for one in ours.images] == [one.sha256 for one in theirs.images]
    if ours.token_ids != theirs.token_ids or not same_images:
        raise InvalidGroup("its prompt is not the task's")
    indices = sorted(rollout.sample for rollout in group.rollouts)
    if indices != list(range(task.samples)):
        raise InvalidGroup(f"samples {indices} for a task of {task.samples}")
    suppressed = decode_ids(task.sampling.suppressed_ids)
    samples, dropped = [], {}
    for rollout in sorted(group.rollouts, key=lambda one: one.sample):
        try:
            sample = _read(rollout, task.sampling.named_top_k)
        except CodecError as error:
            raise InvalidGroup(f"sample {rollout.sample}: {error}") from error
        if len(sample.ids) == 0:
            dropped[sample.index] = "empty"
            continue
        if ((sample.ids < 0) | (sample.ids >= vocabulary)).any():
            raise InvalidGroup(f"sample {sample.index} has an id outside [0, {vocabulary})")
        if ((sample.named_ids < 0) | (sample.named_ids >= vocabulary)).any():
            raise InvalidGroup(f"sample {sample.index} names an id outside [0, {vocabulary})")
        if np.isin(sample.ids[sample.mask], suppressed).any():
            raise InvalidGroup(f"sample {sample.index} holds an id that sampling may not produce")
        _check_end(task.sampling, rollout, sample)
        for span in rollout.policy_spans:
            version = Version.of(span.version)
            if not lineage.accepts(version, task.id.step, max_staleness):
                raise InvalidGroup(
                    f"sample {sample.index} was written by policy {version}; step {task.id.step} "
                    f"of incarnation {lineage.incarnation} accepts max_staleness {max_staleness}"
                )
        samples.append(sample)
    return Group(task, tuple(samples), dropped)


def with_scores(group: Group, scores: Sequence[Score | TeacherRefusal]) -> Group:
    """The group with the teacher's marks, one entry of `scores` per sample in order.

    What the teacher refused is dropped with its reason; nothing is filled in for it.
    """
    samples, dropped = [], dict(group.dropped)
    for sample, score in zip(group.samples, scores, strict=True):
        if isinstance(score, TeacherRefusal):
            dropped[sample.index] = teacher_pb2.Refusal.Name(score.refusal)
        else:
            samples.append(
                replace(sample, teacher=score.logprobs, named_teacher=score.named_logprobs)
            )
    return replace(group, samples=tuple(samples), dropped=dropped)


def _read(rollout: queue_pb2.Rollout, named: int) -> Sample:
    ids = decode_ids(rollout.response_ids)
    count = len(ids)
    if sum(span.count for span in rollout.policy_spans) != count:
        raise CodecError(f"policy spans do not add up to {count} tokens")
    versions = [Version.of(span.version) for span in rollout.policy_spans]
    return Sample(
        index=rollout.sample,
        ids=ids,
        behaviour=decode_logprobs(rollout.behaviour_logprobs, count),
        mask=decode_mask(rollout.loss_mask, count).astype(bool),
        truncated=rollout.finish_reason == queue_pb2.FINISH_REASON_LENGTH,
        version=min(versions, default=Version(0, 0)),
        named_ids=decode_id_table(rollout.named_ids, count, named),
    )


def _check_end(
    sampling: common_pb2.SamplingSettings, rollout: queue_pb2.Rollout, sample: Sample
) -> None:
    """The response ends as its finish reason says."""
    count, limit = len(sample.ids), sampling.max_new_tokens
    if count > limit:
        raise InvalidGroup(f"sample {sample.index} has {count} tokens, max_new_tokens is {limit}")
    if rollout.finish_reason == queue_pb2.FINISH_REASON_STOP:
        fits = sample.ids[-1] in decode_ids(sampling.eos_ids)
    else:
        fits = rollout.finish_reason == queue_pb2.FINISH_REASON_LENGTH and count == limit
    if not fits:
        reason = queue_pb2.FinishReason.Name(rollout.finish_reason)
        raise InvalidGroup(
            f"sample {sample.index}: {reason} after {count} tokens ending in {sample.ids[-1]}"
        )


def _line(message: common_pb2.SamplingSettings) -> str:
    return ", ".join(str(message).split("\n")).strip(", ")
