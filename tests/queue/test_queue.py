"""What the queue promises while nothing breaks, and to consumers that die."""

from __future__ import annotations

import time

import pytest

from preceptor.queue import Backlog, Claim, RolloutQueue, task_key
from preceptor.v1 import queue_pb2
from tests.queue.queue_messages import group_for, slots, task


def test_a_task_becomes_a_group_and_both_are_gone(make_queue, client):
    trainer, worker = make_queue(), make_queue("w")
    trainer.put_tasks([task(0), task(1)])
    assert trainer.backlog() == Backlog(2, 0, 0, 0, 0)
    claims = worker.claim_tasks(10, 0)
    assert slots(claims) == [0, 1] and [claim.deliveries for claim in claims] == [1, 1]
    assert trainer.backlog() == Backlog(0, 2, 0, 0, 0)
    for claim in claims:
        worker.finish_task(claim, group_for(claim.message))
    assert trainer.backlog() == Backlog(0, 0, 2, 0, 0)
    groups = trainer.claim_groups(10, 0)
    assert slots(groups) == [0, 1]
    assert groups[0].message.prompt == claims[0].message.prompt
    assert trainer.backlog() == Backlog(0, 0, 0, 2, 0)
    trainer.ack_groups(groups)
    assert trainer.backlog() == Backlog(0, 0, 0, 0, 0)
    assert client.xlen("preceptor:{run}:tasks") == client.xlen("preceptor:{run}:groups") == 0


def test_count_is_a_limit_and_order_is_kept(make_queue):
    make_queue().put_tasks([task(slot) for slot in range(5)])
    assert slots(make_queue("a").claim_tasks(2, 0)) == [0, 1]
    assert slots(make_queue("b").claim_tasks(9, 0)) == [2, 3, 4]


@pytest.mark.pitfall("Q8")
def test_missing_streams_count_zero(make_queue, client):
    queue = make_queue()
    assert queue.backlog() == Backlog(0, 0, 0, 0, 0)
    # A stream without a group: what nobody has asked for yet is waiting.
    queue.put_tasks([task(0)])
    assert queue.backlog().tasks_waiting == 1
    # An entry deleted in the middle makes Redis' own lag nil.
    queue.put_tasks([task(1), task(2)])
    middle = client.xrange("preceptor:{run}:tasks")[1][0]
    client.xdel("preceptor:{run}:tasks", middle)
    assert queue.backlog().tasks_waiting == 2


def test_a_restarted_trainer_gets_its_groups_again_before_new_ones(make_queue):
    worker = make_queue("w")
    make_queue().put_tasks([task(slot) for slot in range(5)])
    claims = worker.claim_tasks(5, 0)
    for claim in claims[:4]:
        worker.finish_task(claim, group_for(claim.message))
    before = make_queue()
    held = before.claim_groups(3, 0)
    before.ack_groups(held[:1])
    assert slots(before.claim_groups(9, 0)) == [3], "what is in our hands is not repeated"
    after = make_queue()
    worker.finish_task(claims[4], group_for(claims[4].message))
    assert slots(after.claim_groups(2, 0)) == [1, 2]
    assert slots(after.claim_groups(2, 0)) == [3]
    last = after.claim_groups(2, 0)
    assert slots(last) == [4] and last[0].deliveries == 1
    assert after.claim_groups(2, 0) == []


def test_a_task_delivered_too_often_is_a_dead_letter(make_queue, client):
    make_queue().put_tasks([task(7)])
    worker = make_queue("w", lease_seconds=0.02, max_deliveries=3)
    for delivery in (1, 2, 3):
        [claim] = worker.claim_tasks(1, 0)
        assert claim.deliveries == delivery
        time.sleep(0.03)
    assert worker.claim_tasks(1, 0) == []
    assert worker.backlog() == Backlog(0, 0, 0, 0, 1)
    [letter] = worker.dead_letters()
    assert letter.deliveries == 4 and "max_deliveries is 3" in letter.reason
    assert letter.source_stream == "preceptor:{run}:tasks"
    assert letter.source_entry == claim.entry_id
    assert queue_pb2.PromptTask.FromString(letter.payload) == claim.message


def test_groups_are_delivered_however_often(make_queue):
    worker = make_queue("w")
    make_queue().put_tasks([task(0)])
    [claim] = worker.claim_tasks(1, 0)
    worker.finish_task(claim, group_for(claim.message))
    for _ in range(8):
        [group] = make_queue(max_deliveries=2).claim_groups(1, 0)
    assert group.deliveries >= 8


