from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from preceptor.cli import app


def make_run(folder: Path, steps: int = 30, tag: str = "seen") -> Path:
    rows: list[dict] = [{"event": "start", "time": 100.0, "step": 0}]
    rows.append({"event": "evaluation", "time": 101.0, "step": 0, "accuracy": 0.25, "prompts": 512,
                 f"accuracy/{tag}": 0.5, "raw_kl": 1.5})  # fmt: skip
    for step in range(steps):
        rows.append({"event": "step", "time": 102.0 + step, "step": step, "raw_kl": 1.5 - step / 30,
                     "reward": 0.3, "clamped_low": 0.1, "sign_flips": 0.2, "gradient_norm": 1.0,
                     "step_s": 1.0, "rollout_wait_s": 0.25, "train_s": 0.5, "tokens": 1000,
                     "sequences": 8, "tokens_per_second": 1000.0})  # fmt: skip
    # A step that a crash undid, done again.
    rows += [{"event": "resume", "step": steps - 1}, {**rows[-1], "reward": 0.9}]
    rows.append({"event": "evaluation", "time": 200.0, "step": steps, "accuracy": 0.75,
                 f"accuracy/{tag}": 0.8, "raw_kl": 0.5})  # fmt: skip
    rows.append({"event": "warning", "step": 3, "message": "odd <script>alert(1)</script>"})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def report(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["report", str(folder), *options])
    assert result.exit_code == 0, result.output
    return Path(result.output.strip()).read_text()


def test_the_page_has_its_figures_and_its_numbers(tmp_path):
    page = report(make_run(tmp_path / "run"))
    charts = page[page.index("<main") :]
    assert charts.count("Plotly.newPlot(") == 6
    rows = re.findall(
        r"<th>([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td><td class=change>([^<]*)<", page
    )
    assert rows == [
        ("accuracy", "25.0%", "75.0%", "+50.0 points"),
        ("accuracy, seen", "50.0%", "80.0%", "+30.0 points"),
        ("raw KL", "1.500", "0.500", "3.0x lower"),
    ]
    assert "<th>steps</th><td>30</td>" in page
    assert "<th>tokens trained</th><td>30,000</td>" in page


def test_the_page_needs_nothing_else(tmp_path):
    page = report(make_run(tmp_path / "run"))
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)


def test_all_that_comes_from_the_run_is_escaped(tmp_path):
    folder = make_run(tmp_path / "a<b>&c", tag="<img src=x>")
    (folder / "config.yaml").write_text("run: </pre><script>alert(2)</script>\n")
    page = report(folder)
    assert "a&lt;b&gt;&amp;c" in page
    for bad in ("<img", "alert(1)</script>", "alert(2)</script>", "a<b>"):
        assert bad not in page


def test_credentials_do_not_travel_with_a_report(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text("redis: {url: 'rediss://me:hunter2@host:6379/0'}\n")
    page = report(folder)
    assert "hunter2" not in page
    assert "rediss://***@host:6379/0" in page


def test_the_ledger_is_counted(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        {"step": 0, "slot": 0, "samples": [0, 1], "dropped": {"2": "empty"}},
        {"step": 0, "slot": 1, "samples": [0], "dropped": {}},
        {"step": 0, "slot": 0, "samples": [1], "dropped": {}},
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "5 rollouts, 1 repeated" in report(folder)


def test_few_metrics_make_a_small_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 0, "raw_kl": 1.0}\n{"ev')
    page = report(tmp_path, "--output", str(tmp_path / "page.html"))
    assert page[page.index("<main") :].count("Plotly.newPlot(") == 1
    assert "No evaluation yet" in page


@pytest.mark.parametrize("text", [None, ""])
def test_a_folder_without_metrics_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "metrics.jsonl" in result.stderr
