"""Starts the ranks of a trainer on this machine, and ends with what rank 0 made of the run.

torchrun does it for several machines. Here, ranks find each other through a file and talk over the
loopback interface only, and rank 0's exit code comes through, which says whether it is worth while
to start again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from preceptor.launch.child import tethered
from trainer.world import STORE_VARIABLE

POLL_SECONDS = 0.1
# After rank 0 has ended, or any other died, how long the rest may take.
GRACE_SECONDS = 10.0


def run_ranks(arguments: Sequence[str], count: int) -> int:
    """Run `python -m trainer ARGUMENTS` as `count` ranks; returns rank 0's exit code.

    SIGTERM and SIGINT go on to rank 0, which saves and tells the others to leave. If a rank dies,
    the rest are ended: the run goes on from its checkpoint when it is started again.
    """
    with tempfile.TemporaryDirectory(prefix="preceptor-ranks-") as folder:
        environment = os.environ | {
            STORE_VARIABLE: str(Path(folder) / "store"),
            "WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback(),
        }
        command = tethered([sys.executable, "-m", "trainer", *arguments])
        ranks = [
            subprocess.Popen(
                command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(count)
        ]
        try:
            for one in (signal.SIGTERM, signal.SIGINT):
                signal.signal(one, lambda number, _: ranks[0].send_signal(number))
            return _watch(ranks)
        finally:
            _end(ranks)


def _watch(ranks: Sequence[subprocess.Popen]) -> int:
    while True:
        codes = [one.poll() for one in ranks]
        if codes[0] is not None:
            return codes[0] if codes[0] >= 0 else 128 - codes[0]
        dead = next((rank for rank, code in enumerate(codes) if code), None)
        if dead is not None:
            print(
                f"trainer: rank {dead} ended with {codes[dead]}; the others are ended too",
                file=sys.stderr,
            )
            # Rank 0 usually sees it itself, at its next collective, and may still say why.
            _wait(ranks[:1])
            return ranks[0].poll() or 1
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    _wait(ranks)
    for one in ranks:
        if one.poll() is None:
            one.kill()
        one.wait()


def _wait(ranks: Sequence[subprocess.Popen]) -> None:
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end and any(one.poll() is None for one in ranks):
        time.sleep(POLL_SECONDS)


def loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "")
