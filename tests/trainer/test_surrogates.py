"""Right values where others went wrong: surrogate losses, their aggregation, their correction."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.estimator_settings import LossSettings
from trainer.surrogates import (
    LOGPROB_FLOOR,
    aggregate,
    correction,
    denominator,
    surrogate,
    top_k_reverse_kl,
)

NAMES = ["gspo", "ppo", "importance"]
AGGREGATIONS = ["sequence-mean", "token-mean", "fixed-length"]


def flat(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def place(mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mask, rows and sequences of a padded batch, flat; [T] is one sequence."""
    count, width = torch.atleast_2d(mask_BT).shape
    return mask_BT.reshape(-1), torch.arange(count).repeat_interleave(width), count


def losses_of(new, old, advantages, mask, name="gspo"):
    tensors = (tensor.reshape(-1) for tensor in (new, old, advantages))
    return surrogate(*tensors, *place(mask), LossSettings(name=name))


def mean_loss(new, old, advantages, mask, aggregation="sequence-mean", name="gspo"):
    losses, _ = losses_of(new, old, advantages, mask, name)
    total = denominator(*place(mask), aggregation, 6)
    return aggregate(losses, *place(mask), aggregation, total)


@pytest.mark.pitfall("A3")
def test_micro_batches_share_one_denominator():
    losses = flat(8.0, 0.0, 0.0, 0.0, 0.0, 0.0).reshape(2, 3)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    for aggregation, wanted in [("token-mean", 2.0), ("sequence-mean", 4.0), ("fixed-length", 1.0)]:
        total = sum(denominator(*place(mask[i]), aggregation, 4) for i in (0, 1))
        assert total == denominator(*place(mask), aggregation, 4)
        parts = [aggregate(losses[i], *place(mask[i]), aggregation, total) for i in (0, 1)]
        assert sum(parts).item() == wanted


@pytest.mark.pitfall("A3")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_do_not_depend_on_accumulation(name, aggregation, parts):
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([1, 6, 2, 5, 3, 0, 4, 6])[:, None]
    total = denominator(*place(mask), aggregation, 6)
    new = (old + 0.1).requires_grad_()
    mean_loss(new, old, advantages, mask, aggregation, name).backward()
    whole, new.grad = new.grad, None
    assert whole.any()
    for piece in torch.arange(8).chunk(parts):
        losses, _ = losses_of(new[piece], old[piece], advantages[piece], mask[piece], name)
        aggregate(losses, *place(mask[piece]), aggregation, total).backward()
    torch.testing.assert_close(new.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.pitfall("A4")
@pytest.mark.parametrize("name", NAMES)
def test_garbage_at_masked_positions_leaves_the_gradient_alone(name):
    mask = mask_of(1, 1, 0)
    gradients = []
    for garbage in [(-torch.inf, torch.nan, -100.0), (0.0, 0.0, 0.0), (torch.nan,) * 3]:
        new = flat(0.0, -1.0, garbage[2]).requires_grad_()
        advantages, old = flat(-1.0, 1.0, garbage[0]), flat(0.0, -1.0, garbage[1])
        mean_loss(new, old, advantages, mask, name=name).backward()
        gradients.append(new.grad.tolist())
    assert gradients[0] == gradients[1] == gradients[2] == [0.5, -0.5, 0.0]


@pytest.mark.pitfall("A5")
def test_the_ratio_is_of_the_sequence_and_the_gradient_of_the_token():
    old = flat(-1.0, -1.0)
    new = (old + flat(0.4, -0.4)).requires_grad_()
    losses, clipped = losses_of(new, old, flat(1.0, 2.0), mask_of(1, 1))
    assert losses.tolist() == pytest.approx([-1.0, -2.0], abs=1e-12)
    assert not clipped.any()
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.0, -2.0], abs=1e-12)


@pytest.mark.pitfall("A5")
def test_a_sequence_beyond_the_range_is_clipped_for_positive_advantages():
    old = flat(-1.0, -1.0, -1.0)
    new = (old + flat(0.3, 0.3, 50.0)).requires_grad_()
    losses, clipped = losses_of(new, old, flat(1.0, -1.0, 9.0), mask_of(1, 1, 0))
    assert math.exp(0.3) == pytest.approx(1.35, abs=1e-3)
    assert losses.tolist() == pytest.approx([-1.2, math.exp(0.3), 0.0], abs=1e-9)
    assert clipped.tolist() == [True, False, False]
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx([0.0, math.exp(0.3), 0.0], abs=1e-9)


