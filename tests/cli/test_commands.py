from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import yaml

from preceptor.cli import parts
from preceptor.config_names import is_section, settings_of
from preceptor.launch.settings import LaunchConfig
from services.rollout.settings import RolloutConfig
from services.teacher.settings import TeacherConfig
from trainer.settings import TrainerConfig


def preceptor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "preceptor.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_every_command():
    text = preceptor("--help").stdout
    for command in ("up", "teacher", "rollout", "train", "score", "report", "config", "export"):
        assert f" {command} " in text


def test_version():
    assert preceptor("--version").stdout == f"{version('preceptor')}\n"


@pytest.mark.parametrize(("command", "module"), [
    ("teacher", "services.teacher"), ("rollout", "services.rollout"), ("train", "trainer"),
])  # fmt: skip
def test_a_part_is_run_with_the_arguments_as_they_are(monkeypatch, command, module):
    ran = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: ran.append([path, *arguments]))
    monkeypatch.setattr(parts, "find_spec", lambda name: object())
    arguments = ["run.yaml", "--teacher.port", "5", "--x=y"]
    parts_app(command, arguments)
    assert ran == [[sys.executable, sys.executable, "-m", module, *arguments]]


def parts_app(command: str, arguments: list[str]):
    from typer.testing import CliRunner

    from preceptor.cli import app

    return CliRunner().invoke(app, [command, *arguments])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(
        parts, "find_spec", lambda name: None if name == "grpc_health" else object()
    )
    result = parts_app("teacher", ["run.yaml"])
    assert result.exit_code == 2
    assert "grpc_health" in result.stderr
    assert "pip install 'preceptor[teacher]'" in result.stderr


def test_the_command_itself_is_light():
    code = (
        "import sys, preceptor.cli; print({'torch', 'transformers', 'plotly'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n"


@pytest.mark.parametrize(("command", "line"), [
    ("teacher", "teacher.port: integer >= 0 <= 65535 = 50051"),
    ("rollout", "rollout.batch_sequences: integer >= 1 = 128"),
    ("train", "trainer.estimator.name: gndpo | opd | opd_raw | grpo = gndpo"),
])  # fmt: skip
def test_help_of_a_part_lists_its_settings_and_starts_nothing(monkeypatch, command, line):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    result = parts_app(command, ["--help"])
    assert result.exit_code == 0
    assert line in result.stdout.splitlines()
    assert "redis.url: text = redis://127.0.0.1:6379/0" in result.stdout
    assert parts_app(command, []).exit_code == 2


@pytest.mark.parametrize("config", [TeacherConfig, RolloutConfig, TrainerConfig, LaunchConfig])
def test_every_setting_has_its_docstring(config):
    undocumented = [
        ".".join(path)
        for path, declared in settings_of(config)
        if not (
            declared.description
            or (is_section(declared.annotation) and declared.annotation.__doc__)
        )
    ]
    assert undocumented == []


def test_the_settings_shown_are_those_of_all_parts_and_load_again(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "teacher: {model: a}\n"
        "trainer: {student: b, data: {train: c.jsonl}, estimator: {name: opd, clip: 2}}\n"
    )
    first = parts_app("config", ["show", str(file), "--trainer.loss=ppo", "--run.seed=3"])
    assert first.exit_code == 0
    shown = yaml.safe_load(first.stdout)
    assert shown["teacher"]["port"] == 50051
    assert shown["trainer"]["loss"]["name"] == "ppo"
    assert shown["run"]["seed"] == 3
    assert shown["launch"]["rollout_workers"] == 1
    assert "rollout" not in shown
    file.write_text(first.stdout)
    assert parts_app("config", ["show", str(file)]).stdout == first.stdout


def test_settings_that_cannot_be_shown_are_explained(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {student: b, data: {trian: c.jsonl}}")
    result = parts_app("config", ["show", str(file)])
    assert result.exit_code == 2
    assert "trainer.data.trian is unknown; did you mean trainer.data.train?" in result.stderr


def test_all_settings_can_be_listed():
    text = parts_app("config", ["settings"]).stdout
    for name in ("run.seed", "launch.redis", "teacher.dtype", "rollout.name", "trainer.lora.rank"):
        assert f"\n{name}: " in text


def test_up_validates_every_part_before_it_starts_one(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: {tmp_path / 'run'}}}\nteacher: {{model: a, prot: 1}}\n")
    result = preceptor("up", str(file))
    assert result.returncode == 2
    assert "trainer is missing" in result.stderr
    file.write_text(file.read_text() + "trainer: {student: b, data: {train: c}}\n")
    result = preceptor("up", str(file))
    assert result.returncode == 2
    assert "teacher.prot is unknown; did you mean teacher.port?" in result.stderr
    assert not (tmp_path / "run").exists()
