"""Count, mean and spread of values, such that parts of a batch give exactly those of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.blocks import blocks


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the valid values, as floats (float64).

    The count is a whole number, or a weight where older batches count less (`decayed`).
    """

    count: float
    mean: float
    m2: float

    def merged(self, other: Moments) -> Moments:
        """The moments of both parts together (Chan, Golub and LeVeque 1983, equation 2.1)."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        m2 = self.m2 + other.m2 + delta * delta * self.count * other.count / count
        return Moments(count, mean, m2)

    def decayed(self, decay: float) -> Moments:
        """The same mean and variance with `decay` times the weight."""
        return Moments(decay * self.count, self.mean, decay * self.m2)


EMPTY = Moments(0, 0.0, 0.0)


def moments(values_N: Tensor, mask_N: Tensor) -> Moments:
    """Two-pass float64 moments of values where mask is true; both of any one shape.

    One pass in float32 would lose a small sigma beside a large mean by cancellation.
    """
    return merge_all(_of_block(*block) for block in blocks(values_N, mask_N))


def merge_all(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together; of none, those of no values."""
    whole = EMPTY
    for part in parts:
        whole = whole.merged(part)
    return whole


def _of_block(values_N: Tensor, mask_N: Tensor) -> Moments:
    count = int(torch.count_nonzero(mask_N))
    if count == 0:
        return EMPTY
    valid_N = torch.where(mask_N, values_N, 0.0).double()
    mean = float(valid_N.sum()) / count
    deviations_N = torch.where(mask_N, valid_N.sub_(mean), 0.0)
    return Moments(count, mean, float(deviations_N.dot(deviations_N)))
