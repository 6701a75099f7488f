"""A run's loop in this process: real Redis, a scripted teacher over gRPC, a worker in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import redis

from modeling.load import load_model
from preceptor.client import TeacherClient
from preceptor.codec import encode_ids, encode_logprobs
from preceptor.config import as_yaml
from preceptor.queue import RolloutQueue
from preceptor.v1 import queue_pb2
from tests.client.scripted_teacher import ScriptedTeacher, serving
from trainer.crew import Crew
from trainer.data import Prompt
from trainer.loop import Prompts, Run
from trainer.rewards import load_reward
from trainer.settings import TrainerConfig
from trainer.student import ALONE, Student

STEPS, PROMPTS, SAMPLES = 5, 2, 2
EOS = 2


class ThreadWorker:
    """Answers tasks with seeded random ids under the policy they ask for.

    Attributes:
        hold: step whose training tasks (or, as -1, evaluation tasks after step 0) are not answered.
        tasks: every task answered.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.hold: int | None = None
        self.tasks: list[queue_pb2.PromptTask] = []
        self._queue = RolloutQueue(client, "loop", "w0")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ThreadWorker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for claim in self._queue.claim_tasks(64, block_seconds=0.1):
                task = claim.message
                training = task.kind == queue_pb2.TASK_KIND_TRAIN
                key = task.id.step if training else -1 if task.id.step else None
                if self.hold is not None and key == self.hold:
                    continue
                self.tasks.append(task)
                self._queue.finish_task(claim, answer(task))


def answer(task: queue_pb2.PromptTask) -> queue_pb2.RolloutGroup:
    """A group with as many random responses as asked for, each ended by EOS."""
    group = queue_pb2.RolloutGroup(
        id=task.id, kind=task.kind, prompt=task.prompt, sampling=task.sampling, worker="w0"
    )
    random = np.random.default_rng(task.sampling.seed)
    for sample in range(task.samples):
        ids = [*random.integers(5, 96, random.integers(1, 6)).tolist(), EOS]
        rollout = group.rollouts.add(
            sample=sample,
            response_ids=encode_ids(ids),
            behaviour_logprobs=encode_logprobs(np.full(len(ids), -4.0)),
            finish_reason=queue_pb2.FINISH_REASON_STOP,
        )
        rollout.policy_spans.add(version=task.policy, count=len(ids))
    return group


class SmallLoop:
    """Starts runs in one folder, one after the other."""

    def __init__(self, folder: Path, model: Path, client: redis.Redis, address: str) -> None:
        self.folder = folder
        self.stop = threading.Event()
        self._model, self._client, self._address = model, client, address

    def run(self, evaluation: int = 0, **changes: object) -> Run:
        """A run that was not started yet. Prompts have answers; `evaluation` of them are graded."""
        settings = {
            "student": self._model,
            "data": {"train": "unused"},
            "steps": STEPS,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": 8,
            "optimiser": {"learning_rate": 1e-3},
            # The scripted teacher is certain of everything, a random student of nothing.
            "estimator": {"clip": 100.0},
            "checkpoint": {"every_steps": 2},
            **changes,
        }
        config = TrainerConfig(
            run={"name": "loop", "dir": self.folder, "seed": 1}, trainer=settings
        )
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.yaml").write_text(as_yaml(config.resolved()))
        trainer = config.trainer
        student = Student(
            load_model(self._model), trainer.optimiser, trainer.steps, lora=trainer.lora
        )
        prompts = [Prompt(np.array([7, 8, 9 + i]), (), "12", "") for i in range(8)]
        self.stop.clear()
        return Run(
            config,
            Crew(ALONE, student, config.trainer),
            Prompts(prompts, prompts[:evaluation], load_reward("numeric")),
            RolloutQueue(self._client, "loop", "trainer"),
            TeacherClient(self._address, student="s"),
            self.stop,
        )

    def rows(self, name: str) -> list[dict]:
        """A journal's rows so far; nothing before it exists."""
        path = self.folder / name
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def events(self) -> list[tuple[str, int]]:
        """(event, step) of the metrics."""
        return [(row["event"], row["step"]) for row in self.rows("metrics.jsonl")]


@contextmanager
def small_loop(folder: Path, model: Path, client: redis.Redis) -> Iterator[SmallLoop]:
    """A SmallLoop with its scripted teacher."""
    with serving(ScriptedTeacher()) as address:
        yield SmallLoop(folder, model, client, address)
