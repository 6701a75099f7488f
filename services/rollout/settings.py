"""The rollout section of RUN.yaml."""

from __future__ import annotations

import os
import socket
from typing import Literal

from pydantic import Field

from preceptor.config import RunConfig, Section


def default_name() -> str:
    """host-pid: unique among the workers of a run unless they share a host name."""
    return f"{socket.gethostname()}-{os.getpid()}"


class RolloutSettings(Section):
    """Which student writes trajectories, and how much it takes on at once."""

    model: str
    """The student: folder in Hugging Face layout, or hub id. Gives architecture, tokenizer and
    image processor; the weights that write are those the trainer publishes under run.dir."""

    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights. Published weights are cast to it."""

    device: str = "cpu"
    """Torch device, such as cpu or cuda:0."""

    threads: int = Field(0, ge=0)
    """CPU threads of torch. 0: as many as torch thinks right."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models you have read."""

    name: str = Field(default_factory=default_name, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    """This worker's name, unique in the run: in its heartbeat, its claims and its groups."""

    batch_sequences: int = Field(128, ge=1)
    """Tasks are claimed until they ask for this many responses. A task is never split, so the last
    one may exceed it."""

    policy_retry_seconds: float = Field(1.0, gt=0)
    """A task whose policy cannot be had yet is given back and offered again after this long
    (redis.lease_seconds at most). Other tasks are served meanwhile."""

    stop_seconds: float = Field(5.0, gt=0)
    """After SIGTERM or SIGINT, how long giving tasks back may take (Redis may be away). Then the
    worker leaves all the same, and its leases run out."""


class RolloutConfig(RunConfig):
    """RUN.yaml as a rollout worker reads it."""

    rollout: RolloutSettings  # type: ignore[assignment]
