"""The loader: collects rollout groups and has them scored while the current step trains.

A thread claims groups from the queue and checks them against their tasks; a second one talks to the
teacher. In steady state a step's groups are complete before the trainer asks for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from preceptor.client import TeacherClient
from preceptor.codec import TeacherRefusal, decode_ids
from preceptor.queue import Claim, RolloutQueue
from preceptor.v1 import common_pb2, queue_pb2, teacher_pb2
from trainer.groups import Group, InvalidGroup, check_group, with_scores
from trainer.lineage import Lineage
from trainer.tasks import TaskTable

logger = logging.getLogger(__name__)

CLAIM_COUNT = 64
CHECK_SECONDS = 2.0
CLOSE_SECONDS = 2.0

BatchKey = tuple[int, int]
"""(queue_pb2.TaskKind, step)."""


class Stopped(Exception):
    """The run was asked to stop while it waited."""


@dataclass
class _Batch:
    """A step's groups as they come in."""

    slots: int
    teacher_prompts: Mapping[int, common_pb2.Prompt]
    groups: dict[int, Group] = field(default_factory=dict)
    claims: list[Claim[queue_pb2.RolloutGroup]] = field(default_factory=list)
    arrived: int = 0
    arrived_at: float = 0.0
    complete_at: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.groups) == self.slots


@dataclass(frozen=True)
class StepBatch:
    """A complete batch in task order, and how long the trainer stood still for it.

    Attributes:
        groups: one a slot.
        claims: to be acknowledged after the step.
        rollout_wait_s, teacher_wait_s: seconds waited for the last group to arrive, and from then
            on for the last mark.
    """

    groups: list[Group]
    claims: list[Claim[queue_pb2.RolloutGroup]]
    rollout_wait_s: float
    teacher_wait_s: float


