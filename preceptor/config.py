"""Settings: one YAML file a run, overridden by the environment, overridden by the command line.

Each process reads the same file. It types its own section by a subclass of RunConfig and leaves the
others alone, so that no floor has to know another's settings. Every default stands in the class
that declares the field, nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from preceptor.config_errors import ConfigError, explain, suggestion
from preceptor.config_names import setting_names, settings_of
from preceptor.overrides import PREFIX, parse_overrides


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
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
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
        """`load` has laid the sources over each other already."""
        return (init_settings,)

    @classmethod
    def load(cls, path: Path | None, arguments: Sequence[str] = ()) -> Self:
        """Read a settings file and lay the environment and the command line over it.

        Args:
            path: the RUN.yaml; None leaves environment, command line and defaults.
            arguments: command-line overrides such as ["--trainer.steps", "10"].

        Raises:
            ConfigError: the file is missing or no YAML mapping; a key is unknown, a value out of
                range, or settings contradict each other.
        """
        values = _read_yaml(path) if path is not None else {}
        return cls._validated(_overlaid(values, _Overrides(cls, arguments)()))

    @classmethod
    def recorded(cls, path: Path) -> Self:
        """Read the settings a run had, whatever the environment says now.

        Raises:
            ConfigError: as load.
        """
        return cls._validated(_read_yaml(path))

    @classmethod
    def _validated(cls, values: dict[str, Any]) -> Self:
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from error

    def resolved(self) -> dict[str, Any]:
        """All settings, for people and to be loaded again.

        A password in a URL is left out, and so is what nobody set and each start chooses anew.
        """
        values = self.model_dump(mode="json")
        for path, declared in settings_of(type(self)):
            if declared.default_factory is not None:
                _drop_unset(self, values, path)
        parts = urlsplit(self.redis.url)
        if parts.password is not None:
            place = parts.netloc.rpartition("@")[2]
            values["redis"]["url"] = parts._replace(netloc=f"***@{place}").geturl()
        return values


def as_yaml(values: Mapping[str, Any]) -> str:
    """As a RUN.yaml, in order."""
    return yaml.safe_dump(dict(values), sort_keys=False)


class _Overrides(EnvSettingsSource):
    """The environment, with a command line's overrides as if they stood in it."""

    def __init__(self, settings_cls: type[RunConfig], arguments: Sequence[str]) -> None:
        super().__init__(settings_cls)
        given = {
            one.variable.lower(): None if one.value == "null" else one.value
            for one in parse_overrides(arguments)
        }
        self.env_vars = {**self.env_vars, **given}
        self._refuse_unknown_sections(settings_cls)
        self._refuse_settings_of_a_scalar()

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """A section or list as JSON; text that is none is left to validation, which knows more: a
        name alone can stand for an estimator."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value

    def _refuse_unknown_sections(self, settings_cls: type[RunConfig]) -> None:
        # A double underscore makes a setting. Variables without one are somebody else's: Kubernetes
        # injects PRECEPTOR_REDIS_PORT into every container beside a service "preceptor-redis".
        prefix = PREFIX.lower()
        for name in sorted(self.env_vars):
            section, nested, _ = name.removeprefix(prefix).partition("__")
            if name.startswith(prefix) and nested and section not in settings_cls.model_fields:
                raise ConfigError(
                    f"the environment has {name.upper()}, but RUN.yaml has no section {section!r}; "
                    + suggestion((section,), setting_names(settings_cls))
                )

    def _refuse_settings_of_a_scalar(self) -> None:
        # --trainer.estimator=grpo beside --trainer.estimator.clip=1: one would silently go.
        for name in sorted(self.env_vars):
            above, nested, _ = name.rpartition("__")
            value = self.env_vars.get(above)
            mapping = value is not None and value.lstrip().startswith("{")
            if (
                name.startswith(PREFIX.lower())
                and nested
                and above in self.env_vars
                and not mapping
            ):
                one, other = (_dotted(each) for each in (above, name))
                raise ConfigError(f"{one} = {value} and {other} cannot both be set; leave one out")


def _dotted(variable: str) -> str:
    return variable.removeprefix(PREFIX.lower()).replace("__", ".")


def _overlaid(below: dict[str, Any], above: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """The mappings' union, key by key at every depth, `above` winning."""
    result = dict(below)
    for key, value in above.items():
        path = f"{name}.{key}".lstrip(".")
        old = below.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            result[key] = _overlaid(old, value, path)
        elif isinstance(value, dict) and old is not None:
            # `estimator: grpo` and --trainer.estimator.clip: neither may silently go.
            raise ConfigError(
                f"{path}.{next(iter(value))} cannot be laid over {path}: {old!r} of the file; "
                f"write {path} as a mapping there"
            )
        else:
            result[key] = value
    return result


def _drop_unset(model: BaseModel, values: dict[str, Any], path: tuple[str, ...]) -> None:
    *above, last = path
    for key in above:
        model, values = getattr(model, key), values[key]
    if last not in model.model_fields_set:
        del values[last]


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
