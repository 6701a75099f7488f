from __future__ import annotations

import json

import pytest

from preceptor.launch.metrics import MetricsTail, read_metrics
from preceptor.launch.progress import Progress


def line(**row) -> str:
    return json.dumps(row) + "\n"


def test_only_new_whole_lines_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read().rows == []
    path.write_text(line(step=0) + line(step=1)[:5])
    first = tail.read()
    assert (first.rows, first.from_start) == ([{"step": 0}], True)
    assert tail.read().rows == []
    path.write_text(line(step=0) + line(step=1))
    second = tail.read()
    assert (second.rows, second.from_start) == ([{"step": 1}], False)


@pytest.mark.parametrize("extra", [0, 50], ids=["shorter", "grown past the old end"])
def test_a_file_cut_back_is_read_anew(tmp_path, extra):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step=step, run=1) for step in range(10)))
    tail = MetricsTail(path)
    tail.read()
    rows = [line(step=step, run=1) for step in range(4)]
    rows += [line(step=step, run=2) for step in range(4, 6 + extra)]
    path.write_text("".join(rows))
    batch = tail.read()
    assert batch.from_start
    assert [row["step"] for row in batch.rows] == list(range(6 + extra))


def test_a_removed_file_voids_what_was_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(step=0))
    tail = MetricsTail(path)
    tail.read()
    path.unlink()
    assert tail.read().from_start
    path.write_text(line(step=7))
    assert tail.read().rows == [{"step": 7}]


def test_lines_that_are_no_rows_are_counted_and_not_hidden(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"ste{"step": 1}\n3\n{"step": 2}\n')
    batch = read_metrics(path)
    assert [row["step"] for row in batch.rows] == [0, 2]
    assert batch.unreadable == 2


def test_progress_of_a_run():
    progress = Progress()
    progress.take(
        [
            {"event": "start", "step": 0},
            {"event": "evaluation", "step": 0, "accuracy": 0.4},
            {"event": "step", "step": 0, "steps": 9, "tokens": 100, "step_s": 1.0, "raw_kl": 2.0,
             "rollout_wait_s": 0.6, "train_s": 0.4, "reward": 0.2},
            {"event": "step", "step": 1, "steps": 9, "tokens": 500, "step_s": 2.0, "raw_kl": 1.0,
             "rollout_wait_s": 0.9, "train_s": 1.1, "reward": 0.4},
            {"event": "evaluation", "step": 2, "accuracy": 0.5},
            {"event": "warning", "step": 1, "message": "late"},
        ]
    )  # fmt: skip
    assert (progress.step, progress.steps) == (2, 9)
    assert progress.latest("raw_kl") == 1.0
    assert progress.mean("reward") == pytest.approx(0.3)
    assert progress.tokens_per_second() == pytest.approx(200.0)
    assert progress.time_shares() == pytest.approx({"rollout_wait_s": 0.5, "train_s": 0.5})
    assert progress.first_evaluation["accuracy"] == 0.4
    assert progress.evaluation["accuracy"] == 0.5
    assert progress.warning == "late"


def test_progress_of_rows_that_say_nothing():
    progress = Progress()
    progress.take([{}, {"event": "step"}, {"event": "evaluation"}, {"event": "new", "step": None}])
    assert progress.step == 0
    assert progress.steps is None
    assert progress.tokens_per_second() is None
    assert progress.latest("raw_kl") is None
    assert progress.time_shares() == {}
