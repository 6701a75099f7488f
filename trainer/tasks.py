"""Prompt tasks: made from prompts, and the table of those still outstanding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preceptor.codec import encode_ids, prompt_message
from preceptor.policy import Version
from preceptor.queue import task_key
from preceptor.v1 import common_pb2, queue_pb2
from trainer.data import Prompt


@dataclass(frozen=True)
class TaskMaker:
    """What all tasks of an incarnation have in common.

    Attributes:
        run, incarnation: as in their ids.
        seed: the run's; with step and slot it seeds a task's sampling, whatever the incarnation.
        max_new_tokens: longest response.
        eos_ids, suppressed_ids: see common.proto, SamplingSettings.
        named_top_k: ids that workers name at each token of a training rollout; 0: none.
    """

    run: str
    incarnation: int
    seed: int
    max_new_tokens: int
    eos_ids: Sequence[int]
    suppressed_ids: Sequence[int]
    named_top_k: int = 0

    def make(
        self,
        kind: queue_pb2.TaskKind,
        step: int,
        slot: int,
        prompt: Prompt,
        policy: Version,
        *,
        samples: int,
        temperature: float,
    ) -> queue_pb2.PromptTask:
        """The task of one slot of a step; temperature 1, or 0 for greedy."""
        return queue_pb2.PromptTask(
            id=queue_pb2.TaskId(run=self.run, incarnation=self.incarnation, step=step, slot=slot),
            kind=kind,
            prompt=prompt_message(prompt.ids, prompt.images),
            samples=samples,
            policy=policy.message(),
            sampling=common_pb2.SamplingSettings(
                temperature=temperature,
                top_p=1.0,
                top_k=0,
                max_new_tokens=self.max_new_tokens,
                eos_ids=encode_ids(self.eos_ids),
                suppressed_ids=encode_ids(self.suppressed_ids),
                seed=_seed(self.seed, kind, step, slot),
                named_top_k=self.named_top_k if kind == queue_pb2.TASK_KIND_TRAIN else 0,
            ),
        )


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# A task that fails this often will fail again.
MAX_FAILURES = 3


class TaskFailed(RuntimeError):
    """A prompt task that nobody can do."""


@dataclass
class _Outstanding:
    task: queue_pb2.PromptTask
    issued_at: float
    timeout_seconds: float
    failures: int = 0


class TaskTable:
    """Tasks whose groups have not arrived. The first copy of a group takes its task off the table;
    later ones find nothing there and are duplicates.
    """

    def __init__(self, timeout_seconds: float, lost_seconds: float = 5.0) -> None:
        """
        Args:
            timeout_seconds: a task is overdue after this long, then after twice as long, ...
            lost_seconds: younger tasks are not called lost even if the queue does not show them.
        """
        self._timeout_seconds = timeout_seconds
        self._lost_seconds = lost_seconds
        self._outstanding: dict[tuple, _Outstanding] = {}

    def add(self, tasks: Iterable[queue_pb2.PromptTask], now: float) -> None:
        """Tasks that were issued at `now` (monotonic seconds)."""
        for task in tasks:
            key = task_key(task.id, task.kind)
            self._outstanding[key] = _Outstanding(task, now, self._timeout_seconds)

    def find(self, group: queue_pb2.RolloutGroup) -> queue_pb2.PromptTask | None:
        """The task this group answers; None for a duplicate or a leftover."""
        found = self._outstanding.get(task_key(group.id, group.kind))
        return found.task if found else None

    def fail(self, task: queue_pb2.PromptTask, reason: str, now: float) -> bool:
        """A worker gave the task up, or its group was invalid: it is to be issued again.

        Returns:
            False for a task that is not outstanding: there is nothing to do.

        Raises:
            TaskFailed: it failed MAX_FAILURES times.
        """
        entry = self._outstanding.get(task_key(task.id, task.kind))
        if entry is None:
            return False
        entry.failures += 1
        entry.issued_at = now
        if entry.failures >= MAX_FAILURES:
            raise TaskFailed(
                f"step {task.id.step} slot {task.id.slot} failed {entry.failures} times, at last "
                f"because: {reason}"
            )
        return True

    def settle(self, task: queue_pb2.PromptTask) -> None:
        """Its group was accepted."""
        del self._outstanding[task_key(task.id, task.kind)]

    def due_again(self, now: float, queue_is_empty: bool) -> list[queue_pb2.PromptTask]:
        """Tasks to issue again under the same ids: overdue, or lost by an empty queue.

        Their clocks start anew, twice as patient.
        """
        due = []
        for entry in self._outstanding.values():
            age = now - entry.issued_at
            if age > entry.timeout_seconds or (queue_is_empty and age > self._lost_seconds):
                entry.issued_at = now
                entry.timeout_seconds *= 2
                due.append(entry.task)
        return due

    def __len__(self) -> int:
        return len(self._outstanding)
