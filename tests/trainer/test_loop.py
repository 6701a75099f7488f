"""The loop of a run: order, stops, restarts, guards."""

import threading
import time

import pytest
import torch

from preceptor.policy import PolicyStore, Version
from preceptor.v1 import queue_pb2
from tests.trainer.small_loop import PROMPTS, SAMPLES, STEPS, ThreadWorker, small_loop
from trainer.checkpoint import UnusableCheckpoint
from trainer.journal import JournalTooShort
from trainer.loop import NonFiniteRun


@pytest.fixture
def loop(tmp_path, llama, redis_client):
    with small_loop(tmp_path, llama, redis_client) as loop:
        yield loop


@pytest.fixture
def worker(redis_client):
    with ThreadWorker(redis_client) as worker:
        yield worker


def ledger(loop):
    return sorted(
        (row["step"], row["slot"], sample)
        for row in loop.rows("ledger.jsonl")
        for sample in row["samples"]
    )


def everything():
    return [(s, p, i) for s in range(STEPS) for p in range(PROMPTS) for i in range(SAMPLES)]


def stop_when(loop, condition):
    """From a thread, so that the run goes on meanwhile."""

    def watch():
        deadline = time.monotonic() + 30
        try:
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            loop.stop.set()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_run_from_start_to_end(loop, worker):
    assert loop.run(evaluation=3).run() is True
    steps = [("step", step) for step in range(STEPS)]
    assert loop.events() == [
        ("start", 0),
        ("evaluation", 0),
        *steps,
        ("evaluation", STEPS),
        ("end", STEPS),
    ]
    assert ledger(loop) == everything()
    rows = [row for row in loop.rows("metrics.jsonl") if row["event"] == "step"]
    # Behaviour logprobs are -4 by fiat, the student's own are not: the difference is really taken.
    assert all(row["behaviour_difference"] > 0.01 for row in rows)
    assert all(row["raw_kl"] != 0 and row["truncated"] == 0 for row in rows)
    assert PolicyStore(loop.folder / "policies").latest() == Version(0, STEPS)


def test_tasks_are_sampled_for_training_and_half_greedy_for_evaluation(loop, worker):
    loop.run(evaluation=3).run()
    train = [one for one in worker.tasks if one.kind == queue_pb2.TASK_KIND_TRAIN]
    rest = [one for one in worker.tasks if one.kind == queue_pb2.TASK_KIND_EVALUATION]
    assert {(one.sampling.temperature, one.samples) for one in train} == {(1.0, SAMPLES)}
    assert sorted(one.sampling.temperature for one in rest) == [0.0] * 6 + [1.0] * 6
    # Every task draws from a seed of its own.
    assert len({one.sampling.seed for one in worker.tasks}) == len(worker.tasks)
    # At most one step ahead: the policy a task asks for is its step's, or the one before.
    assert {one.id.step - one.policy.step for one in train} == {0, 1}


def test_a_stopped_run_saves_and_goes_on_where_it_was(loop, worker):
    worker.hold = 3
    thread = stop_when(loop, lambda: ("step", 2) in loop.events())
    assert loop.run().run() is False
    thread.join()
    worker.hold = None
    assert loop.run().run() is True
    assert loop.events() == [
        ("start", 0),
        *[("step", step) for step in range(3)],
        ("resume", 3),
        ("step", 3),
        ("step", 4),
        ("end", STEPS),
    ]
    assert ledger(loop) == everything()
    assert {row["incarnation"] for row in loop.rows("ledger.jsonl")} == {0, 1}


def test_a_run_stopped_in_its_last_evaluation_makes_up_for_it(loop, worker):
    worker.hold = -1
    thread = stop_when(loop, lambda: ("step", STEPS - 1) in loop.events())
    assert loop.run(evaluation=3).run() is False
    thread.join()
    worker.hold = None
    assert loop.run(evaluation=3).run() is True
    assert loop.events()[-3:] == [("resume", STEPS), ("evaluation", STEPS), ("end", STEPS)]


@pytest.mark.parametrize("every_steps", [2, STEPS])
def test_a_complete_run_is_left_alone(loop, worker, every_steps):
    settings = {"evaluation": 3, "checkpoint": {"every_steps": every_steps}}
    loop.run(**settings).run()
    before = loop.rows("metrics.jsonl")
    assert before[-1]["event"] == "end"
    assert loop.run(**settings).run() is True
    assert loop.rows("metrics.jsonl") == before


