"""Metrics are of the whole batch, however it is split."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.flat import merge_flat
from trainer.histogram import BINS, histogram, quantile
from trainer.tally import Tally

FRACTIONS = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]


def filled(values, mask=None):
    """A tally with one of each kind."""
    values_N = torch.tensor(values, dtype=torch.float64)
    mask_N = torch.ones_like(values_N, dtype=torch.bool) if mask is None else torch.tensor(mask)
    tally = Tally()
    tally.add_mean("mean", values_N, mask_N)
    tally.add_share("positive", int((mask_N & (values_N > 0)).sum()), int(mask_N.sum()))
    tally.add_total("count", int(mask_N.sum()))
    tally.add_maximum(
        "largest", max([v for v, m in zip(values, mask_N, strict=True) if m], default=-math.inf)
    )
    tally.add_quantiles("k", torch.where(mask_N, values_N, 0.0), mask_N)
    return tally


def test_a_part_weighs_as_much_as_it_holds():
    metrics = merge_flat([filled([1.0]), filled([4.0, 5.0, 6.0])]).metrics()
    assert metrics["mean"] == 4.0
    assert (metrics["count"], metrics["largest"], metrics["positive"]) == (4, 6.0, 1.0)


def test_masked_values_may_be_anything():
    tally = filled([1.0, math.nan, -math.inf, 3.0], [True, False, False, True])
    assert tally.metrics()["mean"] == 2.0
    assert tally.metrics()["k_p99"] == pytest.approx(3.0, rel=0.01)


def test_metrics_of_nothing_are_left_out():
    assert filled([]).metrics() == {"count": 0}
    assert merge_flat([filled([]), filled([2.0])]).metrics() == filled([2.0]).metrics()


def test_the_order_in_which_names_were_added_does_not_matter():
    one, other = Tally(), Tally()
    for name, value in (("a", 1.0), ("b", 2.0)):
        one.add_share(name, value, 1)
        one.add_maximum(name + "m", value)
    for name, value in (("b", 4.0), ("a", 3.0)):
        other.add_share(name, value, 1)
        other.add_maximum(name + "m", value)
    assert merge_flat([one, other]).metrics() == {"a": 2.0, "b": 3.0, "am": 3.0, "bm": 4.0}


def test_merging_leaves_the_parts_alone():
    one, other = filled([1.0, -2.0]), filled([5.0])
    before = one.metrics()
    merged = one.merged(other)
    assert one.metrics() == before
    assert merged.metrics() == filled([1.0, -2.0, 5.0]).metrics()
    other.add_total("only there", 1)
    assert one.merged(other).metrics()["only there"] == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-80, 80), max_size=40),
    st.lists(st.integers(0, 40), min_size=0, max_size=3),
)
def test_any_split_gives_the_same_metrics(values, cuts):
    ends = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [filled(values[a:b]) for a, b in pairwise(ends)]
    whole = filled(values).metrics()
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = one_by_one.merged(part)
    for merged in (merge_flat(parts), one_by_one):
        assert merged.metrics() == pytest.approx(whole, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("scale", [0.01, 0.3, 5.0])
def test_quantiles_are_right_to_one_percent(scale):
    generator = torch.Generator().manual_seed(0)
    values_N = scale * torch.randn(10_001, generator=generator) - 0.1 * scale
    mask_N = torch.rand(10_001, generator=generator) < 0.8
    counts = histogram(torch.where(mask_N, values_N, 0.0), mask_N)
    assert counts.sum() == mask_N.sum()
    for fraction in FRACTIONS:
        exact = float(values_N[mask_N].quantile(fraction, interpolation="nearest"))
        assert quantile(counts, fraction) == pytest.approx(exact, rel=0.012, abs=0.001)


@settings(max_examples=200, deadline=None)
@given(st.floats(2**-10, 63.75, width=32), st.sampled_from([-1, 1]))
def test_every_magnitude_is_right_to_a_128th(magnitude, sign):
    values_N = torch.tensor([sign * magnitude])
    counts = histogram(values_N, torch.ones(1, dtype=torch.bool))
    assert quantile(counts, 0.5) == pytest.approx(sign * magnitude, rel=1 / 128)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, 0.0), (-0.0, 0.0), (9e-4, 0.0), (100.0, 63.75), (-math.inf, -63.75)]
)
def test_the_ends_of_the_range(value, shown):
    counts = histogram(torch.tensor([value]), torch.ones(1, dtype=torch.bool))
    assert counts.shape == (BINS,)
    assert quantile(counts, 0.01) == quantile(counts, 0.99) == shown


def test_a_quantile_is_the_smallest_value_with_that_share_at_or_below():
    values_N = torch.arange(1.0, 8.0)
    counts = histogram(values_N, torch.ones(7, dtype=torch.bool))
    assert quantile(counts, 3 / 7) == pytest.approx(3.0, rel=0.01)
    assert quantile(counts, 3 / 7 + 1e-6) == pytest.approx(4.0, rel=0.01)
    assert math.isnan(quantile(torch.zeros(BINS), 0.5))


def test_large_batches_are_counted_in_blocks():
    values_N = torch.linspace(-3, 3, 200_001)
    mask_N = values_N.abs() < 2
    tally = Tally()
    tally.add_mean("mean", values_N + 1, mask_N)
    assert tally.metrics()["mean"] == pytest.approx(1.0, abs=1e-6)
    counts = histogram(torch.where(mask_N, values_N, 0.0), mask_N)
    assert counts.sum() == mask_N.sum()
    assert quantile(counts, 0.75) == pytest.approx(1.0, rel=0.01)
