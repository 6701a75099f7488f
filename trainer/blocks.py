"""Large tensors in pieces that fit a core's cache.

Temporaries as large as a batch are fresh pages each time, and faulting those in costs several times
the arithmetic (benchmarks/estimator.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

BLOCK = 65536


def blocks(*tensors_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The flattened tensors side by side, BLOCK elements at a time; of no elements, one block."""
    return zip(*(tensor.reshape(-1).split(BLOCK) for tensor in tensors_N), strict=True)
