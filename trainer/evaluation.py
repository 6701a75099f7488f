"""Evaluation: greedy answers graded by a verifiable reward; KL to the teacher on sampled ones.

Its tasks run on the same rollout workers as training. Slots [0, n) are greedy, [n, 2n) sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from preceptor.policy import Version
from preceptor.v1 import queue_pb2
from trainer.data import Prompt
from trainer.groups import Group
from trainer.tasks import TaskMaker


def evaluation_tasks(
    maker: TaskMaker, prompts: Sequence[Prompt], policy: Version
) -> list[queue_pb2.PromptTask]:
    """Every prompt once greedy and once sampled, by `policy`."""
    return [
        maker.make(
            queue_pb2.TASK_KIND_EVALUATION,
            policy.step,
            slot,
            prompt,
            policy,
            samples=1,
            temperature=temperature,
        )
        for slot, (temperature, prompt) in enumerate(
            [(0.0, prompt) for prompt in prompts] + [(1.0, prompt) for prompt in prompts]
        )
    ]


def grade(
    groups: Sequence[Group],
    prompts: Sequence[Prompt],
    decode: Callable[[np.ndarray], str],
    reward: Callable[[str, str], float],
    common: int,
) -> dict[str, float]:
    """Metrics of an evaluation.

    Args:
        groups: answers to `evaluation_tasks`, in their order.
        prompts: what they were made from; all have answers.
        decode: response ids to text, special tokens left out.
        reward: response and answer to [0, 1].
        common: prompts, from the first, that all evaluations of the run have.

    Returns:
        accuracy (mean reward of the greedy answers; a dropped one counts 0), accuracy_common (of
        the first `common` alone, so that evaluations can be compared), accuracy by tag as
        accuracy/TAG with prompts/TAG, and raw_kl: mean over the sampled tokens of behaviour minus
        teacher logprob, nats; tokens the teacher finds impossible (-inf) are left out and counted
        as teacher_impossible. No raw_kl when no token was scored.
    """
    rewards = [
        reward(decode(group.samples[0].ids), str(prompt.answer)) if group.samples else 0.0
        for group, prompt in zip(groups, prompts, strict=False)
    ]
    metrics: dict[str, float] = {
        "prompts": len(prompts),
        "accuracy": float(np.mean(rewards)),
        "accuracy_common": float(np.mean(rewards[:common])),
    }
    for tag in sorted({prompt.tag for prompt in prompts} - {""}):
        chosen = [one for one, prompt in zip(rewards, prompts, strict=True) if prompt.tag == tag]
        metrics |= {f"accuracy/{tag}": float(np.mean(chosen)), f"prompts/{tag}": len(chosen)}
    sampled = [sample for group in groups[len(prompts) :] for sample in group.samples]
    differences = np.concatenate(
        [one.behaviour - one.teacher for one in sampled if one.teacher is not None] or [np.empty(0)]
    )
    finite = differences[np.isfinite(differences)]
    if finite.size:
        metrics["raw_kl"] = float(finite.mean())
    metrics["teacher_impossible"] = int(np.isinf(differences).sum())
    metrics["tokens_scored"] = int(differences.size)
    return metrics