class Loader:
    """The trainer's hands on the queue and on the teacher.

    Attributes:
        duplicates: groups that were already there, or were left behind by another incarnation.
        reissued: tasks issued again because they were overdue or lost.
        invalid: groups that went to the dead letters.
    """

    def __init__(
        self,
        queue: RolloutQueue,
        teacher: TeacherClient,
        lineage: Lineage,
        *,
        vocabulary: int,
        max_staleness: int,
        task_timeout_seconds: float,
        score_batch_groups: int,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            queue, teacher: connected, used from the loader's threads from now on.
            lineage: which policies' tokens are accepted.
            vocabulary: the student's embedding rows.
            max_staleness: of training groups; evaluation accepts none.
            task_timeout_seconds: when a task is issued again.
            score_batch_groups: groups in one call to the teacher.
            stop: ends `wait` with Stopped.
        """
        self._queue = queue
        self._teacher = teacher
        self._lineage = lineage
        self._vocabulary = vocabulary
        self._max_staleness = max_staleness
        self._score_batch_groups = score_batch_groups
        self._stop = stop
        self._changed = threading.Condition()
        self._table = TaskTable(task_timeout_seconds)
        self._batches: dict[BatchKey, _Batch] = {}
        self._unscored: list[Group] = []
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._next_check = 0.0
        self.duplicates = 0
        self.reissued = 0
        self.invalid = 0
        # Daemons: a teacher or a Redis that is away must not keep a trainer that was told to stop.
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("loader", self._load_next), ("scorer", self._score_next))
        ]
        for thread in self._threads:
            thread.start()

    def issue(
        self,
        tasks: Sequence[queue_pb2.PromptTask],
        teacher_prompts: Mapping[int, common_pb2.Prompt] | None = None,
    ) -> None:
        """Put all tasks of one batch into the queue; `wait` returns them under (kind, step).

        Args:
            tasks: one a slot.
            teacher_prompts: slot -> what the teacher sees instead of the task's prompt (privileged
                context), where it is not the same. It stays here: workers have no use for it.
        """
        key = (tasks[0].kind, tasks[0].id.step)
        with self._changed:
            self._batches[key] = _Batch(len(tasks), teacher_prompts or {})
            self._table.add(tasks, time.monotonic())
        self._queue.put_tasks(tasks)

    def wait(self, kind: queue_pb2.TaskKind, step: int) -> StepBatch:
        """Block until every group of the batch has arrived and, where asked for, been scored.

        Raises:
            Stopped: the run shall stop.
            Exception: whatever ended one of the loader's threads.
        """
        started = time.monotonic()
        with self._changed:
            batch = self._batches[kind, step]
            while True:
                # Before completeness: a trainer that never has to wait can be stopped all the same.
                if self._stop.is_set():
                    raise Stopped
                if self._failure is not None:
                    raise self._failure
                if batch.complete:
                    break
                self._changed.wait(0.5)
            del self._batches[kind, step]
        arrived = max(started, batch.arrived_at)
        return StepBatch(
            groups=[batch.groups[slot] for slot in range(batch.slots)],
            claims=batch.claims,
            rollout_wait_s=arrived - started,
            teacher_wait_s=max(0.0, batch.complete_at - arrived),
        )

    def finish(self, batch: StepBatch) -> None:
        """The step that used these groups is safe: they leave the queue."""
        self._queue.ack_groups(batch.claims)

    def close(self) -> None:
        """Stop both threads, or leave them behind where Redis or the teacher keeps them waiting.

        What is claimed and not finished is delivered again next time.
        """
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            while not self._closing.is_set():
                work()
        except BaseException as error:  # noqa: BLE001  (handed to the trainer, which raises it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _load_next(self) -> None:
        self._take(self._queue.claim_groups(CLAIM_COUNT, block_seconds=0.2))
        self._issue_again()

    def _take(self, claims: Sequence[Claim[queue_pb2.RolloutGroup]]) -> None:
        done: list[Claim[queue_pb2.RolloutGroup]] = []
        for claim in claims:
            message = claim.message
            with self._changed:
                task = self._table.find(message)
            if task is None:
                # A copy of one we have, or what an earlier incarnation left behind.
                self.duplicates += 1
                done.append(claim)
                continue
            training = task.kind == queue_pb2.TASK_KIND_TRAIN
            allowed = self._max_staleness if training else 0
            try:
                group = check_group(task, message, self._lineage, allowed, self._vocabulary)
            except InvalidGroup as error:
                self.invalid += 1
                logger.error(
                    "step %d slot %d from worker %r is invalid and goes to the dead letters; the "
                    "task is issued again: %s",
                    task.id.step,
                    task.id.slot,
                    message.worker,
                    error,
                )
                self._queue.dead_letter(claim, str(error))
                self._fail_task(task, str(error))
                continue
            self._accept(group, claim)
        self._queue.ack_groups(done)

    def _accept(self, group: Group, claim: Claim[queue_pb2.RolloutGroup]) -> None:
        task = group.task
        with self._changed:
            self._table.settle(task)
            batch = self._batches[task.kind, task.id.step]
            batch.claims.append(claim)
            batch.arrived += 1
            if batch.arrived == batch.slots:
                batch.arrived_at = time.monotonic()
            # Greedy answers are graded, not scored.
            if task.sampling.temperature > 0 and group.samples:
                self._unscored.append(group)
                self._changed.notify_all()
            else:
                self._place(group)

    def _place(self, group: Group) -> None:
        """With the lock held: the group is ready for its step."""
        batch = self._batches[group.task.kind, group.task.id.step]
        batch.groups[group.task.id.slot] = group
        if batch.complete:
            batch.complete_at = time.monotonic()
            self._changed.notify_all()

    def _score_next(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._unscored or self._closing.is_set(), timeout=0.5)
            # What the trainer needs first goes first.
            self._unscored.sort(key=lambda group: (group.task.id.step, group.task.id.slot))
            groups = self._unscored[: self._score_batch_groups]
            del self._unscored[: self._score_batch_groups]
        if groups:
            self._score(groups)

    def _score(self, groups: Sequence[Group]) -> None:
        with self._changed:
            prompts = [
                self._batches[one.task.kind, one.task.id.step].teacher_prompts.get(one.task.id.slot)
                for one in groups
            ]
        requests = [
            _request(str(index), group, prompt)
            for index, (group, prompt) in enumerate(zip(groups, prompts, strict=True))
        ]
        # The same for all tasks of a run. What the student cannot write must not weigh in the
        # teacher's distribution either: a teacher equal to the student then gives k = 0.
        suppressed = decode_ids(groups[0].task.sampling.suppressed_ids)
        results = self._teacher.scores(requests, suppressed_ids=suppressed)
        for group, scores in zip(groups, results, strict=True):
            refusals = [one for one in scores if isinstance(one, TeacherRefusal)]
            if refusals:
                logger.warning(
                    "step %d slot %d: the teacher refused %d of %d samples, the first because: %s",
                    group.task.id.step,
                    group.task.id.slot,
                    len(refusals),
                    len(scores),
                    refusals[0],
                )
            with self._changed:
                self._place(with_scores(group, scores))

    def _fail_task(self, task: queue_pb2.PromptTask, reason: str) -> None:
        with self._changed:
            again = self._table.fail(task, reason, time.monotonic())
        if again:
            self._queue.put_tasks([task])

    def _issue_again(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        for letter in self._queue.new_dead_letters():
            try:
                task = queue_pb2.PromptTask.FromString(letter.payload)
            except DecodeError:
                # Somebody else's entry in our stream: whoever buried it has logged it.
                continue
            self._fail_task(task, letter.reason)
        backlog = self._queue.backlog()
        empty = not (backlog.tasks_waiting or backlog.tasks_running or backlog.groups_waiting)
        with self._changed:
            due = self._table.due_again(now, empty)
        if due:
            logger.warning(
                "%d prompt tasks are %s and issued again, the first is step %d slot %d",
                len(due),
                "not in the queue any more" if empty else "overdue",
                due[0].id.step,
                due[0].id.slot,
            )
            self.reissued += len(due)
            self._queue.put_tasks(due)


def _request(
    group_id: str, group: Group, teacher_prompt: common_pb2.Prompt | None
) -> teacher_pb2.PromptGroup:
    message = teacher_pb2.PromptGroup(
        group_id=group_id, prompt=group.task.prompt, teacher_prompt=teacher_prompt
    )
    for sample in group.samples:
        message.trajectories.add(
            trajectory_id=str(sample.index),
            response_ids=sample.ids.tobytes(),
            loss_mask=b"" if sample.mask.all() else sample.mask.astype("u1").tobytes(),
            named_ids=sample.named_ids.tobytes(),
        )
    return message
