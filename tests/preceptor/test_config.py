"""Settings: file, then environment, then command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import Field, model_validator

from preceptor.config import RunConfig, Section, as_yaml
from preceptor.config_errors import ConfigError
from preceptor.config_help import settings_help
from preceptor.overrides import SECTIONS


class ShapeSettings(Section):
    """Of the part."""

    kind: str = "round"
    """A name alone will do."""

    edges: int | None = Field(0, ge=0, le=12)
    """null: nobody counted."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value


class PartSettings(Section):
    size: int = 1
    """In metres."""

    name: str = "part"
    label: str = Field(default_factory=lambda: "chosen")
    shape: ShapeSettings = ShapeSettings()

    @model_validator(mode="after")
    def _nothing_is_negative(self) -> PartSettings:
        if self.size < 0 and self.name == "part":
            raise ValueError(f"size {self.size} contradicts name part; set size or name")
        return self


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
    with pytest.raises(ConfigError):
        load(tmp_path, text)


@pytest.mark.parametrize(("text", "arguments", "words"), [
    ("trainer: {sise: 2}", [], "trainer.sise is unknown; did you mean trainer.size?"),
    ("trainr: {size: 2}", [], "trainr is unknown; did you mean trainer?"),
    ("trainer: {shape: {egdes: 2}}", [], "did you mean trainer.shape.edges?"),
    # Right word, wrong place.
    ("trainer: {edges: 2}", [], "trainer.edges is unknown; did you mean trainer.shape.edges?"),
    ("trainer: {zzz: 2}", [], "trainer.zzz is unknown; known here are label, name, shape, size"),
    ("{}", ["--trainer.sise=2"], "did you mean trainer.size?"),
    ("trainer: {size: x}", [], "trainer.size: .* integer.* \\(it is 'x'\\)"),
    ("trainer: {shape: {edges: 13}}", [], "trainer.shape.edges: .* 12 \\(it is 13\\)"),
    ("trainer: {size: -1}", [], "size -1 contradicts name part; set size or name"),
    ("trainer: {shape: square}", ["--trainer.shape.edges=4"], "trainer.shape.edges cannot be laid"),
    ("{}", ["--trainer.shape=square", "--trainer.shape.edges=4"], "cannot both be set"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_what_to_write(tmp_path, text, arguments, words):
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text, *arguments)


def test_an_unknown_section_of_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PRECEPTOR_TRAINR__SIZE", "3")
    with pytest.raises(ConfigError, match=r"PRECEPTOR_TRAINR__SIZE.*did you mean trainer\?"):
        load(tmp_path, "{}")


def test_a_name_alone_stands_for_a_section_wherever_it_comes_from(tmp_path, monkeypatch):
    assert load(tmp_path, "trainer: {shape: square}").trainer.shape.kind == "square"
    config = load(tmp_path, "trainer: {shape: {edges: 3}}", "--trainer.shape=square")
    assert config.trainer.shape == ShapeSettings(kind="square")
    monkeypatch.setenv("PRECEPTOR_TRAINER__SHAPE", "oval")
    assert load(tmp_path, "{}").trainer.shape.kind == "oval"


def test_null_and_json_are_read_outside_the_file(tmp_path):
    config = load(tmp_path, "{}", "--trainer.shape.edges=null", "--redis.lease_seconds=2")
    assert config.trainer.shape.edges is None
    assert config.redis.lease_seconds == 2
    config = load(tmp_path, "{}", '--trainer.shape={"edges": 4}')
    assert config.trainer.shape.edges == 4


def test_the_help_has_every_setting_with_type_limits_default_and_meaning():
    text = settings_help(PartConfig, ("trainer", "run"))
    assert "trainer.size: integer = 1\n    In metres.\n" in text
    assert (
        "[trainer.shape]\n    Of the part.\n\n"
        "trainer.shape.kind: text = round\n    A name alone will do.\n\n"
        "trainer.shape.edges: integer | null >= 0 <= 12 = 0\n    null: nobody counted.\n"
    ) in text
    assert "trainer.label: text, by default chosen at the start" in text
    assert "run.dir: path = runs/run" in text
    assert "redis.url" not in text


def test_overrides_know_the_sections_that_a_file_has():
    assert set(SECTIONS) == set(RunConfig.model_fields)


def test_the_settings_of_all_parts_are_light():
    code = (
        "import sys, services.teacher.settings, services.rollout.settings, trainer.settings;"
        "print({'torch', 'transformers', 'grpc', 'redis', 'pyarrow'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n"


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
    text = as_yaml(config.resolved())
    assert "secret" not in text
    assert "rediss://***@host:6380/1" in text


def test_the_resolved_settings_load_again_and_leave_each_start_its_choices(tmp_path):
    config = load(tmp_path, "trainer: {size: 3, shape: square}", "--trainer.shape=oval")
    text = as_yaml(config.resolved())
    assert "label" not in text
    assert load(tmp_path, text) == config
    assert "label: mine" in as_yaml(load(tmp_path, "trainer: {label: mine}").resolved())
