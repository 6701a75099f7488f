"""The training loop of one run: the only owner of its state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modeling.fingerprint import weights_hash
from preceptor.client import TeacherClient
from preceptor.manifest import replace_text, sweep
from preceptor.policy import PolicyStore, Version
from preceptor.queue import RolloutQueue
from preceptor.v1 import queue_pb2
from trainer import rewards
from trainer.checkpoint import Checkpoints, TrainerState, UnusableCheckpoint
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
            config: the whole RUN.yaml. Nobody else may work in its run.dir.
            student: at its initial weights.
            prompts: rendered.
            queue, teacher: connected; the teacher is known to fit the student.
            stop: asks the run to save and end between two steps.

        Raises:
            UnusableCheckpoint: the run cannot go on from what it left.
        """
        self._config, self._settings = config, config.trainer
        self._student, self._prompts, self._queue = student, prompts, queue
        folder = config.run.dir
        self._policies = PolicyStore(folder / "policies")
        sweep(self._policies.folder)
        self._checkpoints = Checkpoints(folder / "checkpoints", self._settings.checkpoint.keep)
        self._identity = _identity(config, student, prompts, teacher)
        restored = self._checkpoints.restore(student, self._identity)
        incarnation = _next_incarnation(config)
        if restored is None:
            lineage = Lineage(incarnation, {})
            restored = TrainerState(0, lineage, 0, -1, 0, 0, self._identity)
        else:
            lineage = restored.lineage.resumed(incarnation, restored.step)
        if restored.step > self._settings.steps:
            raise UnusableCheckpoint(
                f"the run is at step {restored.step} already, trainer.steps is "
                f"{self._settings.steps}"
            )
        self._step, self._lineage = restored.step, lineage
        self._skipped_in_a_row = restored.skipped_in_a_row
        self._evaluated = restored.evaluated
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
        self._loader = Loader(
            queue,
            teacher,
            lineage,
            vocabulary=student.loaded.embedding_rows,
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
            if self._step == self._settings.steps and not self._evaluation_due():
                logger.info("the run is complete: step %d", self._step)
                return True
            self._start()
            self._evaluate_if_due()
            ahead = self._step + self._settings.max_staleness + 1
            for step in range(self._step, min(ahead, self._settings.steps)):
                self._issue(step)
            while self._step < self._settings.steps:
                self._one_step()
                self._evaluate_if_due()
                every = self._settings.checkpoint.every_steps
                if self._step % every == 0 and self._step < self._settings.steps:
                    self._save()
            self._metrics.write("end", self._step, {})
            self._save()
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
        self._ledger.append(*ledger_rows(batch.groups, step, self._lineage.incarnation, outcome))
        # The groups may leave the queue: what a crash undoes is issued again from the checkpoint.
        self._loader.finish(batch)
        ended = time.monotonic()
        row: dict[str, float | int | str] = {
            "steps": self._settings.steps,
            **self._batch_metrics(batch, step),
            **result.metrics,
            "train_s": published - trained,
            "publish_s": ended - published,
            "step_s": ended - started,
            "tokens_per_second": result.metrics["tokens"] / (ended - started),
        }
        self._metrics.write("step", step, row)

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

    def _policy(self) -> Version:
        return Version(self._lineage.incarnation, self._step)

    def _publish(self) -> None:
        self._policies.publish(self._policy(), self._student.save_weights)
        self._policies.prune(self._settings.keep_policies)

    def _issue(self, step: int) -> None:
        tasks = [
            self._maker.make(
                queue_pb2.TASK_KIND_TRAIN,
                step,
                slot,
                prompt,
                self._policy(),
                samples=self._settings.samples_per_prompt,
                temperature=float(self._settings.temperature),
            )
            for slot, prompt in enumerate(self._prompts_of(step))
        ]
        self._loader.issue(tasks)

    def _prompts_of(self, step: int) -> list[Prompt]:
        train = self._prompts.train
        indices = training_indices(
            len(train), step, self._settings.prompts_per_step, self._config.run.seed
        )
        return [train[index] for index in indices]

    def _evaluation_due(self) -> bool:
        if not self._prompts.evaluation or self._evaluated == self._step:
            return False
        every = self._settings.evaluation.every_steps
        between = every > 0 and self._step % every == 0
        return self._step in (0, self._settings.steps) or between

    def _evaluate_if_due(self) -> None:
        if not self._evaluation_due():
            return
        settings = self._settings.evaluation
        ends = self._step in (0, self._settings.steps)
        prompts = self._prompts.evaluation[: settings.prompts if ends else settings.interim_prompts]
        started = time.monotonic()
        self._loader.issue(evaluation_tasks(self._maker, prompts, self._policy()))
        batch = self._loader.wait(queue_pb2.TASK_KIND_EVALUATION, self._step)
        metrics = grade(batch.groups, prompts, self._decode, rewards.numeric)
        self._loader.finish(batch)
        seconds = time.monotonic() - started
        values: dict[str, float | int | str] = {"policy": str(self._policy()), "seconds": seconds}
        self._metrics.write("evaluation", self._step, values | metrics)
        self._evaluated = self._step
        logger.info(
            "evaluation at step %d: accuracy %.3f, raw KL %.3f",
            self._step,
            metrics["accuracy"],
            metrics.get("raw_kl", float("nan")),
        )

    def _batch_metrics(self, batch: StepBatch, step: int) -> dict[str, float]:
        staleness = [
            self._lineage.staleness(sample.version, step) or 0
            for group in batch.groups
            for sample in group.samples
        ]
        return {
            "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
            "rollout_wait_s": batch.rollout_wait_s,
            "teacher_wait_s": batch.teacher_wait_s,
            "duplicates": self._loader.duplicates,
            "reissued": self._loader.reissued,
            "invalid": self._loader.invalid,
            **self._reward(batch.groups, step),
        }

    def _reward(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Mean verifiable reward of the rollouts, for the log alone; nothing without answers."""
        values = [
            rewards.numeric(self._decode(sample.ids), prompt.answer)
            for group, prompt in zip(groups, self._prompts_of(step), strict=True)
            if prompt.answer is not None
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
            evaluated=self._evaluated,
            ledger_bytes=self._ledger.durable_length(),
            metrics_bytes=self._metrics.durable_length(),
            identity=self._identity,
        )
        folder = self._checkpoints.save(self._student, state)
        logger.info("checkpoint %s", folder)


def _identity(
    config: TrainerConfig, student: Student, prompts: Prompts, teacher: TeacherClient
) -> dict[str, Any]:
    """What a run cannot change midway: its step would no longer be its data cursor, its advantages
    would come from another teacher."""
    return {
        "run.name": config.run.name,
        "run.seed": config.run.seed,
        "trainer.student": weights_hash(student.loaded.folder),
        "trainer.prompts_per_step": config.trainer.prompts_per_step,
        "trainer.samples_per_prompt": config.trainer.samples_per_prompt,
        "training prompts": len(prompts.train),
        "the teacher's identity": teacher.describe().identity,
    }


def _next_incarnation(config: TrainerConfig) -> int:
    """A number no earlier start of this run had, on the disk before anything is published."""
    path = config.run.dir / "incarnation"
    incarnation = int(path.read_text()) + 1 if path.exists() else 0
    replace_text(path, str(incarnation))
    return incarnation
