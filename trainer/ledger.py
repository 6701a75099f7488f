"""The ledger: what became of every rollout, each (step, slot, sample) once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer.groups import Group


def ledger_rows(
    groups: Sequence[Group], step: int, incarnation: int, outcome: str
) -> Iterator[dict[str, Any]]:
    """One row a group.

    Args:
        groups: all groups of the step.
        step: the step that consumed them.
        incarnation: the run's.
        outcome: "trained", or "skipped" where the step had a non-finite gradient.
    """
    for group in groups:
        yield {
            "step": step,
            "slot": group.task.id.slot,
            "incarnation": incarnation,
            "outcome": outcome,
            "samples": [sample.index for sample in group.samples],
            "policies": [str(sample.version) for sample in group.samples],
            "tokens": sum(len(sample.ids) for sample in group.samples),
            "dropped": {str(index): why for index, why in group.dropped.items()},
        }
