"""python -m services.rollout as the launcher runs it: policies on demand, kill -9, SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from modeling.load import load_model, save_model
from modeling.probe import probe_logprobs, write_probe
from modeling.sharing import probe_groups
from preceptor.policy import PolicyStore, Version
from preceptor.queue import RolloutQueue
from services.rollout.__main__ import main
from tests.rollout.prompt_tasks import FIRST, RUN, check_group, read_groups, task
from tests.tiny_models import make_llama

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 1.0
# The student may write so much that it can be caught in the middle.
MAX_TOKENS = 4096


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("student"), max_position_embeddings=MAX_TOKENS)


@pytest.fixture
def store(tmp_path, student):
    store = PolicyStore(tmp_path / "policies")
    store.publish(FIRST, lambda folder: save_model(load_model(student), folder))
    return store


@pytest.fixture
def trainer(redis_client):
    return RolloutQueue(redis_client, RUN, "trainer")


@pytest.fixture
def start(tmp_path, redis_url, student):
    """Start workers by name; whatever is left is killed at the end."""
    run = tmp_path / "run.yaml"
    sections = {
        "run": {"name": RUN, "dir": str(tmp_path)},
        "redis": {"url": redis_url, "lease_seconds": LEASE_SECONDS},
        "rollout": {"model": str(student), "threads": 1},
        "trainer": {"steps": 1},
    }
    run.write_text(yaml.safe_dump(sections))
    processes = []

    def begin(name):
        command = [sys.executable, "-m", "services.rollout", str(run), "--rollout.name", name]
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition, process, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the worker left with {process.returncode}"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.pitfall("Q3")
def test_the_life_of_two_workers(start, trainer, store, student, tmp_path, redis_client):
    old = load_model(student)
    new = load_model(make_llama(tmp_path / "new", seed=1, max_position_embeddings=MAX_TOKENS))

    # One serves, and buries alone what cannot be served.
    victim = start("victim")
    first = [task(slot) for slot in range(4)]
    trainer.put_tasks([*first, task(9, ids=[96])])
    groups = read_groups(trainer, 4, 60.0)
    for one in first:
        check_group(old, one, groups[one.id.slot], FIRST)
    wait_for(lambda: trainer.backlog().dead == 1, victim)
    assert "id 96" in trainer.dead_letters()[0].reason
    assert "step 4 slot 9 goes to the dead letters" in (tmp_path / "victim.log").read_text()

    # It is killed in the middle of a batch; another writes the same responses.
    long = task(0, max_new_tokens=400, eos_ids=b"", samples=2)
    trainer.put_tasks([long])
    wait_for(lambda: trainer.backlog().tasks_running == 1, victim)
    victim.kill()
    assert trainer.backlog().groups_waiting == 0
    heir = start("heir")
    groups = read_groups(trainer, 1, 60.0)
    assert groups[0].worker == "heir"
    check_group(old, long, groups[0], FIRST)

    # That one loads a newer policy when a task asks for it.
    second = Version(0, 1)
    store.publish(second, lambda folder: save_model(new, folder))
    trainer.put_tasks([task(0, second)])
    check_group(new, task(0), read_groups(trainer, 1, 20.0)[0], second)

    # Told to stop in the middle of a batch, it leaves and gives its task back, unblamed.
    trainer.put_tasks([task(1, max_new_tokens=MAX_TOKENS - 3, eos_ids=b"", samples=16)])
    beat = {}

    def generating():
        beat.update(trainer.heartbeats("rollout").get("heir", {}))
        return beat.get("state") == "generating"

    wait_for(generating, heir)
    assert beat["policy"] == "0-000001" and beat["tokens"] > 0 and beat["tokens_per_second"] >= 0
    told = time.monotonic()
    heir.terminate()
    assert heir.wait(10) == 0
    assert time.monotonic() - told < 4
    assert trainer.backlog().groups_waiting == 0
    other = RolloutQueue(redis_client, RUN, "other", lease_seconds=LEASE_SECONDS)
    (claim,) = other.claim_tasks(1, 0.0)
    assert (claim.message.id.slot, claim.deliveries) == (1, 1)


def test_a_model_that_is_not_the_trainers_ends_the_worker_with_2(
    start, trainer, store, student, tmp_path
):
    other = load_model(make_llama(tmp_path / "other", intermediate_size=64))
    store.publish(Version(0, 1), lambda folder: save_model(other, folder))
    trainer.put_tasks([task(0, Version(0, 1))])
    assert start("misfit").wait(60) == 2
    said = (tmp_path / "misfit.log").read_text()
    assert f"rollout: rollout.model {student} is not the model" in said
    assert str(store.path(Version(0, 1))) in said and "set rollout.model to trainer.student" in said
    assert "Traceback" not in said
    assert trainer.backlog().tasks_running == 1


@pytest.mark.pitfall("L14")
def test_drift_ends_the_worker_with_2_before_it_writes(start, trainer, store, student, tmp_path):
    loaded = load_model(student)

    def write(folder):
        save_model(loaded, folder)
        theirs = probe_logprobs(loaded) - np.float32(0.5)
        write_probe(folder, theirs, "float32", probe_groups(loaded))

    store.publish(Version(0, 1), write)
    trainer.put_tasks([task(0, Version(0, 1))])
    assert start("drifting").wait(60) == 2
    said = (tmp_path / "drifting.log").read_text()
    assert "policy 0-000001" in said and "differ by 0.5 nat on average" in said
    assert f"rollout: with the same published weights the rollout worker ({student}" in said
    assert "Traceback" not in said
    backlog = trainer.backlog()
    assert (backlog.groups_waiting, backlog.tasks_running) == (0, 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batch_sequences": 0}, "batch_sequences"),
        ({"model": "."}, "holds no safetensors"),
    ],
)
def test_what_cannot_be_used_is_one_message_and_2(
    changes, words, tmp_path, redis_url, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    sections = {
        "run": {"dir": str(tmp_path)},
        "redis": {"url": redis_url},
        "rollout": {"model": ".", **changes},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert main(["run.yaml"]) == 2
    finally:
        for one, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(one, handler)
    said = capsys.readouterr().err
    assert "rollout: " in said and words in said and "Traceback" not in said


def test_settings_that_cannot_be_read_are_said(tmp_path, capsys):
    assert main([str(tmp_path / "missing.yaml")]) == 2
    assert "cannot read the settings file" in capsys.readouterr().err
