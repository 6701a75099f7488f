"""Advantages, loss and gradient against vectors of the published reference implementation."""

import json
from pathlib import Path

import pytest
import torch

from trainer.advantages import gndpo
from trainer.losses import aggregate, denominator, gspo

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gndpo_vectors.json").read_text())
CASES = [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"]]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def tensors(case, dtype):
    names = ("teacher_logprobs", "old_logprobs", "logprobs")
    teacher, old, new = (torch.tensor(case[name], dtype=dtype) for name in names)
    lengths = torch.tensor(case["response_lengths"])
    mask = torch.arange(teacher.shape[1]) < lengths[:, None]
    return teacher, old, new, mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_advantages(case, dtype):
    teacher, old, _, mask = tensors(case, dtype)
    advantages, metrics = gndpo(teacher, old, mask)
    wanted = torch.tensor(case["expected"]["gndpo_advantages"], dtype=dtype)
    # Rounding the vectors' inputs to float32 alone moves k by eps times the largest logprob, and
    # whitening divides that by sigma; in case tiny-3 sigma is 1e-3.
    rounding = 2 * torch.finfo(dtype).eps * float(old[mask].abs().max()) / metrics["k_sigma"]
    tolerance = max(TOLERANCE[dtype], rounding)
    torch.testing.assert_close(advantages, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(case, dtype):
    _, old, new, mask = tensors(case, dtype)
    advantages = torch.tensor(case["expected"]["gndpo_advantages"], dtype=dtype)
    new.requires_grad_()
    losses, clipped = gspo(new, old, advantages, mask)
    total = denominator(mask, "sequence-mean")
    loss = aggregate(losses, mask, "sequence-mean", total)
    loss.backward()
    wanted = case["expected"]
    assert loss.item() == pytest.approx(wanted["gspo_loss"], abs=TOLERANCE[dtype])
    gradient = torch.tensor(wanted["gspo_grad_wrt_logprobs"], dtype=dtype)
    torch.testing.assert_close(new.grad, gradient, rtol=0, atol=TOLERANCE[dtype])
    fraction = float(clipped.sum() / mask.sum())
    assert fraction == pytest.approx(wanted["gspo_clip_fraction"], abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_padding_does_not_matter(case):
    teacher, old, _, mask = tensors(case, torch.float64)
    clean, _ = gndpo(teacher, old, mask)
    poison = torch.where(mask, 0.0, torch.nan)
    dirty, _ = gndpo(teacher + poison, old - poison, mask)
    assert torch.equal(clean, dirty)
