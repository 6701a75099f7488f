"""The engine's thread: one culprit fails alone, a dead engine is not hidden."""

from __future__ import annotations

import time

import numpy as np
import pytest

from modeling.groups import TokenGroup
from preceptor.v1 import teacher_pb2 as pb
from services.teacher.backlog import Backlog, BacklogFull, Call, Unit
from services.teacher.call import Options
from services.teacher.scores import Failure, Scores, trajectory_result
from services.teacher.worker import Worker

POISON = 66
OPTIONS = Options(temperature=1.0, top_k=0)


class FakeEngine:
    """Answers -1 everywhere; raises on batches that hold POISON."""

    def __init__(self, healthy=True):
        self.healthy = healthy
        self.batches = []

    def score(self, groups, options):
        self.batches.append([group.prompt_ids[0] for group in groups])
        for index, group in enumerate(groups):
            for row, ids in enumerate(group.responses):
                if POISON in ids:
                    raise RuntimeError("poisoned")
                count = len(ids)
                empty = np.empty((count, 0), np.float32)
                scores = Scores(np.full(count, -1.0, np.float32), empty.astype("i4"), empty, empty)
                yield {(index, row): scores}

    def probe(self):
        if not self.healthy:
            raise RuntimeError("dead")


def serve(engine, groups, backlog=None, calls=None, options=None):
    """Outcomes per group after a worker, run in this thread, served all of them."""
    backlog = backlog or Backlog(10**6, 0.0)
    outcomes = {}
    units = [
        Unit(
            calls[index] if calls else Call("s"),
            group,
            options[index] if options else OPTIONS,
            tokens=10,
            deliver=lambda found, index=index: outcomes.__setitem__(index, found),
            expire=lambda index=index: outcomes.__setitem__(index, "expired"),
        )
        for index, group in enumerate(groups)
    ]
    backlog.put(units)
    backlog.close()
    Worker(engine, backlog, batch_tokens=30).run()
    return outcomes


def group(prompt, *responses):
    return TokenGroup(np.array([prompt]), tuple(np.array(one) for one in responses))


@pytest.mark.pitfall("G9")
def test_only_the_culprit_fails():
    groups = [group(1, [5], [6]), group(2, [7], [POISON], [8]), group(3, [9])]
    outcomes = serve(FakeEngine(), groups)
    kinds = {
        index: [type(outcome).__name__ for outcome in found] for index, found in outcomes.items()
    }
    assert kinds == {0: ["Scores", "Scores"], 1: ["Scores", "Failure", "Scores"], 2: ["Scores"]}
    assert "RuntimeError: poisoned" in outcomes[1][1].message


def test_a_dead_engine_ends_the_thread():
    with pytest.raises(RuntimeError, match="dead"):
        serve(FakeEngine(healthy=False), [group(1, [POISON])])


@pytest.mark.parametrize("value", (float("nan"), 0.1))
@pytest.mark.pitfall("L12")
def test_an_impossible_score_is_internal_for_its_trajectory(value):
    empty = np.empty((2, 0), np.float32)
    logprobs = np.array([-1.0, value], np.float32)
    result = trajectory_result("t", Scores(logprobs, empty.astype("i4"), empty, empty))
    assert result.status == pb.TRAJECTORY_STATUS_INTERNAL
    assert result.refusal == pb.REFUSAL_INVALID_SCORE
    assert not result.logprobs
    assert "position 1" in result.message
    failed = trajectory_result("t", Failure("why"))
    assert (failed.refusal, failed.message) == (pb.REFUSAL_ENGINE_FAILED, "why")


@pytest.mark.pitfall("L12")
def test_zero_and_minus_infinity_are_scores():
    empty = np.empty((2, 0), np.float32)
    logprobs = np.array([0.0, -np.inf], np.float32)
    result = trajectory_result("t", Scores(logprobs, empty.astype("i4"), empty, empty))
    assert result.status == pb.TRAJECTORY_STATUS_OK
    assert np.frombuffer(result.logprobs, "<f4").tolist() == [0.0, -np.inf]


def test_work_is_taken_in_order_up_to_the_budget_and_with_equal_options():
    engine = FakeEngine()
    hot = Options(temperature=2.0, top_k=0)
    options = [OPTIONS, OPTIONS, OPTIONS, OPTIONS, hot, OPTIONS]
    serve(engine, [group(index, [5]) for index in range(6)], options=options)
    assert engine.batches == [[0, 1, 2], [3], [4], [5]]


@pytest.mark.pitfall("G4")
def test_cancelled_and_late_work_is_not_started():
    engine = FakeEngine()
    calls = [Call("s"), Call("s", cancelled=True), Call("s", deadline=time.monotonic() + 0.05)]
    backlog = Backlog(10**6, minimum_deadline_seconds=0.1)
    outcomes = serve(engine, [group(index, [5]) for index in range(3)], backlog, calls)
    assert engine.batches == [[0]]
    assert outcomes[2] == "expired" and 1 not in outcomes


@pytest.mark.pitfall("G10")
def test_the_backlog_is_bounded_by_tokens():
    backlog = Backlog(100, 0.0)
    backlog.reserve(60)
    with pytest.raises(BacklogFull, match="60 of 100") as caught:
        backlog.reserve(50)
    assert not caught.value.never
    with pytest.raises(BacklogFull) as caught:
        backlog.reserve(101)
    assert caught.value.never
    backlog.release(60)
    backlog.reserve(100)
