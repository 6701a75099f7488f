"""Redis killed, flushed, full; replies lost; workers killed. Against real servers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from preceptor.embedded_redis import EmbeddedRedis, free_port, start_redis
from preceptor.queue import Backlog, QueueFull, QueueUnavailable, RolloutQueue, connect, task_key
from tests.queue.eating_proxy import EatingProxy
from tests.queue.queue_messages import group_for, slots, task

ROOT = Path(__file__).parents[2]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def kill(server: EmbeddedRedis) -> None:
    """kill -9, after what was answered has left Redis' own buffer (on a busy disk it may lag: up to
    two seconds of answered writes are lost then, and issued again by the trainer)."""
    client = connect(server.url)
    while client.info("persistence")["aof_buffer_length"]:
        time.sleep(0.01)
    server.process.kill()
    server.process.wait()


@pytest.mark.pitfall("Q1")
def test_blocking_longer_than_the_socket_timeout_returns_empty(server_url, client, caplog):
    """8 s on an empty stream, both with our connection and with redis-py's own 5 s timeout."""
    waited: dict[str, float] = {}

    def wait(name: str, queue: RolloutQueue, claim: str) -> None:
        start = time.monotonic()
        assert getattr(queue, claim)(1, 8.0) == []
        waited[name] = time.monotonic() - start

    ours = RolloutQueue(connect(server_url, socket_timeout_seconds=3.0), "run", "a")
    plain = RolloutQueue(type(client).from_url(server_url), "run", "b")
    threads = [
        threading.Thread(target=wait, args=("ours", ours, "claim_tasks")),
        threading.Thread(target=wait, args=("plain", plain, "claim_groups")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waited.keys() == {"ours", "plain"}
    assert all(8.0 <= seconds < 11.0 for seconds in waited.values())
    assert warnings(caplog) == []


def through(proxy: EatingProxy, consumer: str) -> RolloutQueue:
    return RolloutQueue(connect(f"redis://127.0.0.1:{proxy.port}/0"), "run", consumer)


@pytest.fixture
def proxy(server_url: str):
    with EatingProxy(int(server_url.rsplit(":", 1)[1].split("/")[0])) as proxy:
        yield proxy


@pytest.mark.pitfall("Q1")
def test_an_eaten_xadd_reply_leaves_one_logical_rollout(proxy, make_queue, client):
    make_queue().put_tasks([task(3)])
    worker = through(proxy, "w")
    [claim] = worker.claim_tasks(1, 0)
    proxy.eat(b"XADD")
    worker.finish_task(claim, group_for(claim.message))
    assert proxy.eaten == 1
    groups = make_queue().claim_groups(9, 0)
    assert len(groups) == 2, "the write ran twice"
    assert len({task_key(group.message.id, group.message.kind) for group in groups}) == 1
    assert make_queue().backlog() == Backlog(0, 0, 0, 2, 0)


def test_an_eaten_read_reply_loses_no_group(proxy, make_queue, client):
    make_queue().put_tasks([task(0), task(1), task(2)])
    worker, trainer = make_queue("w"), through(proxy, "trainer")
    first, *others = worker.claim_tasks(3, 0)
    worker.finish_task(first, group_for(first.message))
    held = trainer.claim_groups(1, 0)
    for claim in others:
        worker.finish_task(claim, group_for(claim.message))
    proxy.eat(b"XREADGROUP")
    # Delivered to us, and never seen: only reading our own claims again brings it back.
    found = trainer.claim_groups(1, 1.0) + trainer.claim_groups(1, 1.0)
    assert proxy.eaten == 1
    assert sorted(slots(held + found)) == [0, 1, 2]
    assert trainer.claim_groups(9, 0) == []


def test_an_eaten_read_reply_loses_no_task(proxy, make_queue):
    url = f"redis://127.0.0.1:{proxy.port}/0"
    worker = RolloutQueue(connect(url), "run", "w", lease_seconds=0.3)
    assert worker.claim_tasks(1, 0) == []
    make_queue().put_tasks([task(0)])
    proxy.eat(b"XREADGROUP")
    [claim] = worker.claim_tasks(1, 5.0)
    assert (proxy.eaten, claim.deliveries) == (1, 2)


@pytest.mark.pitfall("Q2")
def test_a_flush_while_blocked_loses_nothing_that_follows(make_queue, client, caplog):
    caplog.set_level("INFO")
    seen: Counter[int] = Counter()
    stop = threading.Event()

    def consume(queue: RolloutQueue) -> None:
        while not stop.is_set():
            for claim in queue.claim_tasks(1, 5.0):
                seen[claim.message.id.slot] += 1
                queue.finish_task(claim, group_for(claim.message))

    worker, trainer = make_queue("w"), make_queue()
    # Both streams are known and somebody is blocked on each.
    trainer.claim_groups(1, 0)
    thread = threading.Thread(target=consume, args=(worker,))
    thread.start()
    time.sleep(0.3)
    caplog.clear()
    client.flushall()
    for slot in range(3):
        trainer.put_tasks([task(slot)])
    groups = []
    deadline = time.monotonic() + 10
    while len(groups) < 3 and time.monotonic() < deadline:
        groups += trainer.claim_groups(9, 1.0)
    trainer.ack_groups(groups)
    stop.set()
    trainer.put_tasks([task(99)])
    thread.join()
    assert sorted(slots(groups)) == [0, 1, 2]
    assert [seen[slot] for slot in range(3)] == [1, 1, 1]
    assert len(caplog.records) < 5, [record.getMessage() for record in caplog.records]


@pytest.mark.pitfall("Q2")
def test_a_flush_before_every_read_is_no_hot_loop(make_queue, client, monkeypatch):
    """Counted: how often the group is made again within a second."""
    honest, forget_until = client.xreadgroup, time.monotonic() + 1.0

    def forgetful(*arguments, **settings):
        if time.monotonic() < forget_until:
            client.delete("preceptor:{run}:tasks")
        return honest(*arguments, **settings)

    monkeypatch.setattr(client, "xreadgroup", forgetful)
    client.config_resetstat()
    assert make_queue("w").claim_tasks(1, 0) == []
    # One command before Redis 7, one a subcommand since.
    commands = client.info("commandstats")
    made = sum(row["calls"] for name, row in commands.items() if name.startswith("cmdstat_xgroup"))
    # After 0, 0.1, 0.3, 0.6 and 1.0 s; without a pause a thousand times.
    assert 1 <= made <= 6


def test_redis_killed_and_restarted_is_waited_for(binary, tmp_path, caplog):
    port = free_port()
    with start_redis(tmp_path, port, binary) as first:
        worker = RolloutQueue(connect(first.url), "run", "w", retry_seconds=30)
        trainer = RolloutQueue(connect(first.url), "run", "trainer", retry_seconds=30)
        trainer.put_tasks([task(0), task(1), task(2)])
        [claim] = worker.claim_tasks(1, 0)
        results: list = []
        waiting = [
            threading.Thread(target=lambda: results.append(trainer.claim_groups(1, 20.0))),
            threading.Thread(target=lambda: worker.finish_task(claim, group_for(claim.message))),
            threading.Thread(target=lambda: worker.beat("rollout", "w", {})),
        ]
        kill(first)
        for thread in waiting:
            thread.start()
        time.sleep(1.0)
        with start_redis(tmp_path, port, binary):
            for thread in waiting:
                thread.join()
            assert [slots(claims) for claims in results] == [[0]]
            assert slots(worker.claim_tasks(9, 1.0)) == [1, 2]
            assert trainer.backlog() == Backlog(0, 2, 0, 1, 0)
    # One line an outage and queue, however many threads wait.
    assert len(warnings(caplog)) == 2
    assert all(f"127.0.0.1:{port}" in line and "30 s" in line for line in warnings(caplog))


def test_redis_that_stays_away_is_a_typed_error_within_the_budget():
    queue = RolloutQueue(connect("redis://:secret@127.0.0.1:1/0"), "run", "w", retry_seconds=0.5)
    start = time.monotonic()
    with pytest.raises(QueueUnavailable, match=r"127.0.0.1:1/0 .*0.5 s.*retry_seconds") as caught:
        queue.claim_tasks(1, 60.0)
    assert time.monotonic() - start < 5
    assert "secret" not in str(caught.value)


def test_bad_credentials_are_not_waited_for(binary, tmp_path):
    with start_redis(tmp_path, binary=binary) as server:
        connect(server.url).config_set("requirepass", "right")
        queue = RolloutQueue(connect(server.url.replace("//", "//:wrong@")), "run", "w")
        with pytest.raises(QueueUnavailable, match="refused the credentials"):
            queue.backlog()


@pytest.mark.pitfall("Q5")
def test_a_full_redis_refuses_writes_and_still_drains(binary, tmp_path):
    with start_redis(tmp_path, binary=binary) as server:
        client = connect(server.url)
        trainer, worker = RolloutQueue(client, "run", "t"), RolloutQueue(client, "run", "w")
        trainer.claim_groups(1, 0)
        client.config_set("maxmemory", "20mb")
        done, waiting = 0, []
        with pytest.raises(QueueFull, match="maxmemory"):
            for slot in range(1000):
                trainer.put_tasks([task(slot, payload_bytes=100_000)])
                waiting = waiting or worker.claim_tasks(1, 0)
                claim = waiting.pop()
                worker.finish_task(claim, group_for(claim.message))
                done += 1
        assert done > 50
        with pytest.raises(QueueFull):
            trainer.put_tasks([task(1000, payload_bytes=100_000)])
        drained = 0
        while groups := trainer.claim_groups(20, 0):
            trainer.ack_groups(groups)
            drained += len(groups)
        assert drained == done, "nothing was lost"
        trainer.put_tasks([task(1001, payload_bytes=100_000)])
        assert 1001 in slots(worker.claim_tasks(9, 0))


@pytest.mark.pitfall("Q4")
def test_work_is_never_trimmed_and_memory_returns(make_queue, client):
    trainer, worker = make_queue(), make_queue("w")
    baseline = client.info("memory")["used_memory"]
    for _ in range(10):
        trainer.put_tasks([task(slot, payload_bytes=10_000) for slot in range(100)])
    assert trainer.backlog().tasks_waiting == 1000
    count = 0
    while claims := worker.claim_tasks(100, 0):
        for claim in claims:
            worker.finish_task(claim, group_for(claim.message))
        groups = trainer.claim_groups(100, 0)
        trainer.ack_groups(groups)
        count += len(groups)
    assert count == 1000
    assert client.xlen("preceptor:{run}:tasks") == client.xlen("preceptor:{run}:groups") == 0
    assert client.info("memory")["used_memory"] - baseline < 2_000_000


def start_worker(url: str, consumer: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("lease_worker.py")), url, consumer]
    return subprocess.Popen([*command, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.pitfall("Q3")
def test_a_live_lease_is_kept_and_a_dead_one_taken_over(server_url, make_queue):
    trainer, other = make_queue(), make_queue("other", lease_seconds=1.0)
    trainer.put_tasks([task(0)])
    process = start_worker(server_url, "slow", 3.0)
    try:
        said = process.stdout
        assert said is not None and said.readline() == "claimed 0\n"
        # Three times the lease, and nobody else gets it.
        assert other.claim_tasks(1, 2.9) == []
        assert said.readline() == "finished 0\n"
        assert slots(trainer.claim_groups(9, 0)) == [0]
        trainer.put_tasks([task(1)])
        assert said.readline() == "claimed 1\n"
    finally:
        process.kill()
        process.wait()
    start = time.monotonic()
    with other.leases(other.claim_tasks(1, 10.0)) as keeper:
        assert keeper.claims[0].message.id.slot == 1 and keeper.claims[0].deliveries == 2
    assert time.monotonic() - start < 2.0 + 1.0


def test_failed_renewals_do_not_end_the_work(binary, tmp_path, caplog):
    port = free_port()
    with start_redis(tmp_path, port, binary) as first:
        queue = RolloutQueue(connect(first.url), "run", "w", lease_seconds=0.3)
        queue.put_tasks([task(0)])
        claims = queue.claim_tasks(1, 0)
        kill(first)
    keeper = queue.leases(claims)
    with keeper:
        time.sleep(0.5)
        assert keeper.claims == claims, "kept while Redis is away"
    with start_redis(tmp_path, port, binary):
        assert queue.renew(claims) == claims
        with queue.leases(claims) as keeper:
            time.sleep(0.5)
            assert keeper.claims == claims
        queue.finish_task(claims[0], group_for(claims[0].message))
        assert slots(queue.claim_groups(1, 0)) == [0]
    assert len([line for line in warnings(caplog) if "could not renew" in line]) == 1
