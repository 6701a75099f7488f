"""Groups against their tasks, lineage, the table of outstanding tasks."""

import numpy as np
import pytest

from preceptor.codec import TeacherRefusal, encode_ids, encode_logprobs
from preceptor.policy import Version
from preceptor.v1 import queue_pb2, teacher_pb2
from tests.trainer.recorded import make_sample, make_task
from trainer.groups import Group, InvalidGroup, check_group, with_scores
from trainer.lineage import Lineage
from trainer.tasks import TaskFailed, TaskTable

LINEAGE = Lineage(0, {})


def check(task, group, max_staleness=1):
    return check_group(task, group, LINEAGE, max_staleness, vocabulary=96)


def answer(task, *responses, version=Version(0, 0)):  # noqa: B008  (frozen)
    group = queue_pb2.RolloutGroup(
        schema_version=1,
        id=task.id,
        kind=task.kind,
        prompt=task.prompt,
        sampling=task.sampling,
        worker="w",
    )
    for index, ids in enumerate(responses):
        rollout = group.rollouts.add(
            sample=index,
            response_ids=encode_ids(ids),
            behaviour_logprobs=encode_logprobs(np.full(len(ids), -1.0)),
            finish_reason=queue_pb2.FINISH_REASON_STOP,
        )
        if ids:
            rollout.policy_spans.add(version=version.message(), count=len(ids))
    return group


@pytest.mark.pitfall("T3")
def test_after_a_restart_only_the_living_and_fresh_versions_count():
    lineage = Lineage(0, {}).resumed(incarnation=1, step=5)
    accepted = [s for s in (3, 5, 9) if lineage.accepts(Version(0, s), step=5, max_staleness=1)]
    assert accepted == [5]
    # Version 9 of the lost future stays out even when the run gets there again.
    assert not lineage.accepts(Version(0, 9), step=9, max_staleness=1)
    assert lineage.accepts(Version(1, 9), step=9, max_staleness=1)
    assert not lineage.accepts(Version(1, 10), step=9, max_staleness=1)
    again = lineage.resumed(incarnation=2, step=3)
    assert not again.accepts(Version(0, 5), step=5, max_staleness=1)
    assert again.accepts(Version(0, 3), step=3, max_staleness=0)


def test_a_good_group_is_read():
    task = make_task(step=1)
    group = check(task, answer(task, [9, 10, 2], [2]), max_staleness=1)
    assert [sample.ids.tolist() for sample in group.samples] == [[9, 10, 2], [2]]
    assert group.samples[0].behaviour.tolist() == [-1, -1, -1]


def test_a_sample_of_two_policies_is_as_stale_as_the_older():
    task = make_task(step=1)
    group = answer(task, [9, 10, 2], [2])
    del group.rollouts[0].policy_spans[:]
    group.rollouts[0].policy_spans.add(version=Version(0, 0).message(), count=1)
    group.rollouts[0].policy_spans.add(version=Version(0, 1).message(), count=2)
    assert check(task, group).samples[0].version == Version(0, 0)
    with pytest.raises(InvalidGroup, match="policy 0-000000"):
        check(task, group, max_staleness=0)


@pytest.mark.pitfall("A9")
def test_an_empty_sample_is_dropped_not_refused():
    task = make_task()
    group = check(task, answer(task, [], [2]), max_staleness=0)
    assert [sample.index for sample in group.samples] == [1]
    assert group.dropped == {0: "empty"}


def damage_prompt(group):
    group.prompt.token_ids = encode_ids([1])


def damage_count(group):
    del group.rollouts[1]


def damage_index(group):
    group.rollouts[1].sample = 0


def damage_logprobs(group):
    group.rollouts[0].behaviour_logprobs = encode_logprobs([-1.0])


def damage_nan(group):
    group.rollouts[0].behaviour_logprobs = np.full(3, np.nan, "<f4").tobytes()


def damage_spans(group):
    group.rollouts[0].policy_spans[0].count = 2


def damage_suppressed(group):
    group.rollouts[0].response_ids = encode_ids([9, 3, 2])


def damage_version(group):
    group.rollouts[0].policy_spans[0].version.step = 7


