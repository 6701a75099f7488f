"""make demo: a small vision-language student learns geometry from a teacher service's scores.

Draws the prompts, starts Redis, teacher, rollout worker and trainer on this machine by `preceptor
up`, and says what came out. Exit code 1 if the run did not keep the demo's promise.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from examples.geometry.data import write_prompts
from examples.geometry.outcome import read_outcome
from examples.geometry.teacher_accuracy import teacher_accuracy

RUN = Path(__file__).with_name("run.yaml")
EVALUATION_PROMPTS = 600


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of prompts, data order and sampling")
    parser.add_argument("--dir", type=Path, help="run folder; emptied first (runs/geometry-SEED)")
    parser.add_argument("--set", nargs="*", default=[], help="overrides, e.g. trainer.steps=10")
    arguments = parser.parse_args()
    console = Console()
    disable_progress_bar()
    started = time.monotonic()
    folder = arguments.dir or Path(f"runs/geometry-{arguments.seed}")
    if folder.exists():
        if not (folder / "launcher.lock").exists():
            sys.exit(f"{folder} exists and is no run's folder; give another --dir")
        shutil.rmtree(folder)
    settings = yaml.safe_load(RUN.read_text())
    trainer = settings["trainer"]
    train, evaluation = write_prompts(
        folder / "data",
        seed=arguments.seed,
        train=trainer["steps"] * trainer["prompts_per_step"],
        evaluation=EVALUATION_PROMPTS,
    )
    teacher = teacher_accuracy(
        Path(settings["teacher"]["model"]), evaluation, trainer["max_new_tokens"]
    )
    console.print(f"teacher accuracy on {EVALUATION_PROMPTS} evaluation prompts: {teacher:.3f}")
    overrides = {
        "run.dir": folder,
        "run.seed": arguments.seed,
        "trainer.data.train": train,
        "trainer.data.evaluation": evaluation,
    }
    command = [sys.executable, "-m", "preceptor.cli", "up", str(RUN)]
    command += [f"--{name}={value}" for name, value in overrides.items()]
    command += [f"--{one}" for one in arguments.set]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        return code
    seconds = time.monotonic() - started
    outcome = read_outcome(folder, teacher, trainer["samples_per_prompt"], seconds)
    console.print(outcome.table())
    subprocess.run([sys.executable, "-m", "preceptor.cli", "report", str(folder)], check=True)
    broken = outcome.broken_promises()
    for promise in broken:
        console.print(f"[red]not reached:[/] {promise}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
