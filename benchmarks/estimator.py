"""Cost of `trainer.estimators.estimate` (gndpo) per token, beside a copy of its inputs.

4 million response tokens, float32, 1 thread, alone; and on two processes with half of them each,
joined by gloo on this machine, which adds the one collective. The goal is at most 50 ns a token and
core. Machines are noisy: medians over interleaved rounds, and the ratio to the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trainer.estimator_settings import EstimatorSettings
from trainer.estimators.batch import TokenBatch
from trainer.estimators.estimate import estimate
from trainer.estimators.statistics import Gather

TOKENS, LENGTH, PROCESSES = 4_000_000, 400, 2
# In a row, so that waiting for the other process to arrive is no part of the figure.
COLLECTIVES = 100


def make_tokens(count: int, seed: int) -> TokenBatch:
    """Sequences of LENGTH tokens, a tenth of them not the student's."""
    generator = torch.Generator().manual_seed(seed)
    sequences = count // LENGTH
    old_N = -torch.rand(count, generator=generator) * 3
    sequences_B = torch.arange(sequences)
    return TokenBatch(
        teacher_N=old_N + torch.randn(count, generator=generator),
        old_N=old_N,
        behaviour_N=old_N + 0.01 * torch.randn(count, generator=generator),
        mask_N=torch.rand(count, generator=generator) < 0.9,
        rows_N=sequences_B.repeat_interleave(LENGTH),
        sequences=sequences,
        rewards_B=None,
        groups_B=sequences_B // 8,
        labels_B=torch.zeros_like(sequences_B),
        label_count=1,
    )


def copy(tokens: TokenBatch) -> list[Tensor]:
    """The baseline: every token array once."""
    assert tokens.teacher_N is not None
    arrays = (tokens.teacher_N, tokens.old_N, tokens.behaviour_N, tokens.mask_N, tokens.rows_N)
    return [one.clone() for one in arrays]


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each way over interleaved rounds; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def timings(count: int, seed: int, gather: Gather, rounds: int) -> dict[str, float]:
    """Nanoseconds a token of copy and estimate; of one collective, milliseconds."""
    tokens, settings = make_tokens(count, seed), EstimatorSettings()
    numbers = torch.zeros(10, dtype=torch.float64)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: copy(tokens),
        "estimate": lambda: estimate(tokens, settings, None, gather),
        "collective": lambda: [gather(numbers) for _ in range(COLLECTIVES)],
    }
    seconds = measure(ways, rounds)
    collective = seconds.pop("collective") / COLLECTIVES * 1e3
    return {name: value / count * 1e9 for name, value in seconds.items()} | {"ms": collective}


def rank_main(rank: int, folder: str, rounds: int) -> None:
    """One of PROCESSES; leaves its timings in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )

    def gather(values_K: Tensor) -> Tensor:
        rows = [torch.empty_like(values_K) for _ in range(PROCESSES)]
        dist.all_gather(rows, values_K)
        return torch.stack(rows)

    measured = timings(TOKENS // PROCESSES, rank, gather, rounds)
    (Path(folder) / str(rank)).write_text(json.dumps(measured))
    dist.destroy_process_group()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = {"alone": timings(TOKENS, 0, lambda values_K: values_K[None], rounds)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (folder, rounds), PROCESSES)
        for rank in range(PROCESSES):
            text = (Path(folder) / str(rank)).read_text()
            rows[f"rank {rank} of {PROCESSES}"] = json.loads(text)
    table = Table(title=f"gndpo, {TOKENS:,} tokens, 1 thread each, median of {rounds} rounds")
    for column in ("", "copy, ns/token", "estimate, ns/token", "ratio", "collective, ms"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        ratio = row["estimate"] / row["copy"]
        numbers = (row["copy"], row["estimate"], ratio, row["ms"])
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
