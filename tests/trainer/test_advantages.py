"""Right values where others went wrong: advantages."""

import pytest
import torch

from trainer.advantages import Moments, NonFinite, SmallBatch, difference, gndpo, moments


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def whitened(*k: float, **options) -> list[float]:
    teacher = row(*k)
    mask = torch.ones_like(teacher, dtype=torch.bool)
    return gndpo(teacher - 10, torch.full_like(teacher, -10.0), mask, **options)[0][0].tolist()


@pytest.mark.pitfall("L1")
def test_the_difference_is_taken_token_by_token():
    k = difference(row(-0.1, -0.9), row(-0.4, -0.4), torch.ones(1, 2, dtype=torch.bool))
    assert k[0].tolist() == pytest.approx([0.3, -0.5], abs=1e-12)


@pytest.mark.pitfall("L12")
def test_a_logprob_of_zero_is_a_value_and_a_masked_one_is_none():
    # Teacher certain (0.0) of the first token; what stands at the masked third must not matter.
    mask = torch.tensor([[True, True, False]])
    one, _ = gndpo(row(0.0, -1.0, 0.0), row(-1.0, -1.0, -7.0), mask)
    other, _ = gndpo(row(0.0, -1.0, -9.0), row(-1.0, -1.0, 0.0), mask)
    assert one.tolist() == other.tolist()
    assert one[0].tolist() == pytest.approx([0.70710678, -0.70710678, 0.0], abs=1e-6)


@pytest.mark.pitfall("A1")
def test_two_values_whiten_with_bessels_correction():
    assert whitened(1.0, 3.0) == pytest.approx([-0.7071, 0.7071], abs=1e-4)


@pytest.mark.pitfall("A1")
@pytest.mark.parametrize("k", [[], [2.0], [1.5, 1.5], [0.0, 0.0, 0.0]])
def test_a_batch_without_spread_is_an_error_or_safely_zero(k):
    with pytest.raises(SmallBatch, match="small_batch: safe"):
        whitened(*k)
    assert whitened(*k, small_batch="safe") == [0.0] * len(k)


@pytest.mark.pitfall("A1")
def test_two_different_values_stay_finite_in_safe_mode():
    assert whitened(1.0, 3.0, small_batch="safe") == pytest.approx([-0.7071, 0.7071], abs=1e-4)


@pytest.mark.pitfall("A6")
def test_a_small_sigma_beside_a_large_mean_is_right():
    generator = torch.Generator().manual_seed(0)
    k = -4 + 1e-3 * torch.randn(1, 100_000, generator=generator)
    mask = torch.ones_like(k, dtype=torch.bool)
    stats = moments(k, mask)
    assert (stats.m2 / (stats.count - 1)) ** 0.5 == pytest.approx(1e-3, rel=1e-2)
    exact = float(k.double().std())
    assert (stats.m2 / (stats.count - 1)) ** 0.5 == pytest.approx(exact, rel=1e-9)
    _, metrics = gndpo(k, torch.zeros_like(k), mask)
    # The eps of 1e-8 inside the square root is part of the formula.
    assert metrics["k_sigma"] == pytest.approx((exact**2 + 1e-8) ** 0.5, rel=1e-3)


@pytest.mark.pitfall("A7")
def test_the_clamp_comes_before_the_whitening():
    wanted = [-1.498, 0.513, 0.552, 0.434]
    assert whitened(-50.0, 0.1, 0.2, -0.1) == pytest.approx(wanted, abs=1e-3)


def test_an_impossible_token_is_clamped_and_counted():
    teacher, old = row(-torch.inf, -1.0, -0.5), row(-1.0, -1.0, -1.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, metrics = gndpo(teacher, old, mask)
    assert advantages.isfinite().all()
    assert metrics["teacher_impossible"] == pytest.approx(1 / 3)
    assert metrics["clamped_low"] == pytest.approx(1 / 3)
    assert metrics["raw_kl"] == pytest.approx(-0.25)


@pytest.mark.pitfall("A4")
def test_nan_at_a_masked_position_is_ignored_and_at_a_valid_one_stops():
    teacher, old = row(-1.0, -2.0, -torch.inf), row(0.0, -1.0, torch.nan)
    advantages, _ = gndpo(teacher, old - row(0.0, 0.5, 0.0), torch.tensor([[True, True, False]]))
    assert advantages[0].tolist() == pytest.approx([-0.7071, 0.7071, 0.0], abs=1e-4)
    with pytest.raises(NonFinite):
        gndpo(teacher, old, torch.ones(1, 3, dtype=torch.bool))


def test_sign_flips_are_counted():
    teacher, old = row(-1.0, -1.1, -0.9), row(0.0, 0.0, 0.0)
    advantages, metrics = gndpo(teacher, old, torch.ones(1, 3, dtype=torch.bool))
    assert advantages[0].tolist() == pytest.approx([0.0, -1.0, 1.0], abs=1e-5)
    assert metrics["sign_flips"] == pytest.approx(1 / 3)
    assert metrics["raw_kl"] == pytest.approx(1.0)


def test_moments_merge_to_those_of_the_whole():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator)
    mask = torch.rand(1000, generator=generator) < 0.7
    whole = moments(values, mask)
    parts = [moments(v, m) for v, m in zip(values.split(137), mask.split(137), strict=True)]
    merged = Moments(0, 0.0, 0.0)
    for part in [*parts, Moments(0, 0.0, 0.0)]:
        merged = merged.merged(part)
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, abs=1e-12)
    assert merged.m2 == pytest.approx(whole.m2, rel=1e-12)
