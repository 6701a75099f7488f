"""Steps on recorded groups as one rank of several: python -m tests.trainer.rank_scenarios ...

Every rank runs all scenarios one after the other; rank 0 writes what came out. The test compares it
with what one process gets (tests/trainer/test_ranks.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from modeling.load import load_model
from tests.trainer.recorded import make_groups, with_images
from trainer.crew import Crew
from trainer.groups import Group
from trainer.settings import TrainerSettings
from trainer.student import Student, whole
from trainer.world import World, join, leave

LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Scenario:
    """What to train on, and how.

    Attributes:
        model: a key of the models given on the command line.
        slots: prompt groups of a step; fewer than ranks leaves ranks without.
        settings: of the trainer, on top of the common ones.
        same_as: name of the scenario whose single process gives the right values; None: its own.
        order: seed the groups are shuffled by; None: task order.
        steps: how many.
    """

    model: str = "llama"
    slots: int = 5
    settings: dict[str, Any] = field(default_factory=dict)
    same_as: str | None = None
    order: int | None = None
    steps: int = 2


def _random(seed: int) -> Scenario:
    """Any accumulation, packing, order; always the values of the plain scenario."""
    random = np.random.default_rng(seed)
    scale = {
        "packing": bool(random.integers(2)),
        "activation_checkpointing": bool(random.integers(2)),
    }
    return Scenario(
        settings={"scale": scale, "micro_batch_tokens": int(random.integers(1, 200))},
        same_as="adamw",
        order=seed,
    )


SGD = {"optimiser": {"name": "sgd"}}
SCENARIOS: dict[str, Scenario] = {
    "adamw": Scenario(),
    "sgd": Scenario(settings=SGD),
    "accumulation": Scenario(settings=SGD | {"micro_batch_tokens": 1}, same_as="sgd"),
    "padded": Scenario(settings=SGD | {"scale": {"packing": False}}, same_as="sgd"),
    "token-mean": Scenario(
        settings=SGD | {"loss": {"aggregation": "token-mean"}, "micro_batch_tokens": 40}
    ),
    "fixed-length": Scenario(
        settings=SGD | {"loss": {"aggregation": "fixed-length"}, "micro_batch_tokens": 40}
    ),
    "minibatches": Scenario(settings=SGD | {"minibatches": 2, "micro_batch_tokens": 40}),
    "empty rank": Scenario(slots=1, settings=SGD),
    "lora": Scenario(settings=SGD | {"lora": {"rank": 4}, "micro_batch_tokens": 40}),
    "lora adamw": Scenario(settings={"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}),
    "vision": Scenario(model="llava", settings=SGD | {"micro_batch_tokens": 1}),
    "vision padded": Scenario(
        model="llava", settings=SGD | {"scale": {"packing": False}}, same_as="vision"
    ),
    "frozen tower": Scenario(
        model="llava",
        settings=SGD | {"scale": {"freeze_vision_tower": True}, "micro_batch_tokens": 1},
    ),
    "grpo": Scenario(settings=SGD | {"estimator": {"name": "grpo"}, "micro_batch_tokens": 40}),
    "ema": Scenario(settings=SGD | {"estimator": {"statistics": "ema"}}),
    **{f"random {seed}": _random(seed) for seed in range(6)},
}


def settings_of(scenario: Scenario) -> TrainerSettings:
    common: dict[str, Any] = {
        "student": "unused",
        "data": {"train": "unused"},
        "steps": 12,
        "max_new_tokens": 12,
        # A single step of SGD at this rate moves weights by about their size.
        "optimiser": {"learning_rate": LEARNING_RATE, "max_gradient_norm": 1e9},
    }
    optimiser = common["optimiser"] | scenario.settings.get("optimiser", {})
    return TrainerSettings(**common | scenario.settings | {"optimiser": optimiser})


def groups_of(scenario: Scenario, step: int) -> list[Group]:
    groups = make_groups(step, slots=scenario.slots)
    if scenario.model != "llama":
        groups = with_images(groups)
    if scenario.order is not None:
        order = np.random.default_rng(scenario.order).permutation(len(groups))
        groups = [groups[index] for index in order]
    return groups


def make_crew(scenario: Scenario, models: dict[str, Path], world: World) -> Crew:
    settings = settings_of(scenario)
    student = Student(
        load_model(models[scenario.model]),
        settings.optimiser,
        settings.steps,
        scale=settings.scale,
        lora=settings.lora,
        world=world,
    )
    return Crew(world, student, settings)


def run(scenario: Scenario, models: dict[str, Path], world: World, folder: Path) -> None:
    """Train, and on rank 0 write metrics.json and tensors.safetensors (gradients of the first step,
    weights after the last)."""
    crew = make_crew(scenario, models, world)
    metrics, gradients = [], {}
    for step in range(scenario.steps):
        if world.rank:
            crew.follow()
        else:
            metrics.append(crew.train(groups_of(scenario, step), step).metrics)
            crew.end(0)
        if step == 0:
            gradients = gradients_of(crew.student)
    weights = {
        f"weights/{name}": whole(one.detach()) for name, one in crew.student.parameters.items()
    }
    if world.rank == 0:
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps(metrics))
        tensors = gradients | weights
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "tensors")


def gradients_of(student: Student) -> dict[str, torch.Tensor]:
    # Some towers have layers whose output nobody takes.
    return {
        f"gradients/{name}": whole(one.grad).clone()
        for name, one in student.parameters.items()
        if one.grad is not None
    }


def main(arguments: Sequence[str]) -> None:
    """OUT NAME=FOLDER..."""
    torch.set_num_threads(1)
    models = {name: Path(path) for name, path in (one.split("=", 1) for one in arguments[1:])}
    world = join("cpu", sharded=False)
    for name, scenario in SCENARIOS.items():
        run(scenario, models, world, Path(arguments[0]) / name)
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
