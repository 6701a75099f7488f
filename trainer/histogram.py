"""Quantiles of a whole batch from counts: the same however it is split, unlike merged quantiles.

Bins are logarithmic in |value|: a float32's exponent and first 6 fraction bits are its bin, so that
binning costs a few integer operations. The bin's middle stands for its values:

    |value| from 2^-10 to 64    off by at most 1/128 = 0.8 %
    |value| below 2^-10         becomes 0: off by less than 0.001
    |value| from 64 on          becomes the last bin's middle, 63.75; infinities too
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.blocks import blocks

FRACTION_BITS = 6
LOWEST, HIGHEST = -10, 6
"""Binary exponents: bins cover magnitudes from 2^LOWEST to 2^HIGHEST."""

SIDE = (HIGHEST - LOWEST) << FRACTION_BITS
"""Bins of either sign."""
BINS = 2 * SIDE + 1
"""All of them: negative ones from large to small, zero's, positive ones."""

_DROPPED_BITS = 23 - FRACTION_BITS
_FIRST = (127 + LOWEST) << FRACTION_BITS


def histogram(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """How many valid values fall in each bin: float64 [BINS], whole numbers.

    Args:
        values_N: float, 0 where the mask is false; binned as float32. No NaN.
        mask_N: bool.
    """
    counts = torch.zeros(BINS, dtype=torch.float64)
    for (block_N,) in blocks(values_N):
        counts += torch.bincount(_bins(block_N), minlength=BINS)
    # Taken out of zero's bin afterwards: cheaper than to gather the valid ones before.
    counts[SIDE] -= mask_N.numel() - int(torch.count_nonzero(mask_N))
    return counts


def quantile(counts: Tensor, fraction: float) -> float:
    """The middle of the bin that holds the value of this rank; NaN without values.

    Args:
        counts: [BINS].
        fraction: 0 to 1. The value is the smallest with at least this fraction at or below it.
    """
    below = counts.cumsum(0)
    total = float(below[-1])
    if total == 0:
        return float("nan")
    # Against rounding: 0.01 * 700 is a little more than 7.
    wanted = max(1.0, fraction * total * (1 - 1e-12))
    index = int(torch.searchsorted(below, wanted)) - SIDE
    if index == 0:
        return 0.0
    octave, step = divmod(abs(index) - 1, 1 << FRACTION_BITS)
    middle = 2.0 ** (octave + LOWEST) * (1 + (step + 0.5) / (1 << FRACTION_BITS))
    return middle if index > 0 else -middle


def _bins(values_N: Tensor) -> Tensor:
    bits_N = values_N.float().contiguous().view(torch.int32)
    bin_N = bits_N.bitwise_and(0x7FFFFFFF).bitwise_right_shift_(_DROPPED_BITS)
    bin_N.sub_(_FIRST - 1).clamp_(0, SIDE)
    # The sign bit, shifted through, is 0 or -1: (b ^ -1) + 1 is -b.
    sign_N = bits_N.bitwise_right_shift(31)
    return bin_N.bitwise_xor_(sign_N).sub_(sign_N).add_(SIDE)