def test_each_sequence_has_its_own_ratio_wherever_its_tokens_lie():
    new, old = flat(0.1, -0.5, 0.3, -0.5), torch.zeros(4, dtype=torch.float64)
    rows = torch.tensor([1, 0, 1, 0])
    ones = torch.ones(4, dtype=torch.float64)
    losses, _ = surrogate(new, old, -ones, ones.bool(), rows, 3, LossSettings())
    # Sequence 0 lies below the range: for a negative advantage that is clipped.
    wanted = [math.exp(0.2), 0.8, math.exp(0.2), 0.8]
    assert losses.tolist() == pytest.approx(wanted, abs=1e-12)


def test_ppo_clips_each_token_by_itself():
    old = flat(-1.0, -1.0, -1.0, -1.0)
    new = (old + flat(0.3, -0.3, 0.3, -0.3)).requires_grad_()
    losses, clipped = losses_of(new, old, flat(1.0, 1.0, -1.0, -1.0), mask_of(1, 1, 1, 1), "ppo")
    up, down = math.exp(0.3), math.exp(-0.3)
    assert losses.tolist() == pytest.approx([-1.2, -down, up, 0.8], abs=1e-12)
    assert clipped.tolist() == [True, False, False, True]
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx([0.0, -down, up, 0.0], abs=1e-12)


def test_importance_is_not_clipped():
    old = flat(-1.0, -1.0)
    new = (old + flat(3.0, -3.0)).requires_grad_()
    losses, clipped = losses_of(new, old, flat(1.0, -2.0), mask_of(1, 1), "importance")
    wanted = [-math.exp(3.0), 2 * math.exp(-3.0)]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12)
    assert not clipped.any()
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.pitfall("A12")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_duplicating_every_sequence_changes_nothing(name, aggregation):
    generator = torch.Generator().manual_seed(2)
    old, advantages = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    results = []
    for copies in (1, 2):
        new = (old + 0.05).requires_grad_()
        many = [tensor.repeat(copies, 1) for tensor in (new, old, advantages, mask)]
        loss = mean_loss(*many, aggregation, name)
        loss.backward()
        results.append((loss.item(), new.grad))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


@pytest.mark.pitfall("A9")
def test_an_empty_sequence_leaves_the_denominator():
    mask = torch.tensor([[True, True], [False, False]])
    assert denominator(*place(mask), "sequence-mean", 0) == 1
    assert denominator(*place(mask), "fixed-length", 10) == 10
    losses = flat(1.0, 3.0, 99.0, 99.0)
    assert aggregate(losses, *place(mask), "sequence-mean", 1).item() == 2.0
    assert aggregate(losses, *place(mask), "fixed-length", 10).item() == 0.4


def test_no_tokens_have_a_loss_of_zero_with_a_gradient():
    new = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    where = (nothing.bool(), nothing.long(), 0)
    for name in NAMES:
        losses, _ = surrogate(new, nothing, nothing, *where, LossSettings(name=name))
        loss = aggregate(losses, *where, "sequence-mean", 5)
        loss.backward()
        assert loss.item() == 0.0


def corrected(*differences: float, mask=None, **options):
    old = flat(*differences)
    valid = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    weights, tally = correction(old, torch.zeros_like(old), valid, LossSettings(**options))
    return weights.tolist(), tally.metrics()


def test_no_correction_weighs_all_alike():
    assert corrected(0.0, 3.0, math.nan) == ([1.0, 1.0, 1.0], {})


def test_truncation_bounds_the_weights_above():
    weights, metrics = corrected(math.log(4), math.log(0.1), 0.0, correction="truncate")
    assert weights == pytest.approx([2.0, 0.1, 1.0])
    assert metrics["correction_mean"] == pytest.approx(3.1 / 3)
    assert metrics["correction_truncated"] == pytest.approx(1 / 3)


def test_masking_drops_tokens_beyond_either_bound():
    k = (math.log(4), math.log(0.1), math.log(1.5), 200.0, -200.0)
    weights, metrics = corrected(*k, correction="mask", correction_high=3.0)
    assert weights == pytest.approx([0.0, 0.0, 1.5, 0.0, 0.0])
    assert metrics["correction_masked"] == pytest.approx(4 / 5)


@pytest.mark.pitfall("A4")
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_a_correction_ignores_masked_positions(kind):
    weights, metrics = corrected(0.1, math.nan, math.inf, mask=mask_of(1, 0, 0), correction=kind)
    assert weights == pytest.approx([math.exp(0.1), 1.0, 1.0])
    assert metrics["correction_mean"] == pytest.approx(math.exp(0.1))


