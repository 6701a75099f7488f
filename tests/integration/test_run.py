"""Whole runs with real parts: Redis, teacher, rollout worker and trainer as processes."""

import json
import shutil
import signal
import time

import pytest
import yaml

from tests.integration.small_run import (
    every_rollout_once,
    ledger_keys,
    make_run,
    processes_of,
)

STEPS = 6
LONG = 24


@pytest.mark.slow
def test_a_small_run_ends_with_everything_counted_once(tmp_path):
    run = make_run(tmp_path, STEPS)
    process = run.start()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert sorted(ledger_keys(run)) == every_rollout_once(STEPS)
    rows = run.rows("metrics.jsonl")
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(STEPS))
    steps = [row for row in rows if row["event"] == "step"]
    assert all(row["tokens_with_teacher"] == row["tokens"] > 0 for row in steps)
    assert all(row["staleness_mean"] <= 1 for row in steps)
    # The worker samples the distribution that the trainer recomputes, at the same version.
    assert steps[0]["behaviour_difference"] < 1e-4
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    assert [row["step"] for row in evaluations] == [0, STEPS]
    assert all(row["prompts/seen"] + row["prompts/unseen"] == 12 for row in evaluations)
    assert rows[-1]["event"] == "end"
    assert processes_of(run, "any") == []


@pytest.mark.slow
def test_a_run_whose_parts_are_killed_ends_with_everything_counted_once(tmp_path):
    run = make_run(tmp_path, LONG)
    process = run.start()
    try:
        for part, at_step in [("rollout", 3), ("teacher", 7), ("redis", 11), ("trainer", 15)]:
            wait_for_step(run, process, at_step)
            [victim] = processes_of(run, part)
            victim.kill()
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert sorted(ledger_keys(run)) == every_rollout_once(LONG)
    assert sorted(run.steps()) == list(range(LONG))
    # The trainer died after its checkpoint of step 12: what it did since was undone and redone.
    assert [row["event"] for row in run.rows("metrics.jsonl")].count("resume") == 1
    assert {row["incarnation"] for row in run.rows("ledger.jsonl")} == {0, 1}
    assert processes_of(run, "any") == []


@pytest.mark.slow
def test_a_run_interrupted_by_ctrl_c_goes_on_where_it_was(tmp_path):
    run = make_run(tmp_path, LONG)
    process = run.start()
    wait_for_step(run, process, 5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert processes_of(run, "any") == []
    stopped_at = len(run.steps())
    assert 5 < stopped_at < LONG
    # Nothing that was trained is trained again: the trainer saved when it was told to stop.
    output, _ = run.start().communicate(timeout=180)
    events = [(row["event"], row["step"]) for row in run.rows("metrics.jsonl")]
    assert ("resume", stopped_at) in events, output
    assert events[-1] == ("end", LONG)
    assert sorted(ledger_keys(run)) == every_rollout_once(LONG)


@pytest.mark.slow
def test_a_run_with_everything_switched_on(tmp_path):
    run = make_run(
        tmp_path,
        4,
        scale={"ranks": 2, "activation_checkpointing": True, "freeze_vision_tower": True},
        lora={"rank": 4},
        minibatches=2,
        estimator={"outcome_weight": 0.5, "statistics": "ema"},
        loss={"correction": "truncate", "top_k": 8, "top_k_weight": 0.1},
        evaluation={"every_steps": 2, "interim_prompts": 6},
    )
    process = run.start()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert sorted(ledger_keys(run)) == every_rollout_once(4)
    steps = [row for row in run.rows("metrics.jsonl") if row["event"] == "step"]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert all(row["top_k_kl"] > 0 for row in steps)
    # The workers sample from base and adapters what the trainer's ranks compute.
    assert all(row["staleness_mean"] > 0 or row["behaviour_difference"] < 1e-4 for row in steps)
    assert processes_of(run, "any") == []


@pytest.mark.slow
def test_more_top_k_ids_than_the_teacher_answers_stop_the_run(tmp_path):
    run = make_run(tmp_path, STEPS, loss={"top_k": 65, "top_k_weight": 0.1})
    process = run.start()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "trainer.loss.top_k 65 exceeds" in output
    assert "64 (its teacher.max_top_k)" in output


@pytest.mark.slow
@pytest.mark.pitfall("L8")
def test_a_teacher_with_another_tokenizer_stops_the_run_before_its_first_step(tmp_path):
    run = make_run(tmp_path, STEPS)
    other = tmp_path / "other"
    other.mkdir()
    swap_two_tokens(run, other)
    process = run.start()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "different tokenizers" in output
    assert "trainer.allow_mismatch: [tokenizer]" in output
    assert run.steps() == []
    assert processes_of(run, "any") == []


def swap_two_tokens(run, folder):
    """Give the run a teacher that calls two ids by each other's name."""
    settings = yaml.safe_load(run.file.read_text())
    shutil.copytree(settings["teacher"]["model"], folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer))
    settings["teacher"]["model"] = str(folder)
    run.file.write_text(yaml.safe_dump(settings))


def wait_for_step(run, process, step, timeout_seconds=120):
    deadline = time.monotonic() + timeout_seconds
    while step not in run.steps():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)
