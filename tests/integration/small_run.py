"""A small run of the geometry example under the launcher, in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from examples.geometry.data import write_prompts

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES = 6, 2


@dataclass(frozen=True)
class SmallRun:
    """A RUN.yaml and where its run keeps its files."""

    file: Path
    folder: Path

    def command(self) -> list[str]:
        """What starts it."""
        return [sys.executable, "-m", "preceptor.cli", "up", str(self.file)]

    def start(self) -> subprocess.Popen[str]:
        """Start it; its output is a pipe."""
        return subprocess.Popen(
            self.command(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rows(self, name: str) -> list[dict]:
        """What a journal holds so far; nothing before it exists."""
        path = self.folder / name
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def steps(self) -> list[int]:
        """Steps in the metrics so far."""
        return [row["step"] for row in self.rows("metrics.jsonl") if row["event"] == "step"]


def make_run(
    folder: Path, steps: int, launch: dict[str, object] | None = None, **trainer: object
) -> SmallRun:
    """Prompts and RUN.yaml of a run of `steps` steps of 6 prompts x 2 samples."""
    train, evaluation = write_prompts(folder / "data", seed=0, train=60, evaluation=12)
    models = ROOT / "examples" / "geometry" / "models"
    settings = {
        "run": {"name": "small", "dir": str(folder / "run"), "seed": 3},
        "launch": {"restart_backoff_seconds": 0.2, "restart_budget": 20} | (launch or {}),
        "redis": {"lease_seconds": 2.0},
        "teacher": {"model": str(models / "teacher"), "threads": 1},
        "rollout": {"model": str(models / "student"), "threads": 1},
        "trainer": {
            "student": str(models / "student"),
            "data": {"train": str(train), "evaluation": str(evaluation)},
            "threads": 1,
            "steps": steps,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": 24,
            "task_timeout_seconds": 20,
            "optimiser": {"learning_rate": 1e-4},
            "checkpoint": {"every_steps": 4},
            **trainer,
        },
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return SmallRun(file, folder / "run")


def ledger_keys(run: SmallRun) -> list[tuple[int, int, int]]:
    """(step, slot, sample) of every rollout in the ledger, dropped ones included."""
    return [
        (row["step"], row["slot"], sample)
        for row in run.rows("ledger.jsonl")
        for sample in [*row["samples"], *map(int, row["dropped"])]
    ]


def every_rollout_once(steps: int) -> list[tuple[int, int, int]]:
    """What the ledger of a finished run must hold, in any order."""
    return [
        (step, slot, sample)
        for step in range(steps)
        for slot in range(PROMPTS)
        for sample in range(SAMPLES)
    ]


def processes_of(run: SmallRun, part: str) -> list[psutil.Process]:
    """The running processes of a part of this run."""
    needles = {
        "redis": ["redis-server"],
        "teacher": ["services.teacher", str(run.file)],
        "rollout": ["services.rollout", str(run.file)],
        "trainer": ["-m trainer", str(run.file)],
        "any": [str(run.folder.parent)],
    }[part]
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if part == "redis" and process.cwd() != str(run.folder / "redis"):
                continue
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
        if all(needle in line for needle in needles):
            found.append(process)
    return found
