"""What a batch of rollouts looks like, whatever is learnt from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.groups import Group
from trainer.guards import mean_repetition


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """By name, see docs/metrics.md; at least one group has a sample."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    metrics = {
        "sequences": len(samples),
        "response_tokens_mean": float(np.mean([len(one.ids) for one in samples])),
        "truncated": float(np.mean([one.truncated for one in samples])),
        "repetition": mean_repetition([one.ids for one in samples]),
        "dropped": sum(len(group.dropped) for group in groups),
    }
    return metrics | ({"reward": float(np.mean(rewards))} if rewards else {})
