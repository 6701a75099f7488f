"""Right values where others went wrong: the surrogate loss and its aggregation."""

import math

import pytest
import torch

from trainer.losses import aggregate, denominator, gspo


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def mask_of(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def mean_loss(new, old, advantages, mask, aggregation="sequence-mean"):
    losses, _ = gspo(new, old, advantages, mask)
    return aggregate(losses, mask, aggregation, denominator(mask, aggregation))


@pytest.mark.pitfall("A3")
def test_micro_batches_share_one_denominator():
    losses = torch.tensor([[8.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    for aggregation, wanted in [("token-mean", 2.0), ("sequence-mean", 4.0)]:
        total = denominator(mask, aggregation)
        parts = [aggregate(losses[i : i + 1], mask[i : i + 1], aggregation, total) for i in (0, 1)]
        assert sum(parts).item() == wanted


@pytest.mark.pitfall("A3")
@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_do_not_depend_on_accumulation(aggregation, parts):
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([1, 6, 2, 5, 3, 0, 4, 6])[:, None]
    total = denominator(mask, aggregation)
    new = (old + 0.1).requires_grad_()
    mean_loss(new, old, advantages, mask, aggregation).backward()
    whole, new.grad = new.grad, None
    for piece in torch.arange(8).chunk(parts):
        losses, _ = gspo(new[piece], old[piece], advantages[piece], mask[piece])
        aggregate(losses, mask[piece], aggregation, total).backward()
    torch.testing.assert_close(new.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.pitfall("A4")
def test_garbage_at_masked_positions_leaves_the_gradient_alone():
    mask = mask_of(1, 1, 0)
    gradients = []
    for garbage in [(-torch.inf, torch.nan, -100.0), (0.0, 0.0, 0.0)]:
        new = row(0.0, -1.0, garbage[2]).requires_grad_()
        mean_loss(new, row(0.0, -1.0, garbage[1]), row(-1.0, 1.0, garbage[0]), mask).backward()
        gradients.append(new.grad[0].tolist())
    assert gradients[0] == gradients[1] == [0.5, -0.5, 0.0]


@pytest.mark.pitfall("A5")
def test_the_ratio_is_of_the_sequence_and_the_gradient_of_the_token():
    old = row(-1.0, -1.0)
    new = (old + row(0.4, -0.4)).requires_grad_()
    losses, clipped = gspo(new, old, row(1.0, 2.0), mask_of(1, 1))
    assert losses[0].tolist() == pytest.approx([-1.0, -2.0], abs=1e-12)
    assert not clipped.any()
    losses.sum().backward()
    assert new.grad[0].tolist() == pytest.approx([-1.0, -2.0], abs=1e-12)


@pytest.mark.pitfall("A5")
def test_a_sequence_beyond_the_range_is_clipped_for_positive_advantages():
    old = row(-1.0, -1.0, -1.0)
    new = (old + row(0.3, 0.3, 50.0)).requires_grad_()
    losses, clipped = gspo(new, old, row(1.0, -1.0, 9.0), mask_of(1, 1, 0))
    assert math.exp(0.3) == pytest.approx(1.35, abs=1e-3)
    assert losses[0].tolist() == pytest.approx([-1.2, math.exp(0.3), 0.0], abs=1e-9)
    assert clipped[0].tolist() == [True, False, False]
    losses.sum().backward()
    assert new.grad[0].tolist() == pytest.approx([0.0, math.exp(0.3), 0.0], abs=1e-9)


@pytest.mark.pitfall("A12")
def test_duplicating_every_sequence_changes_nothing():
    generator = torch.Generator().manual_seed(2)
    old, advantages = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    results = []
    for copies in (1, 2):
        new = (old + 0.05).requires_grad_()
        many = [tensor.repeat(copies, 1) for tensor in (new, old, advantages, mask)]
        loss = mean_loss(*many)
        loss.backward()
        results.append((loss.item(), new.grad))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


@pytest.mark.pitfall("A9")
def test_an_empty_sequence_leaves_the_denominator():
    mask = torch.tensor([[True, True], [False, False]])
    assert denominator(mask, "sequence-mean") == 1
    losses = torch.tensor([[1.0, 3.0], [99.0, 99.0]])
    assert aggregate(losses, mask, "sequence-mean", 1).item() == 2.0
