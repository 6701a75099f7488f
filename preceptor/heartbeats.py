"""Who is alive: a key per process that expires unless it is renewed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import redis

Info = Mapping[str, str | int | float]


def beat(client: redis.Redis, key: str, info: Info, ttl_seconds: float) -> None:
    """Keep `key` alive for `ttl_seconds` with `info` as its JSON value."""
    client.set(key, json.dumps(dict(info)), px=round(ttl_seconds * 1000))


def living(client: redis.Redis, prefix: str) -> dict[str, dict[str, str | int | float]]:
    """The `info` of every living key, by what follows `prefix` in its name."""
    keys: Any = sorted(client.scan_iter(match=f"{prefix}*", count=1000))
    values: Any = client.mget(keys) if keys else []
    return {
        key.decode().removeprefix(prefix): json.loads(value)
        for key, value in zip(keys, values, strict=True)
        if value is not None  # expired between the two reads
    }
