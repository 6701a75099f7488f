"""Metrics of a whole batch, gathered in parts: ranks and micro-batches add up, whatever the split.

A mean of means would weigh a rank with few tokens like one with many. So a tally keeps what adds
up (sums with their weights, counts, histograms) and what has a largest value, and divides last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.blocks import blocks
from trainer.histogram import BINS, histogram, quantile

QUANTILES = {f"p{percent:02}": percent / 100 for percent in (1, 5, 25, 50, 75, 95, 99)}


@dataclass(eq=False)
class Tally:
    """Named parts of metrics; mutable, filled by the methods that add.

    Ranks that merge must have added the same names, be it for no tokens.

    Attributes:
        means: name -> (sum, weight); the metric is sum over weight.
        totals: name -> value; the metric is their sum.
        maxima: name -> value; the metric is the largest.
        histograms: name -> counts, float64 [BINS]; the metrics are name_p01 to name_p99.
    """

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Tensor] = field(default_factory=dict)

    def add_mean(self, name: str, values_N: Tensor, mask_N: Tensor) -> None:
        """Mean of values where mask is true; elsewhere they may be anything."""
        total = 0.0
        for values, mask in blocks(values_N.detach(), mask_N):
            total += float(torch.where(mask, values, 0.0).sum(dtype=torch.float64))
        self.add_share(name, total, float(torch.count_nonzero(mask_N)))

    def add_share(self, name: str, part: float, whole: float) -> None:
        """part / whole, such as a number of tokens of all tokens."""
        before, weight = self.means.get(name, (0.0, 0.0))
        self.means[name] = (before + part, weight + whole)

    def add_total(self, name: str, value: float) -> None:
        """A count, or a share of a sum."""
        self.totals[name] = self.totals.get(name, 0.0) + value

    def add_maximum(self, name: str, value: float) -> None:
        """A candidate for the largest value."""
        self.maxima[name] = max(self.maxima.get(name, -torch.inf), value)

    def add_quantiles(self, name: str, values_N: Tensor, mask_N: Tensor) -> None:
        """Quantiles of values where mask is true; elsewhere they must be 0. See histogram.py."""
        self._add_counts(name, histogram(values_N.detach(), mask_N))

    def merged(self, other: Tally) -> Tally:
        """Both parts together; neither is changed."""
        both = Tally(dict(self.means), dict(self.totals), dict(self.maxima), dict(self.histograms))
        for name, (part, whole) in other.means.items():
            both.add_share(name, part, whole)
        for name, value in other.totals.items():
            both.add_total(name, value)
        for name, value in other.maxima.items():
            both.add_maximum(name, value)
        for name, counts in other.histograms.items():
            both._add_counts(name, counts)
        return both

    def flat(self) -> tuple[Tensor, Tensor]:
        """Everything as two float64 vectors, ordered by name: one to sum over ranks, and one to
        take the largest of."""
        numbers = [value for name in sorted(self.means) for value in self.means[name]]
        numbers += [self.totals[name] for name in sorted(self.totals)]
        counts = [self.histograms[name] for name in sorted(self.histograms)]
        sums = torch.cat([torch.tensor(numbers, dtype=torch.float64), *counts])
        maxima = [self.maxima[name] for name in sorted(self.maxima)]
        return sums, torch.tensor(maxima, dtype=torch.float64)

    def from_flat(self, sums: Tensor, maxima: Tensor) -> Tally:
        """The whole batch's tally, of this one's names, from the ranks' merged vectors."""
        sizes = [2 * len(self.means), len(self.totals), BINS * len(self.histograms)]
        pairs, totals, counts = sums.cpu().split(sizes)
        return Tally(
            {
                name: (float(part), float(whole))
                for name, (part, whole) in zip(sorted(self.means), pairs.view(-1, 2), strict=True)
            },
            dict(zip(sorted(self.totals), totals.tolist(), strict=True)),
            dict(zip(sorted(self.maxima), maxima.tolist(), strict=True)),
            dict(zip(sorted(self.histograms), counts.view(-1, BINS), strict=True)),
        )

    def metrics(self) -> dict[str, float]:
        """By name. A mean, maximum or quantile of nothing is left out."""
        values = {name: part / whole for name, (part, whole) in self.means.items() if whole}
        values |= self.totals
        values |= {name: value for name, value in self.maxima.items() if value > -torch.inf}
        for name, counts in self.histograms.items():
            if counts.any():
                values |= _quantiles(name, counts)
        return values

    def _add_counts(self, name: str, counts: Tensor) -> None:
        self.histograms[name] = (
            self.histograms[name] + counts if name in self.histograms else counts
        )


def _quantiles(name: str, counts: Tensor) -> Mapping[str, float]:
    return {f"{name}_{label}": quantile(counts, fraction) for label, fraction in QUANTILES.items()}
