"""Ranks of a crew as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.ranks import loopback
from trainer.world import STORE_VARIABLE


def start(arguments: Sequence[str], ranks: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start `python -m ARGUMENTS` as that many ranks, which meet in the folder."""
    environment = os.environ | {
        STORE_VARIABLE: str(folder / "store"),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": loopback(),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def run_to_end(
    arguments: Sequence[str], ranks: int, folder: Path, timeout_seconds: float = 240
) -> None:
    """Run them to their end; every one must end well."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = start(arguments, ranks, folder)
    try:
        outputs = [part.communicate(timeout=timeout_seconds)[0] for part in parts]
    finally:
        for part in parts:
            part.kill()
    assert [part.returncode for part in parts] == [0] * ranks, "\n".join(outputs)[-3000:]
