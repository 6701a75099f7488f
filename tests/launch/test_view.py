from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from preceptor.launch.child import Child, Part, State
from preceptor.launch.view import RunView
from preceptor.queue import RolloutQueue, connect
from preceptor.v1 import queue_pb2

pytest_plugins = ["tests.redis_fixtures"]

STEP = {
    "event": "step", "step": 6, "steps": 20, "raw_kl": 0.4321, "reward": 0.25, "tokens": 3000,
    "step_s": 2.0, "rollout_wait_s": 1.2, "teacher_wait_s": 0.1, "train_s": 0.6,
}  # fmt: skip


def shown(tmp_path: Path, redis_url: str, terminal: bool, rows: list[dict]) -> str:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    queue = RolloutQueue(
        connect(redis_url, socket_timeout_seconds=2), "view", "launcher", retry_seconds=0
    )
    worker = Child(Part("rollout-0", [sys.executable]), tmp_path / "log")
    worker.state, worker.restarts = State.READY, 2
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=110, color_system=None)
    with RunView("run [7]", metrics, queue, [worker], console):
        pass
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False], ids=["panel", "line"])
def test_it_shows_the_run(tmp_path, redis_url, redis_client, terminal):
    RolloutQueue(redis_client, "view", "trainer").put_tasks([queue_pb2.PromptTask()] * 3)
    rows = [{"event": "evaluation", "step": 0, "accuracy": 0.125}, STEP]
    text = shown(tmp_path, redis_url, terminal, rows)
    words = ["7/20", "0.432", "0.125", "0.250", "1,500 tokens/s", "tasks 3 waiting, 0 running"]
    words += ["waits for rollouts 60%", "waits for teacher 5%", "trains 30%", "rollout-0 ready"]
    words += ["restarted 2x", "run [7]"] if terminal else ["restarts 2"]
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("terminal", [True, False], ids=["panel", "line"])
def test_nothing_known_is_shown_as_such(tmp_path, terminal):
    text = shown(tmp_path, "redis://127.0.0.1:1/0", terminal, [{"event": "step"}])
    assert "queue unknown" in text
    assert "no step yet" in text
