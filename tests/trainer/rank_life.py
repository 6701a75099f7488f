"""A crew that is saved, ended and taken up again, or gets a bad gradient: as one rank of several.

python -m tests.trainer.rank_life MODEL CHECKPOINTS OUT FIRST LAST [BAD_STEP]

Trains steps FIRST to LAST on recorded groups: from the newest checkpoint unless FIRST is 0, with a
checkpoint after the last. At BAD_STEP one entry of the last rank's gradient is NaN. Rank 0 writes
the weights to OUT, and beside them which steps were taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tests.trainer.rank_scenarios import Scenario, groups_of, make_crew
from trainer.checkpoint import Checkpoints, TrainerState
from trainer.crew import Crew
from trainer.lineage import Lineage
from trainer.settings import CheckpointSettings
from trainer.student import Student, whole
from trainer.world import World, join, leave

SCENARIO = Scenario(
    settings={
        "optimiser": {"schedule": "cosine", "warmup_steps": 2},
        "estimator": {"statistics": "ema"},
        "micro_batch_tokens": 40,
    }
)


def live(
    model: Path,
    world: World,
    checkpoints: Path,
    out: Path,
    first: int,
    last: int,
    bad_step: int | None = None,
) -> None:
    """See above."""
    crew = make_crew(SCENARIO, {"llama": model}, world)
    if bad_step is not None and world.rank == world.size - 1:
        spoil(crew.student, bad_step)
    if world.rank:
        crew.follow()
    else:
        finite = lead(crew, Checkpoints(checkpoints, CheckpointSettings()), first, last)
        crew.end(0)
        out.with_suffix(".json").write_text(json.dumps(finite))
    weights = {name: whole(one.detach()) for name, one in crew.student.parameters.items()}
    if world.rank == 0:
        save_file({name: one.contiguous() for name, one in weights.items()}, out)


def lead(crew: Crew, checkpoints: Checkpoints, first: int, last: int) -> list[bool]:
    """Rank 0's part; returns which of the steps were taken."""
    if first:
        restored = checkpoints.restore(crew, {})
        assert restored is not None and restored.step == first
    finite = [crew.train(groups_of(SCENARIO, step), step).finite for step in range(first, last)]
    running = None if crew.running is None else crew.running.to_dict()
    state = TrainerState(last, Lineage(0, {}), 0, {}, running, -1, None, None, 0, 0, {})
    checkpoints.save(crew, state)
    checkpoints.wait()
    return finite


def spoil(student: Student, bad_step: int) -> None:
    """Make one entry of this rank's own gradient NaN before that step's update."""
    apply = student.apply_gradients

    def spoiled(step: int) -> tuple[float, bool]:
        if step == bad_step:
            gradients = (one.grad for one in student.parameters.values() if one.grad is not None)
            parts = (one.to_local() if isinstance(one, DTensor) else one for one in gradients)
            next(part for part in parts if part.numel()).view(-1)[0] = torch.nan
        return apply(step)

    student.apply_gradients = spoiled  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    """MODEL CHECKPOINTS OUT FIRST LAST [BAD_STEP]"""
    torch.set_num_threads(1)
    model, checkpoints, out = map(Path, arguments[:3])
    live(model, join("cpu", sharded=False), checkpoints, out, *map(int, arguments[3:]))
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
