"""python -m services.rollout as the launcher runs it: policies on demand, kill -9, SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from modeling.load import load_model, save_model
from preceptor.policy import PolicyStore, Version
from preceptor.queue import RolloutQueue
from tests.rollout.prompt_tasks import RUN, check_group, read_groups, task
from tests.tiny_models import make_llama

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 1.0
# Long enough to be caught in the middle.
LONG = {"max_new_tokens": 1500, "eos_ids": b"", "samples": 2}


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A student that may write long."""
    return make_llama(tmp_path_factory.mktemp("student"), max_position_embeddings=2048)


@pytest.fixture
def store(tmp_path, student):
    store = PolicyStore(tmp_path / "policies")
    store.publish(Version(0, 0), lambda folder: save_model(load_model(student), folder))
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
        "redis": {"url": redis_url},
        "rollout": {"model": str(student), "lease_seconds": LEASE_SECONDS, "threads": 1},
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


def test_serves_loads_what_is_asked_for_and_stops_when_told(
    start, trainer, store, student, tmp_path, redis_client
):
    process = start("w0")
    first = [task(slot) for slot in range(4)]
    trainer.put_tasks([*first, task(9, ids=[96])])
    groups = read_groups(trainer, 4, 60.0)
    old = load_model(student)
    for one in first:
        check_group(old, one, groups[one.id.slot], Version(0, 0))
    assert "id 96" in trainer.dead_letters()[0].reason
    assert "step 4 slot 9 goes to the dead letters" in (tmp_path / "w0.log").read_text()

    new = load_model(make_llama(tmp_path / "new", seed=1, max_position_embeddings=2048))
    store.publish(Version(0, 1), lambda folder: save_model(new, folder))
    trainer.put_tasks([task(0, Version(0, 1))])
    check_group(new, task(0), read_groups(trainer, 1, 20.0)[0], Version(0, 1))

    trainer.put_tasks([task(1, **LONG)])
    beat = {}

    def generating():
        beat.update(trainer.heartbeats("rollout").get("w0", {}))
        return beat.get("state") == "generating"

    wait_for(generating, process)
    assert beat["policy"] == "0-000001" and beat["tokens"] > 0 and beat["tokens_per_second"] >= 0
    told = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert time.monotonic() - told < 4
    assert trainer.backlog().groups_waiting == 0
    # Given back at once and unblamed: no lease has to run out.
    other = RolloutQueue(redis_client, RUN, "w1", lease_seconds=3600.0)
    assert other.claim_tasks(1, 0.0) == []
    other = RolloutQueue(redis_client, RUN, "w1", lease_seconds=LEASE_SECONDS)
    (claim,) = other.claim_tasks(1, 0.0)
    assert (claim.message.id.slot, claim.deliveries) == (1, 1)


@pytest.mark.pitfall("Q3")
def test_a_killed_workers_task_is_done_by_another(start, trainer, store, student):
    victim = start("victim")
    trainer.put_tasks([task(0, **LONG)])
    wait_for(lambda: trainer.backlog().tasks_running == 1, victim)
    heir = start("heir")
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    groups = read_groups(trainer, 2, 30.0) if heir.poll() is None else {}
    assert groups[0].worker == "heir"
    # The same task makes the same responses, whoever writes them.
    check_group(load_model(student), task(0, **LONG), groups[0], Version(0, 0))
    assert trainer.backlog().dead == 0


def test_settings_that_cannot_be_read_are_said(tmp_path):
    command = [sys.executable, "-m", "services.rollout", str(tmp_path / "missing.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot read the settings file" in done.stderr
