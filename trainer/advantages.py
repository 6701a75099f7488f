"""From the teacher's marks to advantages: GNDPO (arXiv 2606.09091).

For every response token with mask m:

    k   = clamp(logp_teacher - logp_old, -c, +c)
    mu  = sum m k / (N + eps)
    var = sum m (k - mu)^2 / (N + eps) * N / (N - 1)
    A   = m (k - mu) / sqrt(var + eps)                    eps = 1e-8

over the whole rollout batch. The clamp bounds outliers; the whitening that follows is affine: it
centres and equalises scale between batches, and it can flip signs (k of -1.0, -1.1, -0.9 becomes
0, -1, +1). Statistics are kept as (n, mean, M2) in float64 and merged by Chan's rule, so parts of a
batch give exactly the statistics of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-8


class SmallBatch(ValueError):
    """Too few valid tokens, or no spread among them, to whiten."""


class NonFinite(ArithmeticError):
    """A valid token has a difference that is no number."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the valid values, as floats (float64)."""

    count: int
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


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Two-pass float64 moments of values where mask is true; both of any one shape.

    One pass in float32 would lose a small sigma beside a large mean by cancellation.
    """
    valid = values[mask].double()
    if valid.numel() == 0:
        return Moments(0, 0.0, 0.0)
    mean = valid.mean()
    return Moments(valid.numel(), float(mean), float((valid - mean).square().sum()))


@dataclass(frozen=True)
class Whitening:
    """The batch's affine map from k to advantages: A = (k - shift) / scale."""

    shift: float
    scale: float


def whitening(stats: Moments, small_batch: Literal["error", "safe"]) -> Whitening:
    """The map that whitens a batch with these moments.

    Args:
        stats: moments of the clamped k over the whole batch.
        small_batch: what to do with fewer than two valid tokens or no spread: "error" raises;
            "safe" only centres, so that such a batch gives zero advantages.

    Raises:
        SmallBatch: fewer than two valid tokens or sigma 0, with small_batch "error".
    """
    n = stats.count
    if n < 2 or stats.m2 <= 0.0:
        if small_batch == "error":
            what = f"{n} valid tokens" if n < 2 else f"{n} valid tokens with the same k"
            raise SmallBatch(
                f"cannot whiten {what}; enlarge trainer.prompts_per_step or set "
                "trainer.estimator.small_batch: safe to give such a batch zero advantages"
            )
        return Whitening(shift=stats.mean, scale=1.0)
    # N + eps as in the reference: the golden vectors hold to it.
    mean = stats.mean * n / (n + EPSILON)
    squares = stats.m2 + n * (stats.mean - mean) ** 2
    variance = squares / (n + EPSILON) * n / (n - 1)
    return Whitening(shift=mean, scale=float((variance + EPSILON) ** 0.5))


def difference(teacher: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """teacher - old where mask is true, 0 elsewhere, whatever stands there (NaN and inf included).

    Args:
        teacher, old: logprobs, nats, one shape. A teacher's -inf gives -inf.
        mask: bool, the same shape.

    Raises:
        NonFinite: NaN or +inf at a valid token.
    """
    k = torch.where(mask, teacher, 0.0) - torch.where(mask, old, 0.0)
    bad = k.isnan() | (k == torch.inf)
    if bad.any():
        raise NonFinite(
            f"{int(bad.sum())} of {int(mask.sum())} valid tokens have no finite teacher - old "
            "difference: the student's own logprob is NaN or -inf there"
        )
    return k


def gndpo(
    teacher: Tensor,
    old: Tensor,
    mask: Tensor,
    *,
    clip: float = 5.0,
    small_batch: Literal["error", "safe"] = "error",
) -> tuple[Tensor, dict[str, float]]:
    """Globally normalised advantages of a whole rollout batch.

    Args:
        teacher: float [B, T], the teacher's logprobs of the response tokens, nats; -inf is legal.
        old: float [B, T], the student's own, recomputed with the weights to be updated.
        mask: bool [B, T], true at tokens the student wrote. Other positions may hold anything.
        clip: c, nats.
        small_batch: see `whitening`.

    Returns:
        Advantages [B, T] in teacher's dtype, zero outside the mask, and the batch's metrics.

    Raises:
        SmallBatch: see `whitening`.
        NonFinite: see `difference`.
    """
    raw = difference(teacher, old, mask)
    k = raw.clamp(-clip, clip)
    stats = moments(k, mask)
    whiten = whitening(stats, small_batch)
    advantages = torch.where(mask, (k.double() - whiten.shift) / whiten.scale, 0.0)
    return advantages.to(teacher.dtype), _metrics(raw, k, advantages, mask, whiten, clip)


def _metrics(
    raw: Tensor, k: Tensor, advantages: Tensor, mask: Tensor, whiten: Whitening, clip: float
) -> dict[str, float]:
    count = max(int(mask.sum()), 1)
    impossible = mask & raw.isinf()
    finite = mask & ~impossible
    flipped = mask & (k.sign() * advantages.sign() < 0)
    return {
        # Single-sample estimate of KL(student || teacher) per token; tokens the teacher finds
        # impossible (-inf) are counted beside it instead of making it infinite.
        "raw_kl": -float(raw[finite].double().mean()) if finite.any() else 0.0,
        "teacher_impossible": int(impossible.sum()) / count,
        "k_mean": whiten.shift,
        "k_sigma": whiten.scale,
        "clamped_low": int((mask & (raw < -clip)).sum()) / count,
        "clamped_high": int((mask & (raw > clip)).sum()) / count,
        "sign_flips": int(flipped.sum()) / count,
        "advantage_max": float(advantages.abs().max()) if advantages.numel() else 0.0,
    }