def damage_mask(group):
    group.rollouts[0].loss_mask = b"\x01\x02\x01"


def damage_second_span(group):
    del group.rollouts[0].policy_spans[:]
    group.rollouts[0].policy_spans.add(version=Version(0, 0).message(), count=2)
    group.rollouts[0].policy_spans.add(version=Version(0, 7).message(), count=1)


def damage_sampling(group):
    group.sampling.temperature = 0.5


def damage_negative_id(group):
    group.rollouts[0].response_ids = np.array([9, -1, 2], "<i4").tobytes()


def damage_large_id(group):
    group.rollouts[0].response_ids = encode_ids([9, 96, 2])


def damage_end(group):
    group.rollouts[0].response_ids = encode_ids([9, 10, 11])


def damage_finish(group):
    group.rollouts[0].finish_reason = queue_pb2.FINISH_REASON_LENGTH


def damage_no_finish(group):
    group.rollouts[0].finish_reason = queue_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.pitfall("L6")
@pytest.mark.pitfall("L15")
@pytest.mark.parametrize(
    "damage",
    [
        damage_prompt,
        damage_count,
        damage_index,
        damage_logprobs,
        damage_nan,
        damage_spans,
        damage_suppressed,
        damage_version,
        damage_mask,
        damage_second_span,
        damage_sampling,
        damage_negative_id,
        damage_large_id,
        damage_end,
        damage_finish,
        damage_no_finish,
    ],
)
def test_a_group_that_does_not_answer_its_task_is_refused(damage):
    task = make_task()
    group = answer(task, [9, 10, 2], [2])
    damage(group)
    check(task, answer(task, [9, 10, 2], [2]))
    with pytest.raises(InvalidGroup):
        check(task, group, max_staleness=1)


def test_a_response_beyond_the_limit_is_refused():
    task = make_task()
    with pytest.raises(InvalidGroup, match="max_new_tokens is 12"):
        check(task, answer(task, [9] * 13, [2]), max_staleness=0)


@pytest.mark.pitfall("L12")
def test_what_the_teacher_refused_is_dropped_and_never_filled_in():
    result = teacher_pb2.TrajectoryResult(
        trajectory_id="0",
        status=teacher_pb2.TRAJECTORY_STATUS_INVALID_ARGUMENT,
        refusal=teacher_pb2.REFUSAL_TOO_LONG,
    )
    group = with_scores(
        Group(make_task(), (make_sample(0, [9], [-1.0]),)), [TeacherRefusal(result)]
    )
    assert group.samples == ()
    assert group.dropped == {0: "REFUSAL_TOO_LONG"}


def test_the_first_copy_takes_the_task_off_the_table():
    table, task = TaskTable(timeout_seconds=60), make_task()
    table.add([task], now=0.0)
    group = answer(task, [2], [2])
    assert table.find(group) == task
    table.settle(task)
    assert table.find(group) is None


def test_a_group_of_another_incarnation_answers_nothing():
    table = TaskTable(timeout_seconds=60)
    table.add([make_task(incarnation=1)], now=0.0)
    assert table.find(answer(make_task(incarnation=0), [2], [2])) is None


def test_overdue_and_lost_tasks_are_issued_again_with_growing_patience():
    table, task = TaskTable(timeout_seconds=60, lost_seconds=5), make_task()
    table.add([task], now=0.0)
    assert table.due_again(59.0, queue_is_empty=False) == []
    assert table.due_again(4.0, queue_is_empty=True) == []
    assert table.due_again(6.0, queue_is_empty=True) == [task]
    assert table.due_again(6.0 + 119.0, queue_is_empty=False) == []
    assert table.due_again(6.0 + 121.0, queue_is_empty=False) == [task]


def test_a_task_that_fails_again_and_again_ends_the_run_with_the_reason():
    table, task = TaskTable(timeout_seconds=60), make_task()
    assert not table.fail(task, "nobody asked", now=0.0)
    table.add([task], now=0.0)
    assert table.fail(task, "too long", now=1.0)
    assert table.fail(task, "too long", now=2.0)
    with pytest.raises(TaskFailed, match=r"step 0 slot 0 failed 3 times.*too long"):
        table.fail(task, "too long", now=3.0)
