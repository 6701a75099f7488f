"""GNDPO (arXiv 2606.09091): clamped differences, whitened over the whole rollout batch.

For every response token with mask m:

    k   = clamp(logp_teacher - logp_old, -c, +c)
    mu  = sum m k / (N + eps)
    var = sum m (k - mu)^2 / (N + eps) * N / (N - 1)
    A   = m (k - mu) / sqrt(var + eps)                    eps = 1e-8

The clamp bounds outliers; the whitening that follows is affine: it centres and equalises scale
between batches, and it can flip signs (k of -1.0, -1.1, -0.9 becomes 0, -1, +1). The switches
`center`, `scale`, `std_floor` and `post_clip` are ours. So are statistics of earlier batches
(`Running`); moments for each teacher or domain by itself are DN-MOPD's (arXiv 2609.35347).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainer.blocks import blocks
from trainer.estimator_settings import EstimatorSettings
from trainer.estimators.moments import Moments

EPSILON = 1e-8


class SmallBatch(ValueError):
    """Too few valid tokens, or no spread among them, to whiten."""


@dataclass(frozen=True)
class Running:
    """Statistics that outlive a step: every batch's tokens, `decay` times lighter each step.

    Batches are merged by Chan's rule, so the variance holds the drift between them too, and the
    weights are normalised by their sum: with batches of equal size the mean is the bias-corrected
    exponential moving average (Adam, arXiv 1412.6980, section 3).

    Attributes:
        moments: of all batches so far, the newest with its full count.
    """

    moments: Moments

    def to_dict(self) -> dict[str, float]:
        """As JSON-able values, exactly."""
        return asdict(self.moments)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Running:
        """From what `to_dict` gave."""
        return cls(Moments(**values))


def run_on(running: Running | None, batch: Moments, decay: float) -> Running:
    """The running statistics with a new batch in them.

    Args:
        running: of the batches before; None before the first.
        batch: moments of the whole new batch.
        decay: weight of a batch one step old, 0 to 1.
    """
    return Running(running.moments.decayed(decay).merged(batch) if running else batch)


def mean_and_sigma(stats: Moments) -> tuple[float, float]:
    """mu and sqrt(var + eps) of the formula; sigma is 1 for fewer than two values or no spread."""
    n = stats.count
    if _small(stats):
        return stats.mean, 1.0
    # N + eps as in the reference: the golden vectors hold to it.
    mean = stats.mean * n / (n + EPSILON)
    squares = stats.m2 + n * (stats.mean - mean) ** 2
    variance = squares / (n + EPSILON) * n / (n - 1)
    return mean, float((variance + EPSILON) ** 0.5)


@dataclass(frozen=True)
class Whitening:
    """The affine map from k to advantages: A = (k - shift) / scale."""

    shift: float
    scale: float


def whitening(stats: Moments, settings: EstimatorSettings, whose: str = "") -> Whitening:
    """The map that whitens tokens with these statistics.

    Args:
        stats: moments of the clamped k.
        settings: center and scale switch the two halves of the map; std_floor is sigma's lower
            bound; small_batch says what to do with fewer than two valid tokens or no spread:
            "error" raises; "safe" only centres, so that such tokens get zero advantages.
        whose: part of the batch, for the message.

    Raises:
        SmallBatch: fewer than two valid tokens or sigma 0, with small_batch "error".
    """
    mean, sigma = mean_and_sigma(stats)
    if not settings.scale:
        return Whitening(mean if settings.center else 0.0, 1.0)
    if not _small(stats):
        return Whitening(mean if settings.center else 0.0, max(sigma, settings.std_floor))
    if settings.small_batch == "error":
        n = stats.count
        what = f"{n:g} valid tokens{whose}" + ("" if n < 2 else " with the same k")
        raise SmallBatch(
            f"cannot whiten {what}; enlarge trainer.prompts_per_step or set "
            "trainer.estimator.small_batch: safe to give such a batch zero advantages"
        )
    return Whitening(mean, 1.0)


def _small(stats: Moments) -> bool:
    return stats.count < 2 or stats.m2 <= 0.0


def whiten(
    k_N: Tensor,
    maps: Sequence[Whitening],
    labels_N: Tensor | None,
    post_clip: float | None,
) -> Tensor:
    """Advantages: float of k's dtype, [N]. The mask is not applied.

    Args:
        k_N: float, clamped differences, nats; finite.
        maps: one for all tokens, or one for each label.
        labels_N: int64, each token's label; None with a single map.
        post_clip: bound of |advantage|; None leaves them.
    """
    columns = zip(*((one.shift, one.scale) for one in maps), strict=True)
    shift_L, scale_L = (torch.tensor(column, dtype=torch.float64) for column in columns)

    def of_block(k_N: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        # float64: a small sigma beside a large mean would cost float32 its digits.
        advantages_N = (k_N.double() - shift).div_(scale)
        if post_clip is not None:
            advantages_N.clamp_(-post_clip, post_clip)
        return advantages_N.to(k_N.dtype)

    if labels_N is None:
        return torch.cat([of_block(k, shift_L[0], scale_L[0]) for (k,) in blocks(k_N)])
    labelled = blocks(k_N, labels_N)
    return torch.cat([of_block(k, shift_L[label], scale_L[label]) for k, label in labelled])
