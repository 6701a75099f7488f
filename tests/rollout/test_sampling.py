"""One token at a time: truncation, random numbers, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.rollout.sampling import Sampling, UnsupportedSampling, choose, uniforms

PROBS = [0.15, 0.5, 0.05, 0.3]
GRID = 1000


def shares(probs=PROBS, temperature=1.0, top_p=1.0, top_k=0):
    """How often each column comes up when the uniform runs evenly over [0, 1)."""
    logits_BA = torch.tensor(probs).log().expand(GRID, -1)
    uniforms_B = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    columns_B = choose(logits_BA, uniforms_B, temperature=temperature, top_p=top_p, top_k=top_k)
    return (torch.bincount(columns_B, minlength=len(probs)) / GRID).tolist()


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, PROBS),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-8}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [p * p / 0.365 for p in PROBS]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"top_k": 4}, PROBS),
        ({"top_k": 999}, PROBS),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 0.625, 0, 0.375]),
        ({"top_p": 0.9}, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        # top_k leaves 5/8 and 3/8, and 0.6 of that is reached by the first alone.
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 0.625, 0, 0.375]),
    ],
)
def test_known_distribution(settings, expected):
    assert shares(**settings) == pytest.approx(expected, abs=1.5 / GRID)


def test_a_column_without_mass_is_never_chosen():
    probs_BA = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(3, -1)
    uniforms_B = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    columns_B = choose(probs_BA.log(), uniforms_B, temperature=1.0, top_p=1.0, top_k=0)
    assert columns_B.tolist() == [1, 3, 3]


def test_uniforms_depend_on_seed_and_sample_alone():
    drawn = {(seed, sample): uniforms(seed, sample, 8) for seed in (0, 1) for sample in (0, 1)}
    assert len({row.tobytes() for row in drawn.values()}) == 4
    assert np.array_equal(uniforms(1, 1, 3), drawn[1, 1][:3])
    assert min(map(min, drawn.values())) >= 0 and max(map(max, drawn.values())) < 1
    assert uniforms(2**64 - 1, 2**32 - 1, 1).shape == (1,)


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_k": -1}, "top_k -1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"eos_ids": (96,)}, "eos_ids has id 96"),
        ({"suppressed_ids": (3, -1)}, "suppressed_ids has id -1"),
        ({"suppressed_ids": tuple(range(96))}, "all 96 ids"),
        ({"named_top_k": 96}, r"named_top_k 96 exceeds the 95 ids .*trainer\.loss\.top_k"),
        ({"suppressed_ids": (0,)}, r"lacks the image placeholder \(id 3\)"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(settings, name):
    good = {"max_new_tokens": 1, "eos_ids": (2,), "suppressed_ids": (3,)}
    Sampling(**good).check(vocabulary=96, placeholder_id=3)
    with pytest.raises(UnsupportedSampling, match=name):
        Sampling(**{**good, **settings}).check(vocabulary=96, placeholder_id=3)
