"""The loader between a real Redis and a scripted teacher over real gRPC."""

import threading
import time

import numpy as np
import pytest

from preceptor.client import TeacherClient
from preceptor.codec import encode_ids, encode_logprobs
from preceptor.queue import RolloutQueue
from preceptor.v1 import queue_pb2
from tests.client.scripted_teacher import REFUSED_ID, ScriptedTeacher, serving
from tests.trainer.recorded import make_task
from trainer.lineage import Lineage
from trainer.loader import Loader, Stopped
from trainer.tasks import TaskFailed

TRAIN = queue_pb2.TASK_KIND_TRAIN


@pytest.fixture
def stop():
    return threading.Event()


@pytest.fixture
def trainer_queue(redis_client):
    return RolloutQueue(redis_client, "run", "trainer")


@pytest.fixture
def worker(redis_client):
    return RolloutQueue(redis_client, "run", "w0")


def make_loader(queue, teacher, stop):
    return Loader(
        queue,
        teacher,
        Lineage(0, {}),
        vocabulary=1000,
        max_staleness=1,
        task_timeout_seconds=60,
        score_batch_groups=2,
        stop=stop,
    )


@pytest.fixture
def loader(trainer_queue, stop):
    with serving(ScriptedTeacher()) as address, TeacherClient(address, student="s") as teacher:
        loader = make_loader(trainer_queue, teacher, stop)
        yield loader
        loader.close()


def tasks_of(step, slots=3):
    return [make_task(step, slot, samples=1, prompt=(7, slot + 5)) for slot in range(slots)]


def answer(task, ids=(9, 2)):
    group = queue_pb2.RolloutGroup(
        id=task.id, kind=task.kind, prompt=task.prompt, sampling=task.sampling, worker="w0"
    )
    rollout = group.rollouts.add(
        sample=0,
        finish_reason=queue_pb2.FINISH_REASON_STOP,
        response_ids=encode_ids(list(ids)),
        behaviour_logprobs=encode_logprobs(np.full(len(ids), -1.0)),
    )
    rollout.policy_spans.add(version=task.policy, count=len(ids))
    return group


def work(worker, count, ids=(9, 2)):
    """Claim and answer `count` tasks, the last one first."""
    claims = []
    while len(claims) < count:
        claims += worker.claim_tasks(count - len(claims), block_seconds=5)
    for claim in reversed(claims):
        worker.finish_task(claim, answer(claim.message, ids))
    return claims


def test_groups_come_scored_in_task_order_and_leave_the_queue_when_finished(
    loader, worker, trainer_queue
):
    loader.issue(tasks_of(0))
    work(worker, 3)
    batch = loader.wait(TRAIN, 0)
    assert [group.task.id.slot for group in batch.groups] == [0, 1, 2]
    for group in batch.groups:
        [sample] = group.samples
        assert sample.teacher.tolist() == pytest.approx([-0.010, -0.003])
    assert trainer_queue.backlog().groups_held == 3
    loader.finish(batch)
    assert trainer_queue.backlog().groups_held == 0


def test_the_next_step_is_scored_while_nobody_asks(loader, worker):
    loader.issue(tasks_of(0))
    loader.issue(tasks_of(1))
    work(worker, 6)
    loader.wait(TRAIN, 0)
    time.sleep(2.0)
    batch = loader.wait(TRAIN, 1)
    assert batch.rollout_wait_s == batch.teacher_wait_s == 0.0


def test_a_second_copy_is_dropped_and_counted(loader, worker, trainer_queue, redis_client):
    loader.issue(tasks_of(0))
    claims = work(worker, 3)
    for claim in claims:
        worker.finish_task(claim, answer(claim.message))
    batch = loader.wait(TRAIN, 0)
    assert len(batch.groups) == 3
    wait_until(lambda: loader.duplicates == 3)
    loader.finish(batch)
    assert redis_client.xlen("preceptor:{run}:groups") == 0


def test_an_invalid_group_goes_to_the_dead_letters_and_its_task_out_again(loader, worker):
    loader.issue(tasks_of(0, slots=1))
    # Id 3 is suppressed.
    work(worker, 1, ids=(9, 3, 2))
    work(worker, 1)
    batch = loader.wait(TRAIN, 0)
    assert batch.groups[0].samples[0].ids.tolist() == [9, 2]
    assert loader.invalid == 1
    [letter] = worker.dead_letters()
    assert "may not produce" in letter.reason


def test_what_the_teacher_refuses_is_dropped_alone(loader, worker):
    loader.issue(tasks_of(0, slots=2))
    claims = worker.claim_tasks(2, block_seconds=5)
    while len(claims) < 2:
        claims += worker.claim_tasks(2 - len(claims), block_seconds=5)
    worker.finish_task(claims[0], answer(claims[0].message, (REFUSED_ID, 2)))
    worker.finish_task(claims[1], answer(claims[1].message))
    refused, fine = loader.wait(TRAIN, 0).groups
    assert refused.samples == ()
    assert list(refused.dropped) == [0]
    assert len(fine.samples) == 1


def test_tasks_that_redis_lost_are_issued_again(loader, worker, redis_client):
    loader.issue(tasks_of(0))
    redis_client.flushdb()
    work(worker, 3)
    assert len(loader.wait(TRAIN, 0).groups) == 3
    assert loader.reissued == 3


def test_a_stop_ends_the_wait(loader, stop):
    loader.issue(tasks_of(0))
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(Stopped):
        loader.wait(TRAIN, 0)


def test_a_teacher_that_stays_away_ends_the_run_with_its_error(trainer_queue, worker, stop):
    with TeacherClient("127.0.0.1:1", student="s", retry_seconds=0.5) as teacher:
        loader = make_loader(trainer_queue, teacher, stop)
        loader.issue(tasks_of(0))
        work(worker, 3)
        with pytest.raises(Exception, match=r"127\.0\.0\.1:1"):
            loader.wait(TRAIN, 0)
        loader.close()


def test_a_trainer_told_to_stop_does_not_wait_for_a_teacher_that_is_away(
    trainer_queue, worker, stop
):
    with TeacherClient("127.0.0.1:1", student="s", retry_seconds=120) as teacher:
        loader = make_loader(trainer_queue, teacher, stop)
        loader.issue(tasks_of(0))
        work(worker, 3)
        wait_until(lambda: loader._batches[TRAIN, 0].arrived == 3)
        stop.set()
        started = time.monotonic()
        with pytest.raises(Stopped):
            loader.wait(TRAIN, 0)
        loader.close()
        # Liveness, not speed: the retry budget is two minutes.
        assert time.monotonic() - started < 30


def wait_until(condition, timeout_seconds=10):
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stop_is_heard_by_a_trainer_that_never_waits(loader, worker, stop):
    loader.issue(tasks_of(0))
    work(worker, 3)
    wait_until(lambda: len(loader._batches[TRAIN, 0].groups) == 3)
    stop.set()
    with pytest.raises(Stopped):
        loader.wait(TRAIN, 0)


def test_a_task_that_workers_give_up_again_and_again_ends_the_run(loader, worker):
    loader.issue(tasks_of(0, slots=1))
    for _ in range(3):
        [claim] = worker.claim_tasks(1, block_seconds=10)
        worker.dead_letter(claim, "the prompt is too long")
    with pytest.raises(TaskFailed, match=r"failed 3 times.*the prompt is too long"):
        loader.wait(TRAIN, 0)
