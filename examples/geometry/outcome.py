"""What a demo run came to: its table, and whether it kept the demo's promise."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

LEAST_TEACHER = 0.90
LEAST_GAIN = 0.25
LEAST_SHARE_OF_TEACHER = 0.75
LEAST_KL_RATIO = 3.0


@dataclass(frozen=True)
class Outcome:
    """Figures of a finished run; accuracies in [0, 1], KL in nats per token.

    Attributes:
        before, after: the first and the last evaluation row of metrics.jsonl.
        steps: steps trained.
        tokens_scored: response tokens the teacher scored, evaluation included.
        counted_once: every (step, slot, sample) stands in the ledger exactly once.
    """

    teacher: float
    before: dict[str, float]
    after: dict[str, float]
    steps: int
    tokens_scored: int
    rollouts: int
    counted_once: bool
    seconds: float

    @property
    def kl_ratio(self) -> float:
        """How many times smaller the KL to the teacher became."""
        return self.before["raw_kl"] / max(self.after["raw_kl"], 1e-9)

    def broken_promises(self) -> list[str]:
        """What the run should have reached and did not; empty if all is well."""
        before, after = self.before["accuracy"], self.after["accuracy"]
        promises = {
            f"teacher accuracy >= {LEAST_TEACHER}": self.teacher >= LEAST_TEACHER,
            f"student gains >= {LEAST_GAIN}": after >= before + LEAST_GAIN,
            f"student reaches >= {LEAST_SHARE_OF_TEACHER} of the teacher": after
            >= LEAST_SHARE_OF_TEACHER * self.teacher,
            f"raw KL falls >= {LEAST_KL_RATIO:g} times": self.kl_ratio >= LEAST_KL_RATIO,
            "every rollout counted once": self.counted_once,
        }
        return [promise for promise, kept in promises.items() if not kept]

    def table(self) -> Table:
        """For people."""
        table = Table(title="On-policy distillation from the teacher's scores alone")
        for column, justify in (("", "left"), ("before", "right"), ("after", "right")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        prompts = int(self.after["prompts"])
        rows = [
            (f"student accuracy, {prompts} prompts", "accuracy"),
            (f"  combinations seen ({self.after['prompts/seen']})", "accuracy/seen"),
            (f"  combinations held out ({self.after['prompts/unseen']})", "accuracy/unseen"),
            ("raw KL to the teacher, nats per token", "raw_kl"),
        ]
        for label, key in rows:
            table.add_row(label, f"{self.before[key]:.3f}", f"{self.after[key]:.3f}")
        table.add_section()
        table.add_row("teacher accuracy", "", f"{self.teacher:.3f}")
        table.add_row("raw KL fell by a factor of", "", f"{self.kl_ratio:.1f}")
        table.add_row("steps", "", str(self.steps))
        table.add_row("tokens scored", "", f"{self.tokens_scored:,}")
        table.add_row("rollouts, each counted once", "", f"{self.rollouts:,}")
        table.add_row("seconds", "", f"{self.seconds:.0f}")
        return table


def read_outcome(folder: Path, teacher: float, samples_per_prompt: int, seconds: float) -> Outcome:
    """Read a finished run's metrics and ledger.

    Raises:
        ValueError: the run has no two evaluations, so it did not finish.
    """
    rows = _read(folder / "metrics.jsonl")
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    steps = [row for row in rows if row["event"] == "step"]
    if len(evaluations) < 2:
        raise ValueError(f"{folder}: {len(evaluations)} evaluations; the run did not finish")
    counts: Counter[tuple[int, int, int]] = Counter()
    slots: Counter[int] = Counter()
    for row in _read(folder / "ledger.jsonl"):
        slots[row["step"]] += 1
        for sample in [*row["samples"], *map(int, row["dropped"])]:
            counts[row["step"], row["slot"], sample] += 1
    per_step = set(slots.values())
    expected = len(slots) * max(per_step, default=0) * samples_per_prompt
    return Outcome(
        teacher=teacher,
        before=evaluations[0],
        after=evaluations[-1],
        steps=len(steps),
        tokens_scored=sum(int(row["tokens_with_teacher"]) for row in steps)
        + sum(row["tokens_scored"] for row in evaluations),
        rollouts=len(counts),
        counted_once=len(steps) == len(slots)
        and len(per_step) == 1
        and len(counts) == expected
        and set(counts.values()) == {1},
        seconds=seconds,
    )


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
