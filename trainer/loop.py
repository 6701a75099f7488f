"""The training loop of one run: the only owner of its state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from modeling.adapters import save_adapter
from modeling.fingerprint import weights_hash
from modeling.load import save_model
from modeling.probe import write_probe
from preceptor.client import TeacherClient
from preceptor.codec import prompt_message
from preceptor.manifest import replace_text, sweep
from preceptor.policy import PolicyStore, Version
from preceptor.queue import RolloutQueue
from preceptor.v1 import common_pb2, queue_pb2
from trainer.checkpoint import Checkpoints, TrainerState, UnusableCheckpoint
from trainer.crew import Crew
from trainer.data import Prompt, training_indices
from trainer.evaluation import evaluation_tasks, grade
from trainer.groups import Group
from trainer.guards import Guards
from trainer.journal import Journal
from trainer.ledger import ledger_rows
from trainer.lineage import Lineage
from trainer.loader import Loader, StepBatch, Stopped
from trainer.metrics import Metrics
from trainer.rewards import Reward
from trainer.rollout_metrics import rollout_metrics
from trainer.settings import TrainerConfig
from trainer.tasks import TaskMaker

logger = logging.getLogger(__name__)


class NonFiniteRun(RuntimeError):
    """Too many steps in a row had a non-finite gradient."""


@dataclass(frozen=True)
class Prompts:
    """What a run trains and is evaluated on."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    reward: Reward


