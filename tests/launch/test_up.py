"""`preceptor up` with a real Redis and parts that do nothing but behave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch.processes import running, wait_for

FAKES = Path(__file__).parent / "fake_parts"


def start(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    run = {
        "run": {"name": "fake", "dir": str(tmp_path / "run")},
        "launch": {"restart_backoff_seconds": 0.1, "stop_grace_seconds": 5},
        "teacher": {"port": 1, "model": "m"},
        "rollout": {"model": "m"},
        "trainer": {
            "steps": 3,
            "teacher": "nowhere:1",
            "student": "s",
            "data": {"train": "prompts.jsonl"},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return subprocess.Popen(
        [sys.executable, "-m", "preceptor.cli", "up", "run.yaml", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FAKES), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(launcher: subprocess.Popen[str]) -> list[int]:
    return [child.pid for child in psutil.Process(launcher.pid).children(recursive=True)]


def child_named(launcher: subprocess.Popen[str], part: str) -> int | None:
    """The part's process, once it has become what it is."""
    for child in psutil.Process(launcher.pid).children():
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:  # or a zombie
            continue
        if part in command and "tether" not in command:
            return child.pid
    return None


def steps_done(tmp_path: Path) -> int:
    metrics = tmp_path / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def log(tmp_path: Path, part: str) -> str:
    return (tmp_path / "run" / "logs" / f"{part}.log").read_text()


def test_a_run_from_start_to_end(tmp_path):
    launcher = start(
        tmp_path, "--trainer.steps", "5", "--trainer.student_name=x y", "--launch.rollout_workers=2"
    )
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    assert "step 5/5" in output
    for part in ("redis", "teacher", "rollout-0", "rollout-1"):
        assert f"{part} is ready" in output
    told = json.loads(re.search(r"^\{.*steps.*\}$", log(tmp_path, "trainer"), re.M)[0])
    assert told["student_name"] == "x y"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", told["teacher"])
    assert (tmp_path / "run" / "redis").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path, number):
    launcher = start(tmp_path, "--trainer.steps", "6000")
    wait_for(lambda: steps_done(tmp_path) > 0)
    pids = children(launcher)
    assert len(pids) == 4
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number, output
    assert running(pids) == []


def test_a_signal_during_start_up_ends_everything(tmp_path):
    launcher = start(tmp_path)
    wait_for(lambda: len(children(launcher)) > 0)
    pids = children(launcher)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert running(pids) == []


def test_parts_killed_come_back_and_the_run_finishes(tmp_path):
    launcher = start(tmp_path, "--trainer.steps", "6000")
    wait_for(lambda: steps_done(tmp_path) > 0)
    for part in ("redis-server", "services.teacher", "services.rollout", "-m trainer"):
        victim = child_named(launcher, part)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda part=part, old=victim: child_named(launcher, part) not in (None, old))
    done = steps_done(tmp_path)
    wait_for(lambda: steps_done(tmp_path) > done)
    (tmp_path / "run" / "finish").touch()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    assert output.count("was killed by SIGKILL; restart 1 of 5") == 4
    assert "restarts 4" in output


def test_a_part_that_cannot_start_is_shown_with_its_log(tmp_path):
    launcher = start(tmp_path, FAKE_TEACHER_BREAKS="1")
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "the model folder <teacher> is not there" in output
    assert "teacher exited with 1 before it was ready" in output


def test_a_trainer_that_finds_its_settings_wrong_ends_the_run_with_its_code(tmp_path):
    launcher = start(tmp_path, "--trainer.student_name=mismatched")
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert "student and teacher have different tokenizers" in output


def test_two_launchers_do_not_share_a_run_folder(tmp_path):
    first = start(tmp_path, "--trainer.steps", "6000")
    wait_for(lambda: steps_done(tmp_path) > 0)
    second = start(tmp_path)
    output, _ = second.communicate(timeout=30)
    assert second.returncode == 2
    assert f"process {first.pid}" in output
    first.terminate()
    first.communicate(timeout=30)
    # The lock went with its process, its file did not.
    third = start(tmp_path, "--trainer.steps", "1")
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 0, output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trianer.steps", "3"], "no section 'trianer'"),
        (["--trainer.steps"], "--trainer.steps has no value"),
        (["--launch.rollout_workers", "-1"], "launch.rollout_workers"),
        (["--launch.nope", "1"], "launch.nope is unknown"),
        (["--trainer.stps", "1"], "did you mean trainer.steps?"),
        (["--redis.url", "redis://elsewhere"], "--launch.redis=false"),
        (["--teacher.port", "5"], "--launch.teacher=false"),
        (["--teacher.host", "10.0.0.1"], "teacher.host is 10.0.0.1"),
        (["--launch.redis=0", "--redis.url", "redis://me:secret@127.0.0.1:1/0"], "127.0.0.1:1/0"),
    ],
)
def test_bad_arguments_start_nothing(tmp_path, arguments, words):
    launcher = start(tmp_path, *arguments)
    output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 2
    assert words in output
    assert "secret" not in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "logs").exists()
