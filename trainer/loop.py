"""The training loop of one run: the only owner of its state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from preceptor.client import TeacherClient
from preceptor.manifest import replace_text
from preceptor.policy import PolicyStore, Version
from preceptor.queue import RolloutQueue
from preceptor.v1 import queue_pb2
from trainer import rewards
from trainer.checkpoint import Checkpoints, TrainerState
from trainer.data import Prompt, training_indices
from trainer.evaluation import evaluation_tasks, grade
from trainer.groups import Group
from trainer.journal import Journal
from trainer.ledger import ledger_rows
from trainer.lineage import Lineage
from trainer.loader import Loader, StepBatch, Stopped
from trainer.metrics import Metrics
from trainer.settings import TrainerConfig
from trainer.step import train_step
from trainer.student import Student
from trainer.tasks import TaskMaker

logger = logging.getLogger(__name__)


class NonFiniteRun(RuntimeError):
    """Too many steps in a row had a non-finite gradient."""


@dataclass(frozen=True)
class Prompts:
    """What a run trains and is evaluated on."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]


class Run:
    """One run, from its checkpoint or from the start, to its last step."""

    def __init__(
        self,
        config: TrainerConfig,
        student: Student,
        prompts: Prompts,
        queue: RolloutQueue,
        teacher: TeacherClient,
        stop: threading.Event,
    ) -> None:
        """Restores the newest checkpoint and opens a new incarnation.

        Args:
            config: the whole RUN.yaml.
            student: at its initial weights.
            prompts: rendered.
            queue, teacher: connected; the teacher is known to fit the student.
            stop: asks the run to save and end between two steps.
        """
        self._config, self._settings = config, config.trainer
        self._student, self._prompts, self._queue = student, prompts, queue
        folder = config.run.dir
        self._policies = PolicyStore(folder / "policies")
        self._checkpoints = Checkpoints(folder / "checkpoints", self._settings.checkpoint.keep)
        incarnation = _next_incarnation(config)
        restored = self._checkpoints.restore(student)
        if restored is None:
            restored = TrainerState(0, Lineage(incarnation, {}), 0, 0, 0)
            lineage = restored.lineage
        else:
            lineage = restored.lineage.resumed(incarnation, restored.step)
        self._step, self._lineage = restored.step, lineage
        self._skipped_in_a_row = restored.skipped_in_a_row
        self._ledger = Journal(folder / "ledger.jsonl", restored.ledger_bytes)
        self._metrics = Metrics(folder, restored.metrics_bytes, restored.step)
        self._maker = TaskMaker(
            run=config.run.name,
            incarnation=incarnation,
            seed=config.run.seed,
            max_new_tokens=self._settings.max_new_tokens,
            eos_ids=student.loaded.eos_ids,
            suppressed_ids=student.suppressed_ids,
        )
        self._stop = stop
        self._loader = Loader(
            queue,
            teacher,
            lineage,
            max_staleness=self._settings.max_staleness,
            task_timeout_seconds=self._settings.task_timeout_seconds,
            score_batch_groups=self._settings.score_batch_groups,
            stop=stop,
        )

    def run(self) -> bool:
        """Train to the last step.

        Returns:
            Whether it got there; False when it was asked to stop. Either way a checkpoint holds
            everything up to the last whole step.

        Raises:
            NonFiniteRun: see settings, optimiser.max_skipped_steps.
            Exception: whatever ended the loader, or a batch that cannot be trained on.
        """
        try:
            self._start()
            while self._step < self._settings.steps:
                self._one_step()
            return True
        except Stopped:
            self._save()
            return False
        finally:
            self._loader.close()
            self._metrics.close()
            self._ledger.close()

    def _start(self) -> None:
        # Whatever an earlier incarnation still had out is issued again under this one.
        self._queue.clear_tasks()
        event = "resume" if self._lineage.ends else "start"
        self._metrics.write(event, self._step, {"incarnation": self._lineage.incarnation})
        logger.info("%s at step %d of %d", event, self._step, self._settings.steps)
        self._publish()
        ahead = min(self._step + self._settings.max_staleness + 1, self._settings.steps)
        if self._step == 0:
            self._evaluate(self._settings.evaluation.prompts)
        for step in range(self._step, ahead):
            self._issue(step)

    def _one_step(self) -> None:
        started, step = time.monotonic(), self._step
        batch = self._loader.wait(queue_pb2.TASK_KIND_TRAIN, step)
        trained = time.monotonic()
        result = train_step(
            self._student,
            batch.groups,
            step,
            estimator=self._settings.estimator,
            loss=self._settings.loss,
            micro_batch_tokens=self._settings.micro_batch_tokens,
        )
        self._guard(result.finite, step)
        published = time.monotonic()
        self._step += 1
        self._publish()
        following = self._step + self._settings.max_staleness
        if following < self._settings.steps:
            self._issue(following)
        outcome = "trained" if result.finite else "skipped"
        rows = ledger_rows(batch.groups, step, self._lineage.incarnation, outcome)
        self._ledger.append(*rows, durable=True)
        self._loader.finish(batch)
        ended = time.monotonic()
        timings = {
            "train_s": published - trained,
            "publish_s": ended - published,
            "step_s": ended - started,
            "tokens_per_second": result.metrics["tokens"] / (ended - started),
        }
        self._write_step(step, batch, result.metrics | timings)
        self._finish_step()

    def _finish_step(self) -> None:
        """After a step: evaluate and save where it is due."""
        settings, last = self._settings, self._step == self._settings.steps
        every = settings.evaluation.every_steps
        if last:
            self._evaluate(settings.evaluation.prompts)
        elif every and self._step % every == 0:
            self._evaluate(settings.evaluation.interim_prompts)
        if last:
            self._metrics.write("end", self._step, {})
        if last or self._step % settings.checkpoint.every_steps == 0:
            self._save()

    def _guard(self, finite: bool, step: int) -> None:
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if finite:
            return
        limit = self._settings.optimiser.max_skipped_steps
        logger.error("step %d skipped: its gradient is not finite", step)
        self._metrics.write("warning", step, {"message": "skipped: gradient not finite"})
        if self._skipped_in_a_row >= limit:
            raise NonFiniteRun(
                f"{self._skipped_in_a_row} steps in a row had a non-finite gradient "
                f"(optimiser.max_skipped_steps is {limit}); the last good checkpoint stands. Lower "
                "optimiser.learning_rate or look at the teacher's scores"
            )

    def _publish(self) -> None:
        version = Version(self._lineage.incarnation, self._step)
        folder = self._policies.publish(version, self._student.save_weights)
        self._queue.set_policy(version.message(), str(folder))
        self._policies.prune(self._settings.keep_policies)

    def _issue(self, step: int) -> None:
        settings, train = self._settings, self._prompts.train
        indices = training_indices(
            len(train), step, settings.prompts_per_step, self._config.run.seed
        )
        policy = Version(self._lineage.incarnation, self._step)
        tasks = [
            self._maker.make(
                queue_pb2.TASK_KIND_TRAIN,
                step,
                slot,
                train[index],
                policy,
                samples=settings.samples_per_prompt,
                temperature=float(settings.temperature),
            )
            for slot, index in enumerate(indices)
        ]
        self._loader.issue(tasks)

    def _evaluate(self, count: int) -> None:
        prompts = self._prompts.evaluation[:count]
        if not prompts:
            return
        started = time.monotonic()
        policy = Version(self._lineage.incarnation, self._step)
        self._loader.issue(evaluation_tasks(self._maker, prompts, policy))
        batch = self._loader.wait(queue_pb2.TASK_KIND_EVALUATION, self._step)
        metrics = grade(batch.groups, prompts, self._decode, rewards.numeric)
        self._loader.finish(batch)
        seconds = time.monotonic() - started
        values: dict[str, float | int | str] = {"policy": str(policy), "seconds": seconds}
        self._metrics.write("evaluation", self._step, values | metrics)
        logger.info(
            "evaluation at step %d: accuracy %.3f, raw KL %.3f",
            self._step,
            metrics["accuracy"],
            metrics.get("raw_kl", float("nan")),
        )

    def _write_step(self, step: int, batch: StepBatch, values: Mapping[str, float]) -> None:
        staleness = [
            self._lineage.staleness(sample.version, step) or 0
            for group in batch.groups
            for sample in group.samples
        ]
        row: dict[str, float | int | str] = {
            "steps": self._settings.steps,
            "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
            "rollout_wait_s": batch.rollout_wait_s,
            "teacher_wait_s": batch.teacher_wait_s,
            "duplicates": self._loader.duplicates,
            "reissued": self._loader.reissued,
            "invalid": self._loader.invalid,
            **values,
            **self._reward(batch.groups, step),
        }
        self._metrics.write("step", step, row)

    def _reward(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Mean verifiable reward of the rollouts, for the log alone; nothing without answers."""
        settings, train = self._settings, self._prompts.train
        indices = training_indices(
            len(train), step, settings.prompts_per_step, self._config.run.seed
        )
        values = [
            rewards.numeric(self._decode(sample.ids), answer)
            for group, index in zip(groups, indices, strict=True)
            if (answer := train[index].answer) is not None
            for sample in group.samples
        ]
        return {"reward": float(np.mean(values))} if values else {}

    def _decode(self, ids: np.ndarray) -> str:
        tokenizer = self._student.loaded.tokenizer
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _save(self) -> None:
        state = TrainerState(
            step=self._step,
            lineage=self._lineage,
            skipped_in_a_row=self._skipped_in_a_row,
            ledger_bytes=self._ledger.length,
            metrics_bytes=self._metrics.length,
        )
        folder = self._checkpoints.save(self._student, state)
        logger.info("checkpoint %s", folder)


def _next_incarnation(config: TrainerConfig) -> int:
    """A number no earlier start of this run had, on the disk before anything is published."""
    path = config.run.dir / "incarnation"
    incarnation = int(path.read_text()) + 1 if path.exists() else 0
    replace_text(path, str(incarnation))
    return incarnation
