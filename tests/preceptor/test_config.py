"""Settings: file, then environment, then command line."""

import pytest
from pydantic import ValidationError

from preceptor.config import ConfigError, RunConfig, Section


class PartSettings(Section):
    size: int = 1
    name: str = "part"


class PartConfig(RunConfig):
    trainer: PartSettings = PartSettings()  # type: ignore[assignment]


def load(tmp_path, text, *arguments):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return PartConfig.load(file, list(arguments))


def test_the_command_line_beats_the_environment_beats_the_file(tmp_path, monkeypatch):
    text = "trainer: {size: 2, name: file}\nteacher: {anything: 1}\n"
    assert load(tmp_path, text).trainer == PartSettings(size=2, name="file")
    monkeypatch.setenv("PRECEPTOR_TRAINER__SIZE", "3")
    assert load(tmp_path, text).trainer == PartSettings(size=3, name="file")
    config = load(tmp_path, text, "--trainer.size", "4", "--run.seed=7")
    assert config.trainer == PartSettings(size=4, name="file")
    assert config.run.seed == 7


@pytest.mark.parametrize("text", ["trainer: {sise: 2}", "trainr: {size: 2}", "trainer: {size: x}"])
def test_unknown_keys_and_wrong_values_are_refused(tmp_path, text):
    with pytest.raises(ValidationError):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["- 1", "{", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        PartConfig.load(tmp_path / "nowhere.yaml")


def test_variables_that_kubernetes_injects_do_no_harm(tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_PORT", "tcp://10.0.0.1:6379")
    monkeypatch.setenv("PRECEPTOR_REDIS_PORT", "tcp://10.0.0.1:6379")
    assert load(tmp_path, "run: {name: a}").redis.url.startswith("redis://127.0.0.1")


def test_the_resolved_settings_keep_a_password_to_themselves(tmp_path):
    config = load(tmp_path, "redis: {url: 'rediss://user:secret@host:6380/1'}")
    text = config.resolved()
    assert "secret" not in text
    assert "rediss://***@host:6380/1" in text
