"""A trainer that is killed, stopped and restarted, among real parts."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from preceptor.manifest import verify_folder
from tests.integration.small_run import (
    ROOT,
    every_rollout_once,
    ledger_keys,
    make_run,
    processes_of,
)
from tests.launch.processes import wait_for
from trainer.ranks import loopback

pytestmark = pytest.mark.slow
STEPS, KILLS = 30, 20


@pytest.mark.pitfall("T1")
@pytest.mark.pitfall("Q7")
@pytest.mark.timeout(600)
def test_a_trainer_killed_at_20_random_moments(tmp_path):
    run = make_run(
        tmp_path,
        STEPS,
        {"restart_budget": KILLS + 5, "restart_backoff_limit_seconds": 0.2},
        checkpoint={"every_steps": 1},
        evaluation={"prompts": 2},
    )
    moments = random.Random(0)
    process = run.start()
    output: list[str] = []
    reader = reading(process, output)
    try:
        for kill in range(KILLS):
            resumed = wait_for_start(run, process, kill)
            # Now and then in the middle of its start, else somewhere in its first steps.
            time.sleep(moments.uniform(0.0, 0.8))
            resumed.kill()
            wait_for(lambda victim=resumed: not victim.is_running(), 20)
            for folder in (run.folder / "checkpoints").glob("[0-9]*"):
                verify_folder(folder)
        process.wait(240)
    finally:
        process.kill()
        reader.join(20)
    assert process.returncode == 0, "".join(output)[-3000:]
    assert sorted(ledger_keys(run)) == every_rollout_once(STEPS)
    assert sorted(run.steps()) == list(range(STEPS))
    log = "".join(path.read_text() for path in run.folder.rglob("trainer*.log"))
    assert log.count("at step") > KILLS / 2
    assert "is damaged" not in log
    assert processes_of(run, "any") == []


def wait_for_start(run, process, starts):
    """The trainer's process, once it has written that it goes on."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before all kills"
        found = processes_of(run, "trainer")
        incarnation = run.folder / "incarnation"
        if found and incarnation.exists() and int(incarnation.read_text()) >= starts:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no start after kill {starts}")


def reading(process, output):
    """Keep the pipe from filling up."""
    thread = threading.Thread(target=lambda: output.append(process.stdout.read()))
    thread.start()
    return thread


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_ends_clean(tmp_path, redis_url, ranks):
    with parts(tmp_path, redis_url, scale={"ranks": ranks}) as (run, command):
        trainer = subprocess.Popen([sys.executable, "-m", "trainer", *command], cwd=ROOT)
        wait_for(lambda: 3 in run.steps() or trainer.poll() is not None, 90)
        family = [trainer.pid, *(one.pid for one in psutil.Process(trainer.pid).children(True))]
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == 128 + signal.SIGTERM
        wait_for(lambda: not any(map(psutil.pid_exists, family)))
        # Not a step is lost, though the next checkpoint was far.
        [newest] = (run.folder / "checkpoints").glob("[0-9]*")
        assert int(newest.name.split("-")[0]) == len(run.steps()) < STEPS
        verify_folder(newest)


def test_torchrun_restarts_ranks_that_die_and_the_run_goes_on(tmp_path, redis_url):
    with parts(tmp_path, redis_url, checkpoint={"every_steps": 3}, steps=12) as (run, command):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
        rest = ["--local-addr=localhost", "--max-restarts=2", "-m", "trainer", *command]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": loopback()}
        agent = subprocess.Popen([*torchrun, *place, *rest], cwd=ROOT, env=environment)
        try:
            wait_for(lambda: 4 in run.steps() or agent.poll() is not None, 90)
            ranks = {
                one.environ()["RANK"]: one
                for one in psutil.Process(agent.pid).children()
                if "RANK" in one.environ()
            }
            ranks["1"].kill()
            assert agent.wait(180) == 0
        finally:
            agent.kill()
        events = [row["event"] for row in run.rows("metrics.jsonl")]
        assert events.count("resume") == 1 and events[-1] == "end"
        assert sorted(ledger_keys(run)) == every_rollout_once(12)


@contextmanager
def parts(folder, redis_url, **trainer):
    """A run's teacher and rollout worker; yields the run and the trainer's arguments."""
    port = free_port()
    settings = {"checkpoint": {"every_steps": 100}, "evaluation": {"prompts": 2}} | trainer
    run = make_run(folder, settings.pop("steps", STEPS), **settings)
    command = [
        str(run.file),
        f"--redis.url={redis_url}",
        f"--run.name={folder.name}",
        f"--trainer.teacher=127.0.0.1:{port}",
    ]
    started = [
        subprocess.Popen([sys.executable, "-m", module, *command, *more], cwd=ROOT)
        for module, more in (
            ("services.teacher", [f"--teacher.port={port}"]),
            ("services.rollout", []),
        )
    ]
    try:
        yield run, command
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait(30)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