def test_entries_nobody_can_read_are_dead_letters(make_queue, client):
    key = "preceptor:{run}:tasks"
    future = task(1)
    future.schema_version = 99
    client.xadd(key, {"message": b"\xff\xff no protobuf"})
    client.xadd(key, {"message": future.SerializeToString()})
    client.xadd(key, {"other": b"field"})
    queue = make_queue("w")
    queue.put_tasks([task(0)])
    assert slots(queue.claim_tasks(9, 0)) == [0]
    reasons = [letter.reason for letter in queue.dead_letters()]
    assert len(reasons) == 3
    assert "PromptTask" in reasons[0] and "99" in reasons[1] and "field" in reasons[2]
    assert queue.dead_letters()[1].payload == future.SerializeToString()
    client.xadd("preceptor:{run}:groups", {"message": b"\xff"})
    assert queue.claim_groups(9, 0) == []
    assert queue.backlog() == Backlog(0, 1, 0, 0, 4)


def test_a_group_the_trainer_refuses_is_kept_with_the_reason(make_queue):
    trainer, worker = make_queue(), make_queue("w")
    trainer.put_tasks([task(0)])
    [claim] = worker.claim_tasks(1, 0)
    worker.finish_task(claim, group_for(claim.message))
    [group] = trainer.claim_groups(1, 0)
    trainer.dead_letter(group, "behaviour logprobs: 3 for 4 tokens")
    assert trainer.backlog() == Backlog(0, 0, 0, 0, 1)
    [letter] = trainer.dead_letters()
    assert letter.reason == "behaviour logprobs: 3 for 4 tokens"
    assert queue_pb2.RolloutGroup.FromString(letter.payload) == group.message


def bury(queue, *numbers, reason="no"):
    """Put tasks with these slots, and send them to the dead letters."""
    queue.put_tasks([task(number) for number in numbers])
    for claim in queue.claim_tasks(len(numbers), 0):
        queue.dead_letter(claim, reason)


def buried(letters):
    return [queue_pb2.PromptTask.FromString(letter.payload).id.slot for letter in letters]


def test_new_dead_letters_are_those_of_tasks_since_the_first_was_put(make_queue):
    worker = make_queue("w")
    bury(worker, 0)
    trainer = make_queue()
    trainer.put_tasks([task(1)])
    bury(worker, 2, reason="the prompt is empty")
    letters = trainer.new_dead_letters()
    # Slot 1 was put before slot 2, so the worker claimed it; slot 0 is from before the trainer.
    assert buried(letters) == [1] and letters[0].reason == "the prompt is empty"
    assert trainer.new_dead_letters() == []
    [claim] = worker.claim_tasks(1, 0)
    worker.finish_task(claim, group_for(claim.message))
    [group] = trainer.claim_groups(1, 0)
    trainer.dead_letter(group, "a group the trainer itself refused is no news")
    bury(worker, 3, 4)
    assert buried(trainer.new_dead_letters()) == [3, 4]
    assert trainer.new_dead_letters() == []


def test_new_dead_letters_without_a_task_put_begin_with_the_first_call(make_queue):
    worker, observer = make_queue("w"), make_queue("observer")
    bury(worker, 0)
    assert observer.new_dead_letters() == []
    bury(worker, 1)
    assert buried(observer.new_dead_letters()) == [1]


def test_new_dead_letters_survive_a_flush_after_which_ids_are_lower(make_queue, client):
    trainer, key = make_queue(), "preceptor:{run}:dead"
    bury(trainer, 0, 1)
    assert buried(trainer.new_dead_letters()) == [0, 1]
    bury(trainer, 2)
    [(_, fields)] = client.xrevrange(key, count=1)
    client.flushall()
    # As by a clock that was set back: as many entries as before, each id lower.
    for entry_id in ("1-1", "1-2"):
        client.xadd(key, fields, id=entry_id)
    assert buried(trainer.new_dead_letters()) == [2, 2]
    client.flushall()
    assert trainer.new_dead_letters() == []
    client.xadd(key, fields, id="1-1")
    assert buried(trainer.new_dead_letters()) == [2]
    assert trainer.new_dead_letters() == []


def test_released_tasks_are_free_at_once_and_not_counted(make_queue):
    make_queue().put_tasks([task(0), task(1)])
    stopping, other = make_queue("a"), make_queue("b")
    for _ in range(8):
        stopping.release(stopping.claim_tasks(2, 0))
    claims = other.claim_tasks(2, 0)
    assert slots(claims) == [0, 1] and {claim.deliveries for claim in claims} == {1}


def test_released_for_later_they_are_nobodys_for_a_while(make_queue, client):
    make_queue().put_tasks([task(0)])
    early, other = make_queue("a", lease_seconds=60), make_queue("b", lease_seconds=60)
    early.release(early.claim_tasks(1, 0), after_seconds=20)
    assert other.claim_tasks(1, 0) == [] == early.claim_tasks(1, 0)
    (held,) = client.xpending_range("preceptor:{run}:tasks", "consumers", "-", "+", 9)
    # 40 of the 60 seconds of a lease have passed, as it were; the test took less than 19 more.
    assert 40_000 <= held["time_since_delivered"] < 59_000 and held["times_delivered"] == 0
    late = make_queue("c", lease_seconds=40)
    assert [claim.deliveries for claim in late.claim_tasks(1, 0)] == [1]


