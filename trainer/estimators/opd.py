"""On-policy distillation's plain signal (arXiv 2306.13649; Thinking Machines, "On-Policy
Distillation", 2025): a token's advantage is k = teacher - old itself.

Baselines for GNDPO: `opd` with the clamp alone, `opd_raw` with nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def opd(k_N: Tensor, clip: float) -> Tensor:
    """k clamped to [-clip, +clip] nats; -inf becomes -clip."""
    return k_N.clamp(-clip, clip)


def opd_raw(k_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """k as it is, and the tokens that take part: without those the teacher finds impossible.

    No finite number stands for -inf here, so such tokens get 0 and leave the mask; the metric
    teacher_impossible counts them.

    Args:
        k_N: float, nats; -inf allowed.
        mask_N: bool.
    """
    impossible_N = k_N == -torch.inf
    return torch.where(impossible_N, 0.0, k_N), mask_N & ~impossible_N
