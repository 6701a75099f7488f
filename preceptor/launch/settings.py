"""The launcher's section of RUN.yaml."""

from __future__ import annotations

from pydantic import Field

from preceptor.config import RunConfig, Section


class LaunchSettings(Section):
    """What `preceptor up` starts here, and how patient it is."""

    redis: bool = True
    """Start a Redis of this run's own. false: use the one at redis.url."""

    teacher: bool = True
    """Start a teacher. false: use the one at trainer.teacher."""

    rollout_workers: int = Field(1, ge=0)
    """Rollout workers to start here. 0: they run elsewhere, with the same redis.url."""

    torch_threads: int = Field(0, ge=0)
    """CPU threads of each part (OMP_NUM_THREADS). 0 leaves it to torch, which gives every part all
    cores."""

    restart_budget: int = Field(5, ge=0)
    """How often each part may be started again before the run is given up."""

    restart_trainer: bool = True
    """Start a crashed trainer again; it resumes from its newest checkpoint."""

    restart_backoff_seconds: float = Field(1.0, ge=0)
    """Wait before a part's first restart; doubles with each."""

    restart_backoff_limit_seconds: float = Field(30.0, ge=0)
    """Longest wait before a restart."""

    ready_timeout_seconds: float = Field(600.0, gt=0)
    """How long a part may take from its start until it is ready, loading a model included."""

    stop_grace_seconds: float = Field(20.0, ge=0)
    """How long a part may take to end after SIGTERM, before SIGKILL."""


class LaunchConfig(RunConfig):
    """RUN.yaml as `preceptor up` reads it."""

    launch: LaunchSettings = LaunchSettings()  # type: ignore[assignment]
