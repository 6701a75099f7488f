"""The worker in this process, on a real Redis: what is served, refused, given back."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from modeling.load import ModelError, load_model, save_model
from preceptor.codec import decode_ids, encode_ids
from preceptor.policy import PolicyStore, Version
from preceptor.queue import QueueFull, RolloutQueue
from preceptor.v1 import queue_pb2
from services.rollout import worker as worker_module
from services.rollout.heartbeat import Status
from services.rollout.held_policy import HeldPolicy, WrongModel
from services.rollout.settings import RolloutSettings
from services.rollout.worker import Worker
from tests.rollout.prompt_tasks import FIRST, RUN, check_group, read_groups, task
from tests.tiny_models import EOS, IMAGE, PAD, draw_image, make_llama, make_llava


@pytest.fixture
def store(tmp_path, load):
    store = PolicyStore(tmp_path / "policies")
    store.publish(FIRST, lambda folder: save_model(load("llava"), folder))
    return store


@pytest.fixture
def trainer(redis_client):
    return RolloutQueue(redis_client, RUN, "trainer")


@pytest.fixture
def start(redis_client, folders, load, store):
    """A context with a running worker; it stops, and its failure is raised, at the end."""

    @contextmanager
    def running(**changes):
        settings = RolloutSettings(model=str(folders["llava"]), name="w0", **changes)
        queue = RolloutQueue(redis_client, RUN, "w0", lease_seconds=1.0)
        loaded, stop = load("llava"), threading.Event()
        worker = Worker(settings, loaded, queue, HeldPolicy(loaded, store), Status(), stop)
        failures = []

        def run():
            try:
                worker.run()
            except (RuntimeError, ModelError) as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="worker")
        thread.start()
        try:
            yield worker
        finally:
            stop.set()
            thread.join(20)
        if failures:
            raise failures[0]

    return running


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name == "worker"]


def good_tasks():
    """Different prompts, lengths, settings, with and without an image."""
    return [
        task(0),
        task(1, ids=[1, *[IMAGE] * 4, 60], images=[draw_image(1)]),
        task(2, ids=range(20, 40), samples=1),
        task(3, temperature=0.0, max_new_tokens=5),
        task(4, top_k=5, top_p=0.9, samples=5),
        task(5, named_top_k=7),
    ]


def bad_tasks():
    """Each with what its dead letter must say."""
    placeholders = [1, *[IMAGE] * 4]
    forged = task(21, ids=placeholders, images=[draw_image(1)])
    forged.prompt.images[0].sha256 = b"\0" * 32
    empty = task(22)
    empty.prompt.token_ids = b""
    torn = task(23)
    torn.prompt.token_ids = b"\1\0\0"
    return [
        (task(10, ids=placeholders, images=[b"no image"]), "image cannot be read"),
        (task(11, ids=[1, 96]), "id 96 at position 1"),
        (task(12, ids=[5] * 120), "prompt of 120 tokens and max_new_tokens 12 make 132"),
        (task(13, ids=placeholders[:-1], images=[draw_image(1)]), "3 image placeholders"),
        (task(14, temperature=-1.0), "temperature -1.0"),
        (task(15, top_p=0.0), "top_p 0.0"),
        (task(16, suppressed_ids=b""), "lacks the image placeholder"),
        (task(17, eos_ids=encode_ids([EOS, 96])), "eos_ids has id 96"),
        (task(18, samples=0), "0 samples"),
        (task(19, max_new_tokens=0), "max_new_tokens 0"),
        (task(20, eos_ids=b"\1"), "int32"),
        (forged, "sha256"),
        (empty, "prompt is empty"),
        (torn, "int32"),
    ]


@pytest.mark.pitfall("G9")
def test_bad_tasks_are_buried_alone_and_neighbours_are_served(start, trainer, load):
    good, bad = good_tasks(), bad_tasks()
    mixed = [one for pair in zip(bad, [*good, *[None] * 8], strict=True) for one in pair if one]
    trainer.put_tasks([one[0] if isinstance(one, tuple) else one for one in mixed])
    with start():
        groups = read_groups(trainer, len(good), 20.0)
        wait_until(lambda: trainer.backlog().dead == len(bad))
    for one in good:
        check_group(load("llava"), one, groups[one.id.slot], FIRST)
        assert groups[one.id.slot].worker == "w0"
    letters = trainer.dead_letters()
    reasons = {type(bad[0][0]).FromString(one.payload).id.slot: one.reason for one in letters}
    for one, reason in bad:
        assert reason in reasons[one.id.slot]
    backlog = trainer.backlog()
    assert (backlog.tasks_waiting, backlog.tasks_running, backlog.groups_waiting) == (0, 0, 0)


def test_a_task_waits_for_the_policy_it_asks_for(start, trainer, store, tmp_path):
    second = Version(0, 1)
    newer = load_model(make_llava(tmp_path / "newer", seed=1))
    one = task(0, second)
    trainer.put_tasks([one])
    with start(policy_retry_seconds=0.1) as worker:
        wait_until(lambda: worker._missing == second)
        assert trainer.backlog().groups_waiting == 0
        store.publish(second, lambda folder: save_model(newer, folder))
        groups = read_groups(trainer, 1, 20.0)
        assert worker._status.policy == "0-000001"
    check_group(newer, one, groups[0], second)


def test_a_policy_that_never_comes_holds_nobody_up(start, trainer, redis_client, load):
    early = task(1, Version(0, 7))
    trainer.put_tasks([early, task(0)])
    # However long it is until the early one is tried again.
    with start(policy_retry_seconds=3600.0):
        check_group(load("llava"), task(0), read_groups(trainer, 1, 20.0)[0], FIRST)
        # Again and again.
        for slot in (2, 3):
            trainer.put_tasks([task(slot)])
            assert read_groups(trainer, 1, 20.0).keys() == {slot}
    other = RolloutQueue(redis_client, RUN, "w1", lease_seconds=1.0)
    (claim,) = other.claim_tasks(1, 5.0)
    assert claim.message.id.slot == 1
    assert claim.deliveries == 1, "nobody's fault"


def test_a_task_given_back_is_tried_again_after_a_pause_and_not_in_a_hot_loop(
    start, trainer, monkeypatch, caplog
):
    tries = []

    def count(policy):
        tries.append(time.monotonic())
        honest(policy)

    honest = HeldPolicy.refresh
    monkeypatch.setattr(HeldPolicy, "refresh", count)
    trainer.put_tasks([task(1, Version(0, 7))])
    with start(policy_retry_seconds=0.4):
        wait_until(lambda: len(tries) >= 4)
    assert min(after - before for before, after in itertools.pairwise(tries)) > 0.35
    assert caplog.text.count("policy 0-000007 is not in") == 1, "said once, however often tried"


def test_weights_of_another_model_end_the_worker_and_blame_no_task(
    start, trainer, store, redis_client, tmp_path
):
    other = load_model(make_llama(tmp_path / "other"))
    store.publish(Version(0, 1), lambda folder: save_model(other, folder))
    trainer.put_tasks([task(0, Version(0, 1))])
    with pytest.raises(WrongModel, match=r"rollout\.model"), start():
        wait_until(lambda: not worker_threads())
    heir = RolloutQueue(redis_client, RUN, "w1", lease_seconds=1.0)
    (claim,) = heir.claim_tasks(1, 0.0)
    assert claim.deliveries == 1


def test_an_evaluation_task_is_greedy_when_it_says_so(start, trainer, load):
    """By plain recomputation: each id is the likeliest."""
    one = task(0, samples=1, temperature=0.0, top_p=1.0, max_new_tokens=6, eos_ids=b"")
    one.kind = queue_pb2.TASK_KIND_EVALUATION
    sampled = task(1, samples=1, max_new_tokens=6, eos_ids=b"")
    trainer.put_tasks([one, sampled])
    with start():
        groups = read_groups(trainer, 2, 20.0)
    assert groups[0].kind == queue_pb2.TASK_KIND_EVALUATION
    assert groups[1].kind == queue_pb2.TASK_KIND_TRAIN
    loaded, ids = load("llava"), [1, 50, 51]
    with torch.no_grad():
        for _ in range(6):
            logits_V = loaded.model(torch.tensor([ids])).logits[0, -1]
            logits_V[[PAD, IMAGE]] = -torch.inf
            ids.append(int(logits_V.argmax()))
    written = [decode_ids(groups[slot].rollouts[0].response_ids).tolist() for slot in (0, 1)]
    assert written[0] == ids[3:] != written[1]


def test_the_finish_reason_tells_ended_from_cut_off(start, trainer):
    every_id = encode_ids([one for one in range(96) if one not in (PAD, IMAGE)])
    trainer.put_tasks([task(0, eos_ids=every_id), task(1, eos_ids=b"")])
    with start():
        groups = read_groups(trainer, 2, 20.0)
    ended, cut = groups[0].rollouts, groups[1].rollouts
    assert [one.finish_reason for one in ended] == [queue_pb2.FINISH_REASON_STOP] * 3
    assert [one.finish_reason for one in cut] == [queue_pb2.FINISH_REASON_LENGTH] * 3
    assert [len(decode_ids(one.response_ids)) for one in (*ended, *cut)] == [1] * 3 + [12] * 3


def test_the_engine_fails_on_one_task_only(start, trainer, load, monkeypatch):
    def fragile(loaded, requests, sampling, on_step):
        if any(request.seed == 1001 for request in requests):
            raise RuntimeError("no kernel for this")
        return honest(loaded, requests, sampling, on_step)

    honest = worker_module.generate
    monkeypatch.setattr(worker_module, "generate", fragile)
    trainer.put_tasks([task(0), task(1), task(2)])
    with start():
        groups = read_groups(trainer, 2, 20.0)
        wait_until(lambda: trainer.backlog().dead == 1)
    assert sorted(groups) == [0, 2]
    check_group(load("llava"), task(2), groups[2], FIRST)
    assert "no kernel for this" in trainer.dead_letters()[0].reason


def test_an_engine_that_is_broken_ends_the_worker_and_blames_no_task(start, trainer, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("device is gone")

    monkeypatch.setattr(worker_module, "generate", broken)
    monkeypatch.setattr(worker_module, "probe", broken)
    trainer.put_tasks([task(0)])
    with pytest.raises(RuntimeError, match="device is gone"), start():
        time.sleep(1.0)
    backlog = trainer.backlog()
    assert (backlog.dead, backlog.tasks_running) == (0, 1)


def test_a_queue_that_refuses_a_group_blames_no_task(start, trainer, monkeypatch):
    """It ends the worker; its tasks go to another when their leases run out."""

    def full(*_):
        raise QueueFull("used memory > 'maxmemory'")

    monkeypatch.setattr(RolloutQueue, "finish_task", full)
    trainer.put_tasks([task(0), task(1)])
    with pytest.raises(QueueFull), start():
        wait_until(lambda: not worker_threads())
    assert trainer.dead_letters() == []
