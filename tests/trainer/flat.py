"""Flat token batches for tests, and ranks simulated by threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from trainer.estimator_settings import EstimatorSettings
from trainer.estimators.batch import TokenBatch
from trainer.estimators.estimate import Estimate, estimate
from trainer.estimators.gndpo import Running
from trainer.tally import Tally


def alone(values_K: Tensor) -> Tensor:
    """The collective of a world of one."""
    return values_K[None]


def token_batch(teacher, old, mask=None, **others) -> TokenBatch:
    """A padded batch [B, T], or one sequence [T], made flat; float64 unless tensors are given."""
    old_BT = torch.atleast_2d(torch.as_tensor(old, dtype=getattr(old, "dtype", torch.float64)))
    sequences, width = old_BT.shape if old_BT.numel() else (0, 0)
    mask_BT = torch.ones_like(old_BT, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    if teacher is not None:
        teacher = torch.as_tensor(teacher, dtype=old_BT.dtype).reshape(-1)
    values = {
        "teacher_N": teacher,
        "old_N": old_BT.reshape(-1),
        "behaviour_N": old_BT.reshape(-1),
        "mask_N": mask_BT.reshape(-1),
        "rows_N": torch.arange(sequences).repeat_interleave(width),
        "sequences": sequences,
        "rewards_B": None,
        "groups_B": torch.zeros(sequences, dtype=torch.int64),
        "labels_B": torch.zeros(sequences, dtype=torch.int64),
        "label_count": 1,
    }
    return TokenBatch(**(values | others))


def from_k(*k: float, **others) -> TokenBatch:
    """One sequence with these differences."""
    k_N = torch.tensor(k, dtype=torch.float64)
    return token_batch(k_N - 10, torch.full_like(k_N, -10.0), **others)


def pick(batch: TokenBatch, rows: Sequence[int]) -> tuple[TokenBatch, Tensor]:
    """These sequences, in this order, without positions outside the mask; and where each token of
    it was in the batch."""
    places = [torch.nonzero((batch.rows_N == row) & batch.mask_N).flatten() for row in rows]
    at_M = torch.cat([torch.zeros(0, dtype=torch.int64), *places])
    lengths = torch.tensor([len(place) for place in places], dtype=torch.int64)
    rows_B = torch.tensor(rows, dtype=torch.int64)
    part = replace(
        batch,
        teacher_N=None if batch.teacher_N is None else batch.teacher_N[at_M],
        old_N=batch.old_N[at_M],
        behaviour_N=batch.behaviour_N[at_M],
        mask_N=batch.mask_N[at_M],
        rows_N=torch.arange(len(rows)).repeat_interleave(lengths),
        sequences=len(rows),
        rewards_B=None if batch.rewards_B is None else batch.rewards_B[rows_B],
        groups_B=batch.groups_B[rows_B],
        labels_B=batch.labels_B[rows_B],
    )
    return part, at_M


def on_ranks(
    parts: Sequence[TokenBatch], settings: EstimatorSettings, running: Running | None = None
) -> list[Estimate | Exception]:
    """What each rank gets, an error included. A rank that stays away breaks the barrier."""
    barrier = threading.Barrier(len(parts))
    rows: list[Tensor] = [torch.empty(0)] * len(parts)

    def run(rank: int) -> Estimate | Exception:
        calls = 0

        def gather(values_K: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            rows[rank] = values_K
            barrier.wait(timeout=10)
            return torch.stack(rows)

        try:
            return estimate(parts[rank], settings, running, gather)
        except (ValueError, ArithmeticError) as error:
            return error
        finally:
            assert calls == 1

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


def merge_flat(tallies: Sequence[Tally]) -> Tally:
    """As two collectives over ranks merge them."""
    sums, maxima = zip(*(tally.flat() for tally in tallies), strict=True)
    return tallies[0].from_flat(torch.stack(sums).sum(0), torch.stack(maxima).amax(0))
