"""Settings: one YAML file a run, overridden by the environment, overridden by the command line.

Each process reads the same file. It types its own section by a subclass of RunConfig and leaves the
others alone, so that no floor has to know another's settings. Every default stands in the class
that declares the field, nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import CliSettingsSource


class ConfigError(ValueError):
    """A settings file that cannot be read."""


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, fields carry their docstrings as help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class RunSettings(Section):
    """What a run is called, where it keeps its files, and the seed everything derives from."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Names the run in Redis keys and rollout ids. Runs with different names share one Redis."""

    dir: Path = Path("runs/run")
    """Folder of the run: policies, checkpoints, ledger, metrics, logs."""

    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds data order and sampling."""


class RedisSettings(Section):
    """Where the queue lives."""

    url: str = "redis://127.0.0.1:6379/0"
    """redis:// or rediss:// URL. `preceptor up` starts its own server unless launch.redis is false,
    and then sets this for every part."""

    lease_seconds: float = Field(15.0, gt=0)
    """A prompt task not renewed for this long is handed to another worker. Shorter: a dead worker's
    tasks move sooner. Workers renew at a third of it."""

    max_deliveries: int = Field(5, ge=1)
    """A prompt task handed out more often than this goes to the dead letters."""

    retry_seconds: float = Field(120.0, ge=0)
    """How long a part waits for a Redis that is away before it gives up."""


class RunConfig(BaseSettings):
    """A whole RUN.yaml. Subclasses replace a section's dict by a typed Section."""

    model_config = SettingsConfigDict(
        env_prefix="PRECEPTOR_",
        env_nested_delimiter="__",
        extra="forbid",
        use_attribute_docstrings=True,
    )

    run: RunSettings = RunSettings()
    redis: RedisSettings = RedisSettings()
    launch: dict[str, Any] = {}
    """Read by `preceptor up`."""
    teacher: dict[str, Any] = {}
    """Read by `python -m services.teacher`."""
    rollout: dict[str, Any] = {}
    """Read by `python -m services.rollout`."""
    trainer: dict[str, Any] = {}
    """Read by `python -m trainer`."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file, which arrives as init arguments."""
        return env_settings, init_settings

    @classmethod
    def load(cls, path: Path | None, arguments: list[str] | None = None) -> Self:
        """Read a settings file and apply the environment and command line on top.

        Args:
            path: the RUN.yaml; None leaves environment, command line and defaults.
            arguments: command-line overrides such as ["--trainer.steps", "10"].

        Raises:
            ConfigError: the file is missing or no YAML mapping.
            pydantic.ValidationError: unknown keys or values out of range.
        """
        values: dict[str, Any] = {}
        if path is not None:
            values = _read_yaml(path)
        command_line: CliSettingsSource = CliSettingsSource(
            cls, cli_parse_args=arguments or [], cli_prog_name="preceptor", cli_avoid_json=False
        )
        return cls(_cli_settings_source=command_line, **values)

    def resolved(self) -> str:
        """All settings as YAML, for people; a password in a URL is left out."""
        values = self.model_dump(mode="json")
        parts = urlsplit(self.redis.url)
        if parts.password is not None:
            place = parts.netloc.rpartition("@")[2]
            values["redis"]["url"] = parts._replace(netloc=f"***@{place}").geturl()
        return yaml.safe_dump(values, sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping; see examples/geometry/run.yaml")
    return values
