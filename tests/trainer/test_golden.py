"""Advantages, loss and gradient against vectors of the published reference implementation."""

import json
from pathlib import Path

import pytest
import torch

from tests.trainer.flat import alone, token_batch
from trainer.estimator_settings import EstimatorSettings, LossSettings
from trainer.estimators.estimate import estimate
from trainer.surrogates import aggregate, denominator, surrogate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gndpo_vectors.json").read_text())
CASES = [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"]]
DTYPES = [torch.float64, torch.float32]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def batch_of(case, dtype, poison=0.0):
    """The case flat; its padding may hold a poison."""
    names = ("teacher_logprobs", "old_logprobs")
    teacher, old = (torch.tensor(case[name], dtype=dtype) for name in names)
    mask = torch.arange(teacher.shape[1]) < torch.tensor(case["response_lengths"])[:, None]
    prompts = sorted(set(case["prompt_of_row"]))
    return token_batch(
        torch.where(mask, teacher, teacher + poison),
        torch.where(mask, old, old - poison),
        mask,
        rewards_B=torch.tensor(case["outcome_reward"], dtype=torch.float64),
        groups_B=torch.tensor([prompts.index(one) for one in case["prompt_of_row"]]),
    )


def expected(case, name, dtype):
    rows = torch.tensor(case["expected"][name], dtype=dtype)
    if name == "grpo_advantages":
        # The one place where we differ on purpose: a lone sample has nobody to be better than, so
        # its advantage is 0. The reference makes it the reward itself (mean 0, deviation 1).
        prompts = case["prompt_of_row"]
        rows[torch.tensor([prompts.count(one) == 1 for one in prompts])] = 0.0
    return rows.reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gndpo", "opd", "grpo"])
@pytest.mark.parametrize("case", CASES)
def test_advantages(case, name, dtype):
    batch = batch_of(case, dtype)
    result = estimate(batch, EstimatorSettings(name=name), None, alone)
    tolerance = TOLERANCE[dtype]
    if name == "gndpo":
        # Rounding the vectors' inputs to float32 alone moves k by eps times the largest logprob,
        # and whitening divides that by sigma; in case tiny-3 sigma is 1e-3.
        rounding = 2 * torch.finfo(dtype).eps * float(batch.old_N[batch.mask_N].abs().max())
        tolerance = max(tolerance, rounding / result.tally.metrics()["k_sigma"])
    wanted = expected(case, f"{name}_advantages", dtype)
    torch.testing.assert_close(result.advantages_N, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_grpo_does_without_a_teacher(case):
    batch = batch_of(case, torch.float64)
    absent = token_batch(
        None,
        batch.old_N.reshape(batch.sequences, -1),
        batch.mask_N,
        rewards_B=batch.rewards_B,
        groups_B=batch.groups_B,
    )
    result = estimate(absent, EstimatorSettings(name="grpo"), None, alone)
    wanted = expected(case, "grpo_advantages", torch.float64)
    torch.testing.assert_close(result.advantages_N, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(case, dtype):
    batch, settings = batch_of(case, dtype), LossSettings()
    new = torch.tensor(case["logprobs"], dtype=dtype).reshape(-1).requires_grad_()
    place = (batch.mask_N, batch.rows_N, batch.sequences)
    advantages = expected(case, "gndpo_advantages", dtype)
    losses, clipped = surrogate(new, batch.old_N, advantages, *place, settings)
    total = denominator(*place, settings.aggregation, 0)
    loss = aggregate(losses, *place, settings.aggregation, total)
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["gspo_loss"], abs=TOLERANCE[dtype])
    gradient = expected(case, "gspo_grad_wrt_logprobs", dtype)
    torch.testing.assert_close(new.grad, gradient, rtol=0, atol=TOLERANCE[dtype])
    fraction = float(clipped.sum() / batch.mask_N.sum())
    assert fraction == pytest.approx(case["expected"]["gspo_clip_fraction"], abs=1e-6)


@pytest.mark.pitfall("A4")
@pytest.mark.parametrize("name", ["gndpo", "opd", "opd_raw", "grpo"])
@pytest.mark.parametrize("case", CASES)
def test_padding_does_not_matter(case, name):
    settings = EstimatorSettings(name=name)
    clean, dirty = (
        estimate(batch_of(case, torch.float64, poison), settings, None, alone)
        for poison in (0.0, torch.nan)
    )
    assert torch.equal(clean.advantages_N, dirty.advantages_N)
    assert clean.tally.metrics() == dirty.tally.metrics()