def test_a_run_whose_ledger_was_cut_does_not_start(loop, worker):
    loop.run().run()
    (loop.folder / "ledger.jsonl").write_text("")
    with pytest.raises(JournalTooShort, match="has 0 bytes"):
        loop.run()


@pytest.mark.pitfall("Q7")
def test_a_kill_after_the_step_before_its_ack_counts_each_rollout_once(loop, worker):
    run = loop.run()
    finish = run._loader.finish

    def killed(batch):
        if run._step == 4:
            raise KeyboardInterrupt("killed after step 3 was trained and written down")
        finish(batch)

    run._loader.finish = killed
    with pytest.raises(KeyboardInterrupt):
        run.run()
    # Its groups are still in the queue, and in a ledger that no checkpoint counts on.
    assert [row["step"] for row in loop.rows("ledger.jsonl")][-1] == 3
    assert loop.run().run() is True
    assert ledger(loop) == everything()
    assert {row["step"]: row["incarnation"] for row in loop.rows("ledger.jsonl")} == {
        0: 0, 1: 0, 2: 1, 3: 1, 4: 1,
    }  # fmt: skip


@pytest.mark.pitfall("Q7")
def test_a_kill_after_the_ack_before_the_checkpoint_counts_each_rollout_once(loop, worker):
    run = loop.run()
    save, calls = run._save, []

    def crash_instead():
        calls.append(run._step)
        if len(calls) == 2:
            raise KeyboardInterrupt("killed at step 4")
        save()

    run._save = crash_instead
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert len(loop.rows("ledger.jsonl")) == 4 * PROMPTS
    assert loop.run().run() is True
    assert ledger(loop) == everything()
    assert [event for event in loop.events() if event[0] == "step"] == [
        ("step", step) for step in range(STEPS)
    ]
    assert [row["incarnation"] for row in loop.rows("ledger.jsonl")] == [0] * 4 + [1] * 6


def test_a_restarted_run_cannot_change_what_its_step_means(loop, worker):
    loop.run().run()
    with pytest.raises(UnusableCheckpoint, match=r"trainer\.prompts_per_step was 2 and is now 4"):
        loop.run(prompts_per_step=4)
    with pytest.raises(UnusableCheckpoint, match=r"at step 5 already, trainer\.steps is 3"):
        loop.run(steps=3)


@pytest.mark.pitfall("A8")
def test_three_gradients_that_are_not_finite_stop_the_run_and_one_does_not(loop, worker):
    run = loop.run()
    parameter = next(iter(run._crew.student.parameters.values()))
    bad = {2}
    parameter.register_hook(lambda g: g * torch.nan if run._step in bad else g)
    assert run.run() is True
    outcomes = {row["step"]: row["outcome"] for row in loop.rows("ledger.jsonl")}
    assert outcomes == {0: "trained", 1: "trained", 2: "skipped", 3: "trained", 4: "trained"}
    assert ledger(loop) == everything()


@pytest.mark.pitfall("A8")
def test_a_run_of_bad_gradients_ends_before_it_publishes_or_saves_them(loop, worker):
    run = loop.run()
    parameter = next(iter(run._crew.student.parameters.values()))
    parameter.register_hook(lambda g: g * torch.nan if run._step >= 2 else g)
    with pytest.raises(NonFiniteRun, match="3 steps in a row"):
        run.run()
    assert PolicyStore(loop.folder / "policies").latest() == Version(0, 4)
    saved = sorted(path.name for path in (loop.folder / "checkpoints").iterdir())
    assert saved == ["000002-0", "000004-0"]
    rows = loop.rows("metrics.jsonl")
    assert [row["gradient_norm"] for row in rows if row["event"] == "step"][2:] == [None, None]


def test_the_same_seed_gives_the_same_run(loop, worker, tmp_path, llama, redis_client):
    loop.run().run()
    redis_client.flushdb()
    with small_loop(tmp_path / "again", llama, redis_client) as again:
        again.run().run()
        keys = ("raw_kl", "loss", "gradient_norm", "tokens")
        first, second = (
            [[row[key] for key in keys] for row in one.rows("metrics.jsonl") if "loss" in row]
            for one in (loop, again)
        )
    assert first == second
