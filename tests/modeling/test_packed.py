"""Packed rows and padded rows agree with each sequence computed whole and alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modeling import packed
from modeling.groups import TokenGroup
from modeling.packed import PADDING, pack, packed_scores, packed_tokens, visible
from modeling.padded import padded_scores
from modeling.shared_prefix import plain_logprobs
from modeling.sharing import agrees_with_plain
from tests.modeling.test_shared_prefix import ALL, VISION, flatten, image_groups, text_groups

PATHS = (packed_scores, padded_scores)


def groups_for(name):
    return image_groups() if name in VISION else text_groups()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_logprobs_equal_the_plain_ones(load, name, path):
    loaded = load(name)
    groups = groups_for(name)
    plain = flatten(plain_logprobs(loaded, groups))
    assert (path(loaded, groups).logprobs_T - plain).abs().max() < 1e-4
    assert agrees_with_plain(loaded, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ("llama", "mistral", "llava", "internvl"))
def test_gradients_equal_the_plain_ones(load, name, path):
    loaded = load(name)
    groups = groups_for(name)

    def gradients(values):
        loaded.model.zero_grad()
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        return {
            key: value.grad.clone()
            for key, value in loaded.model.named_parameters()
            if value.grad is not None
        }

    ours = gradients(path(loaded, groups).logprobs_T)
    theirs = gradients(flatten(plain_logprobs(loaded, groups)))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # As a whole: sums over many patches leave small entries with the rounding of large ones.
        assert (ours[key] - value).norm() <= 1e-4 * value.norm() + 1e-5, key


@torch.no_grad()
def test_rows_of_any_capacity_give_the_same(load, monkeypatch):
    loaded = load("internvl")
    groups = [*image_groups(), *text_groups(1), *image_groups(2)]
    wide = packed_scores(loaded, groups).logprobs_T
    largest = max(packed_tokens(group) for group in groups)
    for capacity in (1, 40, 100):
        layout = pack(groups, capacity)
        assert layout.ids_RT.shape[1] <= max(capacity, largest)
        assert sorted(layout.order) == list(range(len(groups)))
        monkeypatch.setattr(
            packed, "pack", lambda groups, capacity=capacity: pack(groups, capacity)
        )
        narrow = packed_scores(loaded, groups).logprobs_T
        torch.testing.assert_close(narrow, wide, rtol=0, atol=1e-5)


def test_a_row_holds_each_prompt_once_and_no_last_token():
    groups = [
        TokenGroup(np.array([7, 8]), (np.array([10, 11, 12]), np.array([20]))),
        TokenGroup(np.array([9]), (np.array([30, 31]),)),
    ]
    layout = pack(groups)
    # The second group is smaller and comes after the first.
    assert layout.ids_RT.tolist() == [[7, 8, 10, 11, 9, 30]]
    assert layout.positions_RT.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert layout.groups_RT.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert layout.segments_RT.tolist() == [[0, 0, 1, 1, 0, 1]]
    assert layout.sources_N.tolist() == [1, 2, 3, 1, 4, 5]
    assert layout.targets_N.tolist() == [10, 11, 12, 20, 30, 31]
    assert sum(packed_tokens(group) for group in groups) == layout.ids_RT.size


def test_who_sees_whom():
    groups = [TokenGroup(np.array([7]), (np.array([10, 11, 12]), np.array([20, 21])))]
    mask = visible(pack(groups), torch.device("cpu"))[0, 0].int().tolist()
    # prompt 7, then 10, 11 of the first response, 20 of the second
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    near = visible(pack(groups), torch.device("cpu"), window=2)[0, 0].int().tolist()
    assert near == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]


def test_no_position_is_without_sight():
    groups = [TokenGroup(np.arange(5, 25), (np.array([9]),)), TokenGroup(np.array([7]), ())]
    groups[1] = TokenGroup(np.array([7]), (np.array([8, 9]),))
    layout = pack(groups, row_tokens=1)
    assert (layout.groups_RT == PADDING).any()
    assert visible(layout, torch.device("cpu")).any(-1).all()


@torch.no_grad()
def test_suppressed_ids_named_ids_and_entropy(load):
    loaded = load("llama")
    [group, *_] = text_groups()
    named = tuple(np.stack([one, one[::-1]], axis=1) for one in group.responses)
    group = TokenGroup(group.prompt_ids, group.responses, named_ids=named)
    for path in PATHS:
        scores = path(loaded, [group], suppressed_ids=[3, 4], entropy=True)
        plain = plain_logprobs(loaded, [group], suppressed_ids=[3, 4])
        torch.testing.assert_close(scores.logprobs_T, flatten(plain), rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.named_logprobs_TM[:, 0], scores.logprobs_T)
        # The entropy of the first token, from the model's own logits.
        ids = torch.from_numpy(group.prompt_ids)[None]
        logits = loaded.model(input_ids=ids).logits[0, -1].float()
        logits[[3, 4]] = -torch.inf
        wanted = torch.distributions.Categorical(logits=logits).entropy()
        assert scores.entropy_T[0].item() == pytest.approx(wanted.item(), abs=1e-5)


def test_named_ids_carry_gradients(load):
    loaded = load("llama")
    [group, *_] = text_groups()
    named = tuple(np.full((len(one), 2), 9) for one in group.responses)
    group = TokenGroup(group.prompt_ids, group.responses, named_ids=named)
    packed_scores(loaded, [group]).named_logprobs_TM.sum().backward()
    assert loaded.model.get_input_embeddings().weight.grad.abs().sum() > 0