class Run:
    """One run, from its checkpoint or from the start, to its last step. Rank 0's."""

    def __init__(
        self,
        config: TrainerConfig,
        crew: Crew,
        prompts: Prompts,
        queue: RolloutQueue,
        teacher: TeacherClient,
        stop: threading.Event,
    ) -> None:
        """Restores the newest checkpoint and opens a new incarnation.

        Args:
            config: the whole RUN.yaml. Nobody else may work in its run.dir.
            crew: the student, at its initial weights.
            prompts: rendered.
            queue, teacher: connected; the teacher is known to fit the student.
            stop: asks the run to save and end between two steps.

        Raises:
            UnusableCheckpoint: the run cannot go on from what it left.
        """
        self._config, self._settings = config, config.trainer
        self._crew, self._prompts, self._queue = crew, prompts, queue
        self._loaded = crew.student.loaded
        folder = config.run.dir
        self._policies = PolicyStore(folder / "policies")
        sweep(self._policies.folder)
        self._checkpoints = Checkpoints(folder / "checkpoints", self._settings.checkpoint)
        self._identity = _identity(config, crew, prompts, teacher)
        restored = self._checkpoints.restore(crew, self._identity)
        incarnation = _next_incarnation(config)
        if restored is None:
            lineage = Lineage(incarnation, {})
            restored = TrainerState(0, lineage, 0, {}, None, -1, None, None, 0, 0, self._identity)
        else:
            lineage = restored.lineage.resumed(incarnation, restored.step)
        if restored.step > self._settings.steps:
            raise UnusableCheckpoint(
                f"the run is at step {restored.step} already, trainer.steps is "
                f"{self._settings.steps}"
            )
        self._step, self._lineage = restored.step, lineage
        self._skipped_in_a_row = restored.skipped_in_a_row
        self._guards = Guards(self._settings.guards, restored.strikes)
        self._evaluated, self._accuracy = restored.evaluated, restored.accuracy
        self._best = restored.best
        self._ledger = Journal(folder / "ledger.jsonl", restored.ledger_bytes)
        self._metrics = Metrics(folder, restored.metrics_bytes, restored.step)
        self._maker = TaskMaker(
            run=config.run.name,
            incarnation=incarnation,
            seed=config.run.seed,
            max_new_tokens=self._settings.max_new_tokens,
            eos_ids=self._loaded.eos_ids,
            suppressed_ids=crew.student.suppressed_ids,
            named_top_k=self._settings.loss.top_k,
        )
        self._loader = Loader(
            queue,
            teacher,
            lineage,
            vocabulary=self._loaded.embedding_rows,
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
                best = self._evaluate_if_due()
                due = best or self._step % self._settings.checkpoint.every_steps == 0
                if due and self._step < self._settings.steps:
                    self._save()
            self._metrics.write("end", self._step, {})
            self._save()
            self._checkpoints.wait()
            return True
        except Stopped:
            self._save()
            self._checkpoints.wait()
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
        groups = self._graded(batch.groups, step)
        trained = time.monotonic()
        result = self._crew.train(groups, step)
        self._guard(result.finite, step)
        published = time.monotonic()
        self._step += 1
        self._accuracy = None
        self._publish()
        following = self._step + self._settings.max_staleness
        if following < self._settings.steps:
            self._issue(following)
        outcome = "trained" if result.finite else "skipped"
        self._ledger.append(*ledger_rows(groups, step, self._lineage.incarnation, outcome))
        # The groups may leave the queue: what a crash undoes is issued again from the checkpoint.
        self._loader.finish(batch)
        ended = time.monotonic()
        metrics = self._batch_metrics(batch, groups, step) | result.metrics
        row: dict[str, float | int | str] = {
            "steps": self._settings.steps,
            **metrics,
            "train_s": published - trained,
            "publish_s": ended - published,
            "step_s": ended - started,
            "tokens_per_second": metrics["tokens"] / (ended - started),
        }
        self._metrics.write("step", step, row)
        self._guards.check(metrics)

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
        tensors, probe = self._crew.gathered(), self._crew.probe()

        def write(folder: Path) -> None:
            if self._crew.student.adapted:
                save_adapter(self._loaded, folder, tensors)
            else:
                save_model(self._loaded, folder, tensors)
            student = self._crew.student
            write_probe(folder, probe, student.compute_dtype, student.probe)

        self._policies.publish(self._policy(), write)
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
        self._loader.issue(tasks, _teacher_prompts(self._prompts_of(step)))

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

    def _evaluate_if_due(self) -> bool:
        """Whether these weights did better than any before and are to be kept."""
        if not self._evaluation_due():
            return False
        settings = self._settings.evaluation
        ends = self._step in (0, self._settings.steps)
        prompts = self._prompts.evaluation[: settings.prompts if ends else settings.interim_prompts]
        common = settings.interim_prompts if settings.every_steps else settings.prompts
        started = time.monotonic()
        tasks = evaluation_tasks(self._maker, prompts, self._policy())
        # Each prompt twice, see evaluation_tasks.
        self._loader.issue(tasks, _teacher_prompts([*prompts, *prompts]))
        batch = self._loader.wait(queue_pb2.TASK_KIND_EVALUATION, self._step)
        metrics = grade(batch.groups, prompts, self._decode, self._prompts.reward.score, common)
        self._loader.finish(batch)
        seconds = time.monotonic() - started
        values: dict[str, float | int | str] = {"policy": str(self._policy()), "seconds": seconds}
        self._metrics.write("evaluation", self._step, values | metrics)
        self._evaluated, self._accuracy = self._step, metrics["accuracy_common"]
        logger.info(
            "evaluation at step %d: accuracy %.3f, raw KL %.3f",
            self._step,
            metrics["accuracy"],
            metrics.get("raw_kl", float("nan")),
        )
        better = self._best is None or self._accuracy > self._best
        self._best = self._accuracy if better else self._best
        return better and self._settings.checkpoint.keep_best

    def _graded(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with rewards, where there is an answer to grade by, and labels."""
        prompts = self._prompts_of(step)
        labels = sorted({prompt.teacher for prompt in prompts})
        return [
            replace(
                group,
                label=labels.index(prompt.teacher),
                samples=tuple(
                    replace(sample, reward=self._reward(sample.ids, prompt))
                    for sample in group.samples
                ),
            )
            for group, prompt in zip(groups, prompts, strict=True)
        ]

    def _reward(self, ids: np.ndarray, prompt: Prompt) -> float | None:
        if prompt.answer is None:
            return None
        return self._prompts.reward.score(self._decode(ids), prompt.answer)

    def _batch_metrics(
        self, batch: StepBatch, groups: Sequence[Group], step: int
    ) -> dict[str, float]:
        samples = [sample for group in groups for sample in group.samples]
        staleness = [self._lineage.staleness(sample.version, step) or 0 for sample in samples]
        return {
            "staleness_mean": float(np.mean(staleness)),
            "rollout_wait_s": batch.rollout_wait_s,
            "teacher_wait_s": batch.teacher_wait_s,
            "duplicates": self._loader.duplicates,
            "reissued": self._loader.reissued,
            "invalid": self._loader.invalid,
            **rollout_metrics(groups),
        }

    def _decode(self, ids: np.ndarray) -> str:
        tokenizer = self._loaded.tokenizer
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _save(self) -> None:
        running = self._crew.running
        state = TrainerState(
            step=self._step,
            lineage=self._lineage,
            skipped_in_a_row=self._skipped_in_a_row,
            strikes=self._guards.strikes,
            running=None if running is None else running.to_dict(),
            evaluated=self._evaluated,
            accuracy=self._accuracy,
            best=self._best,
            ledger_bytes=self._ledger.durable_length(),
            metrics_bytes=self._metrics.durable_length(),
            identity=self._identity,
        )
        self._checkpoints.save(self._crew, state)


def _teacher_prompts(prompts: Sequence[Prompt]) -> dict[int, common_pb2.Prompt]:
    """By slot, those of prompts that have one of their own for the teacher."""
    return {
        slot: prompt_message(prompt.teacher_ids, prompt.teacher_images)
        for slot, prompt in enumerate(prompts)
        if prompt.teacher_ids is not None
    }


def _identity(
    config: TrainerConfig, crew: Crew, prompts: Prompts, teacher: TeacherClient
) -> dict[str, Any]:
    """What a run cannot change midway: its step would no longer be its data cursor, its advantages
    would come from another teacher, its checkpoints would hold other tensors."""
    settings = config.trainer
    return {
        "run.name": config.run.name,
        "run.seed": config.run.seed,
        "trainer.student": weights_hash(crew.student.loaded.folder),
        "trainer.prompts_per_step": settings.prompts_per_step,
        "trainer.samples_per_prompt": settings.samples_per_prompt,
        "trainer.optimiser.name": settings.optimiser.name,
        "trainer.lora": settings.lora.model_dump(mode="json"),
        "trainer.scale.freeze_vision_tower": settings.scale.freeze_vision_tower,
        "training prompts": len(prompts.train),
        "the teacher's identity": teacher.describe().identity,
    }


def _next_incarnation(config: TrainerConfig) -> int:
    """A number no earlier start of this run had, on the disk before anything is published."""
    path = config.run.dir / "incarnation"
    incarnation = int(path.read_text()) + 1 if path.exists() else 0
    replace_text(path, str(incarnation))
    return incarnation