def test_a_task_taken_over_is_not_snatched_back(make_queue):
    make_queue().put_tasks([task(0)])
    slow, other = make_queue("a", lease_seconds=0.05), make_queue("b", lease_seconds=0.05)
    claims = slow.claim_tasks(1, 0)
    assert slow.renew(claims) == claims
    time.sleep(0.06)
    taken = other.claim_tasks(1, 0)
    assert slots(taken) == [0]
    assert slow.renew(claims) == []
    slow.release(claims)
    assert other.renew(taken) == taken


def test_renewing_leaves_the_delivery_count_alone(make_queue, client):
    make_queue().put_tasks([task(0)])
    queue = make_queue("a", lease_seconds=0.02)
    claims = queue.claim_tasks(1, 0)
    for _ in range(9):
        queue.renew(claims)
    time.sleep(0.03)
    [again] = queue.claim_tasks(1, 0)
    assert again.deliveries == 2


def test_a_claim_on_a_deleted_entry_is_dropped(make_queue, client):
    make_queue().put_tasks([task(0), task(1)])
    queue = make_queue("a", lease_seconds=0.02)
    gone, _ = queue.claim_tasks(2, 0)
    client.xdel("preceptor:{run}:tasks", gone.entry_id)
    time.sleep(0.03)
    assert slots(queue.claim_tasks(2, 0)) == [1]
    assert queue.backlog().tasks_running == 1


def test_a_held_group_that_was_deleted_is_dropped(make_queue, client):
    worker = make_queue("w")
    make_queue().put_tasks([task(slot) for slot in range(3)])
    for claim in worker.claim_tasks(3, 0):
        worker.finish_task(claim, group_for(claim.message))
    gone, also_gone, _ = make_queue().claim_groups(3, 0)
    client.xdel("preceptor:{run}:groups", gone.entry_id, also_gone.entry_id)
    restarted = make_queue()
    assert slots(restarted.claim_groups(2, 0)) == [2]
    assert restarted.backlog().groups_held == 1


def test_clearing_drops_waiting_and_running_tasks(make_queue):
    trainer, worker = make_queue(), make_queue("w")
    trainer.put_tasks([task(slot) for slot in range(4)])
    claims = worker.claim_tasks(2, 0)
    trainer.clear_tasks()
    assert trainer.backlog() == Backlog(0, 0, 0, 0, 0)
    assert worker.renew(claims) == []
    trainer.put_tasks([task(9)])
    assert slots(worker.claim_tasks(9, 0)) == [9]
    # A worker that finishes late still hands in; the trainer refuses it by its incarnation.
    worker.finish_task(claims[0], group_for(claims[0].message))
    assert slots(trainer.claim_groups(9, 0)) == [0]


def test_heartbeats_expire(make_queue):
    queue = make_queue()
    queue.beat("rollout", "host:1", {"tokens": 7, "rate": 1.5, "device": "cpu"})
    queue.beat("rollout", "host:2", {}, ttl_seconds=0.05)
    queue.beat("teacher", "t", {})
    assert queue.heartbeats("rollout").keys() == {"host:1", "host:2"}
    time.sleep(0.1)
    assert queue.heartbeats("rollout") == {"host:1": {"tokens": 7, "rate": 1.5, "device": "cpu"}}


def test_runs_share_a_redis_and_each_keeps_to_one_slot(make_queue, client):
    queue, other = make_queue(), RolloutQueue(client, "run2", "w")
    queue.put_tasks([task(0)])
    queue.beat("rollout", "w", {})
    assert other.claim_tasks(1, 0) == [] and other.heartbeats("rollout") == {}
    assert all(key.startswith(b"preceptor:{run") for key in client.scan_iter())
    with pytest.raises(ValueError, match="run name"):
        RolloutQueue(client, "a*b", "w")


def test_task_keys_tell_kinds_and_incarnations_apart():
    first = task(3, step=5)
    keys = {
        task_key(first.id, queue_pb2.TASK_KIND_TRAIN),
        task_key(first.id, queue_pb2.TASK_KIND_EVALUATION),
        task_key(task(3, step=6).id, queue_pb2.TASK_KIND_TRAIN),
        task_key(task(4, step=5).id, queue_pb2.TASK_KIND_TRAIN),
        task_key(queue_pb2.TaskId(run="run", incarnation=2, step=5, slot=3), 1),
    }
    assert len(keys) == 5
    assert task_key(task(3, step=5).id, first.kind) in keys


def test_claims_are_values():
    one = task(0)
    assert Claim("1-0", 1, one) == Claim("1-0", 1, one)
