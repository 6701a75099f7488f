from __future__ import annotations

import pytest

from preceptor.config import RunConfig
from preceptor.config_errors import ConfigError
from preceptor.overrides import parse_overrides


def test_both_spellings_become_environment_variables():
    overrides = parse_overrides(
        ["--trainer.steps", "10", "--trainer.optimiser.learning_rate=1e-4", "--run.name=a=b"]
    )
    assert {override.variable: override.value for override in overrides} == {
        "PRECEPTOR_TRAINER__STEPS": "10",
        "PRECEPTOR_TRAINER__OPTIMISER__LEARNING_RATE": "1e-4",
        "PRECEPTOR_RUN__NAME": "a=b",
    }
    assert overrides[0].argument == "--trainer.steps=10"


def test_a_part_reads_them_over_its_file(tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {steps: 5, optimiser: {betas: [0.9, 0.99], learning_rate: 1}}")
    for override in parse_overrides(["--trainer.optimiser.learning_rate=2", "--trainer.a=[1, 2]"]):
        monkeypatch.setenv(override.variable, override.value)
    trainer = RunConfig.load(file).trainer
    assert trainer["steps"] == 5
    assert trainer["optimiser"]["betas"] == [0.9, 0.99]
    assert float(trainer["optimiser"]["learning_rate"]) == 2


def test_a_negative_number_is_a_value():
    (override,) = parse_overrides(["--trainer.x", "-3"])
    assert override.value == "-3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["steps", "3"], "'steps' is no override"),
        (["--trainer.steps"], "no value"),
        (["--trainer.steps", "--run.name", "x"], "--trainer.steps has no value"),
        (["--steps", "3"], "sections are run, redis, launch, teacher, rollout, trainer"),
        (["--trainer", "{}"], "names no setting"),
        (["--trainer.learning-rate", "1"], "underscores"),
        (["--trainer.a__b", "1"], "underscores"),
    ],
)
def test_what_is_no_override_is_refused_by_name(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse_overrides(arguments)
