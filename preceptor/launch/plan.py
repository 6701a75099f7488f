"""What `preceptor up` starts, with which settings fixed by it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from preceptor.embedded_redis import HOST, free_port, redis_command
from preceptor.launch.child import Part
from preceptor.launch.errors import LaunchError
from preceptor.launch.probes import redis_answers, teacher_serves, worker_works
from preceptor.launch.settings import LaunchConfig
from preceptor.overrides import Override, variable
from preceptor.queue import RolloutQueue, connect
from preceptor.redis_connection import address_of

# Where a teacher may listen and still be reached on 127.0.0.1.
_REACHABLE_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class Plan:
    """A run, ready to be started.

    Attributes:
        parts: what to supervise.
        queue: the run's queue, for looking only; it gives up at once when Redis is away.
    """

    parts: list[Part]
    queue: RolloutQueue


def make_plan(file: Path, config: LaunchConfig, overrides: Sequence[Override]) -> Plan:
    """The parts of this run and how they find each other.

    Ports are chosen here, once, so that a part that is started again is found where it was.

    Raises:
        LaunchError: a setting that contradicts what the launcher sets; no Redis where told to be.
        RedisMissing: no Redis server on this machine.
    """
    launch = config.launch
    if not launch.redis and not redis_answers(config.redis.url):
        place = address_of(connect(config.redis.url))
        raise LaunchError(
            f"launch.redis is false and no Redis answers at {place}; start it, or set redis.url"
        )
    redis_port, teacher_address = free_port(), f"{HOST}:{free_port()}"
    redis_url = f"redis://{HOST}:{redis_port}/0" if launch.redis else config.redis.url
    fixed = _fixed_settings(config, redis_url, teacher_address)
    _refuse_conflicts(config, overrides, fixed)
    environment = {override.variable: override.value for override in overrides} | fixed
    if launch.torch_threads:
        environment["OMP_NUM_THREADS"] = str(launch.torch_threads)

    queue = RolloutQueue(
        connect(redis_url, socket_timeout_seconds=2.0), config.run.name, "launcher", retry_seconds=0
    )
    needs_redis = ("redis",) if launch.redis else ()
    needs_teacher = ("teacher",) if launch.teacher else ()
    parts = []
    if launch.redis:
        command = redis_command(config.run.dir / "redis", redis_port)
        parts.append(Part("redis", command, ready=partial(redis_answers, redis_url)))
    if launch.teacher:
        parts.append(
            Part(
                "teacher",
                _module("services.teacher", file),
                environment,
                ready=partial(teacher_serves, teacher_address),
                needs=needs_redis,
                stage=1,
            )
        )
    for name in (f"rollout-{index}" for index in range(launch.rollout_workers)):
        parts.append(
            Part(
                name,
                _module("services.rollout", file),
                {**environment, variable("rollout", "name"): name},
                ready=partial(worker_works, queue, name),
                needs=needs_redis,
                stage=2,
            )
        )
    parts.append(
        Part(
            "trainer",
            _module("trainer", file),
            environment,
            needs=needs_redis + needs_teacher,
            stage=3,
            ends_run=True,
            restart=launch.restart_trainer,
        )
    )
    return Plan(parts, queue)


def _module(name: str, file: Path) -> list[str]:
    return [sys.executable, "-m", name, str(file)]


def _fixed_settings(config: LaunchConfig, redis_url: str, teacher_address: str) -> dict[str, str]:
    fixed = {}
    if config.launch.redis:
        fixed[variable("redis", "url")] = redis_url
    if config.launch.teacher:
        fixed[variable("teacher", "port")] = teacher_address.rpartition(":")[2]
        fixed[variable("trainer", "teacher")] = teacher_address
    return fixed


def _refuse_conflicts(
    config: LaunchConfig, overrides: Sequence[Override], fixed: Mapping[str, str]
) -> None:
    """A setting in the file is for use without the launcher; one typed now is meant to hold."""
    for override in overrides:
        if override.variable in fixed:
            switch = "redis" if override.path[0] == "redis" else "teacher"
            raise LaunchError(
                f"--{override.name}: `preceptor up` chooses this itself while it starts the "
                f"{switch}; add --launch.{switch}=false to use one that runs elsewhere"
            )
        if override.path == ("rollout", "name") and config.launch.rollout_workers:
            raise LaunchError("--rollout.name: `preceptor up` names its workers rollout-0, ...")
    host = config.teacher.get("host", HOST)
    for override in overrides:
        if override.path == ("teacher", "host"):
            host = override.value
    if config.launch.teacher and host not in _REACHABLE_HOSTS:
        raise LaunchError(
            f"teacher.host is {host}, but `preceptor up` reaches its teacher on {HOST}; set it to "
            f"{HOST} or 0.0.0.0, or launch.teacher to false"
        )