def test_a_dropped_token_leaves_the_others_share_alone():
    weights, _ = corrected(0.0, 9.0, correction="mask")
    losses = flat(1.0, 1.0) * torch.tensor(weights, dtype=torch.float64)
    share = aggregate(losses, *place(mask_of(1, 1)), "token-mean", 2)
    assert share.item() == 0.5


def distributions(seed: int, count: int = 6, vocabulary: int = 9, sharpness: float = 2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**20), st.integers(0, 9), st.floats(0.1, 20))
def test_the_top_k_kl_is_a_lower_bound_and_never_negative(seed, k, sharpness):
    student, teacher = distributions(seed, sharpness=sharpness)
    ids = student.argsort(-1, descending=True)[:, :k]
    valid = torch.ones(6, dtype=torch.bool)
    kl = top_k_reverse_kl(student.gather(-1, ids), teacher.gather(-1, ids), valid)
    full = (student.exp() * (student - teacher)).sum(-1)
    assert (kl >= 0).all()
    assert (kl <= full + 1e-6).all()
    if k == 0:
        assert (kl == 0).all()


@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_top_k_kl_and_its_gradient_are_exact(k):
    student, teacher = distributions(3)
    named = student[:, :k].clone().requires_grad_()
    kl = top_k_reverse_kl(named, teacher[:, :k], torch.ones(6, dtype=torch.bool))
    p = torch.cat([named.exp(), 1 - named.exp().sum(-1, keepdim=True)], -1)
    q = torch.cat([teacher[:, :k].exp(), 1 - teacher[:, :k].exp().sum(-1, keepdim=True)], -1)
    wanted = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(kl, wanted, rtol=0, atol=1e-9)
    (gradient,) = torch.autograd.grad(kl.sum(), named)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), named)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-9)


def test_the_whole_vocabulary_gives_the_whole_kl():
    student, teacher = distributions(5)
    kl = top_k_reverse_kl(student, teacher, torch.ones(6, dtype=torch.bool))
    full = (student.exp() * (student - teacher)).sum(-1)
    torch.testing.assert_close(kl, full, rtol=0, atol=1e-6)


def test_a_student_like_its_teacher_has_nothing_to_learn():
    student, _ = distributions(4)
    named = student[:, :3].clone().requires_grad_()
    kl = top_k_reverse_kl(named, student[:, :3], torch.ones(6, dtype=torch.bool))
    assert kl.tolist() == [0.0] * 6
    kl.sum().backward()
    assert not named.grad.any()


@pytest.mark.pitfall("A4")
def test_the_top_k_kl_stays_finite_at_the_edges():
    student = torch.tensor(
        [[0.0, -40.0], [-0.1, -3.0], [1e-7, -18.0], [-math.inf, -0.2], [math.nan, math.nan]],
        requires_grad=True,
    )
    teacher = torch.tensor(
        [[-2.0, -math.inf], [-math.inf, 0.0], [0.0, -30.0], [-1.0, -1.0], [math.nan, math.inf]]
    )
    kl = top_k_reverse_kl(student, teacher, mask_of(1, 1, 1, 1, 0))
    kl.sum().backward()
    assert kl.dtype == torch.float32
    assert kl.isfinite().all()
    assert student.grad.isfinite().all()
    assert not student.grad[4].any()
    assert kl[4] == 0
    # The teacher's -inf pulls like its floor does.
    floored = torch.where(teacher == -math.inf, LOGPROB_FLOOR, teacher)
    again = top_k_reverse_kl(student, floored, mask_of(1, 1, 1, 1, 0))
    assert torch.equal(kl, again)


@pytest.mark.pitfall("L13")
def test_the_top_k_term_is_a_loss_and_no_reward():
    """Its own gradient teaches; as a reward it would not: at a given prefix it is the same for
    every sampled token, and the expectation of constant x grad log p is zero."""
    student, teacher = distributions(7, count=1)
    logits = student.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = top_k_reverse_kl(logprobs, teacher, mask_of(1))
    (as_loss,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
    assert as_loss.abs().max() > 0.1
    as_reward = torch.zeros_like(logits)
    for token in range(logits.shape[1]):
        (score,) = torch.autograd.grad(logprobs[0, token], logits, retain_graph=True)
        as_reward += logprobs[0, token].exp().detach() * kl.item() * score
    assert as_reward.abs().max() < 1e-12
