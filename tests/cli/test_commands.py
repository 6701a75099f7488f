from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from preceptor.cli import parts


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
    for command in ("up", "teacher", "rollout", "train", "score", "report"):
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
    arguments = ["run.yaml", "--teacher.port", "5", "--x=y", "--help"]
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
