"""How ranks that torchrun starts find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer.ranks import loopback

pytestmark = pytest.mark.slow

RANK = """
import sys, time, torch
from trainer.world import join, leave
time.sleep(float(sys.argv[1]))
world = join("cpu", sharded=False)
print(int(world.sum(torch.ones(1, dtype=torch.float64))))
leave()
"""


@pytest.fixture
def agent():
    """torchrun's store, which outlives the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def start(agent, attempt, rank, delay):
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": loopback(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
    }
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(delay)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("late", [0, 1])
def test_a_restarted_rank_waits_for_the_others_not_for_the_dead(agent, late):
    """The one that comes late has not yet replaced the address that its predecessor left."""
    for attempt, delay in enumerate((0, 3)):
        ranks = [start(agent, attempt, rank, delay * (rank == late)) for rank in range(2)]
        try:
            outputs = [rank.communicate(timeout=90) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [out for out, _ in outputs] == ["2\n", "2\n"], outputs[0][1] + outputs[1][1]
