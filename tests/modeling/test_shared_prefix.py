"""The shared path agrees with each sequence computed whole and alone."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from modeling.groups import TokenGroup
from modeling.images import expand_placeholders
from modeling.prefix import pads_prompts, prefill
from modeling.shared_prefix import group_logprobs, group_scores, plain_logprobs, prefix_scores
from modeling.sharing import check_sharing, may_share, probe_groups
from tests.tiny_models import BOS, EOS, IMAGE, THINK_END, build_tokenizer, draw_image

ALL = ("llama", "gpt2", "mistral", "gemma2", "llava", "internvl")
VISION = ("llava", "internvl")


def text_groups(seed=0, shapes=((3, (4, 1)), (12, (2, 7, 7)), (1, (5,)))):
    random = np.random.default_rng(seed)
    return [
        TokenGroup(
            random.integers(5, 96, prompt), tuple(random.integers(5, 96, n) for n in responses)
        )
        for prompt, responses in shapes
    ]


def image_groups(seed=0):
    """The text groups, the first two with one and two images."""
    first, second, third = text_groups(seed)
    one = expand_placeholders([BOS, IMAGE, *first.prompt_ids], [4], IMAGE)
    two = expand_placeholders([IMAGE, 7, IMAGE, *second.prompt_ids], [4, 4], IMAGE)
    return [
        TokenGroup(one, first.responses, (draw_image(1),)),
        TokenGroup(two, second.responses, (draw_image(2), draw_image(3))),
        third,
    ]


def flatten(groups):
    return torch.cat([one for group in groups for one in group])


def assert_close(ours, theirs, tolerance=1e-4):
    assert [[len(one) for one in group] for group in ours] == [
        [len(one) for one in group] for group in theirs
    ]
    difference = (flatten(ours) - flatten(theirs)).abs().max().item()
    assert difference < tolerance


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_shared_equals_plain(load, name):
    loaded = load(name)
    groups = image_groups() if name in VISION else text_groups()
    assert_close(group_logprobs(loaded, groups), plain_logprobs(loaded, groups))
    assert check_sharing(loaded)


@pytest.mark.parametrize("name", ("llama", "gpt2", "mistral", "llava", "internvl"))
def test_gradients_shared_equal_plain(load, name):
    loaded = load(name)
    groups = image_groups() if name in VISION else text_groups()

    def gradients(score):
        loaded.model.zero_grad()
        values = flatten(score(loaded, groups))
        weights = torch.linspace(-1, 1, len(values))
        (values * weights).sum().backward()
        return {
            key: value.grad.clone()
            for key, value in loaded.model.named_parameters()
            if value.grad is not None
        }

    shared, plain = gradients(group_logprobs), gradients(plain_logprobs)
    assert shared.keys() == plain.keys()
    for key, value in plain.items():
        scale = max(1.0, value.abs().max().item())
        assert (shared[key] - value).abs().max().item() < 1e-5 * scale, key
    if name in VISION:
        assert any("vision" in key and value.abs().max() > 0 for key, value in plain.items())


@pytest.mark.pitfall("L1")
@torch.no_grad()
def test_value_i_belongs_to_response_token_i(load):
    """Any split of a sequence into prompt and response gives the same values at the same tokens,
    and they are those of the full softmax."""
    loaded = load("llama")
    ids = np.random.default_rng(3).integers(5, 96, 12)
    logits = loaded.model(torch.from_numpy(ids)[None]).logits[0]
    whole = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(ids[1:, None])).squeeze(-1)
    for split in range(1, len(ids)):
        ((values,),) = group_logprobs(loaded, [TokenGroup(ids[:split], (ids[split:],))])
        assert len(values) == len(ids) - split
        torch.testing.assert_close(values, whole[split - 1 :], atol=1e-4, rtol=0)


@pytest.mark.pitfall("L2")
@torch.no_grad()
def test_shortest_prompt_and_response(load):
    ((values,),) = group_logprobs(load("gpt2"), [TokenGroup(np.array([1]), (np.array([5]),))])
    assert values.shape == (1,)
    with pytest.raises(ValueError, match="never empty"):
        TokenGroup(np.array([], dtype=int), (np.array([5]),))


@pytest.mark.pitfall("L11")
@pytest.mark.parametrize("name", ("gpt2", "llama"))
@torch.no_grad()
def test_alone_equals_batched_with_a_long_neighbour(load, name):
    loaded = load(name)
    short, long = text_groups(shapes=((2, (3,)), (20, (9,))))
    ((alone,),) = group_logprobs(loaded, [short])
    ((batched,), _) = group_logprobs(loaded, [short, long])
    torch.testing.assert_close(alone, batched, atol=1e-4, rtol=0)
    assert batched.isfinite().all()


@torch.no_grad()
def test_padding_never_reaches_beyond_learned_positions(load):
    """GPT-2 has 64 positions; the padding of a full-length sequence must not ask for a 65th."""
    loaded = load("gpt2")
    full, long_response = text_groups(shapes=((60, (4,)), (2, (60,))))
    assert_close(
        group_logprobs(loaded, [full, long_response]), plain_logprobs(loaded, [full, long_response])
    )


@pytest.mark.pitfall("L10")
@pytest.mark.pitfall("L6")
@torch.no_grad()
def test_ids_are_scored_as_sent(load):
    """Ids that text would change: a think block that a template drops, ids whose characters
    another encoding would merge or strip, a BOS in the middle. Nothing is decoded, added, lost."""
    loaded = load("llama")
    tokenizer = build_tokenizer()
    answer = [THINK_END, *tokenizer.encode("answer", add_special_tokens=False)]
    unstable = [BOS, 5, 5, BOS, 5]
    assert tokenizer.encode(tokenizer.decode(unstable, skip_special_tokens=True)) != unstable
    prompt = np.array([BOS, 40])
    responses = tuple(np.array(one) for one in (answer, unstable))
    seen = []
    handle = loaded.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].clone())
    )
    ((first, second),) = group_logprobs(loaded, [TokenGroup(prompt, responses)])
    handle.remove()
    assert (len(first), len(second)) == (len(answer), len(unstable))
    assert seen[0].tolist() == [[BOS, 40]]
    assert seen[1][0, : len(answer) - 1].tolist() == answer[:-1]
    assert seen[1][1, : len(unstable) - 1].tolist() == unstable[:-1]


@torch.no_grad()
def test_slices_of_a_group_share_one_prefix(load):
    loaded = load("llama")
    (group,) = text_groups(shapes=((6, (3, 5, 2)),))
    prefix = prefill(loaded, [group])
    ((one, two),) = prefix_scores(
        loaded, prefix, [TokenGroup(group.prompt_ids, group.responses[:2])]
    )
    ((three,),) = prefix_scores(loaded, prefix, [TokenGroup(group.prompt_ids, group.responses[2:])])
    (whole,) = group_logprobs(loaded, [group])
    assert_close([[part.logprobs_T for part in (one, two, three)]], [whole])


@torch.no_grad()
def test_top_and_named_ids(load):
    loaded = load("llama")
    group = TokenGroup(
        np.array([5, 6]),
        (np.array([7, 8]), np.array([9])),
        (),
        (np.array([[7, 11], [8, 12]]), np.empty((1, 0), dtype=int)),
    )
    ((first, second),) = group_scores(loaded, [group], top_k=3)
    torch.testing.assert_close(first.named_logprobs_TM[:, 0], first.logprobs_T)
    assert second.named_logprobs_TM.shape == (1, 0)
    assert first.top_ids_TK.shape == (2, 3)
    assert (first.top_logprobs_TK.diff(dim=1) <= 0).all()
    full = loaded.model(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(first.top_logprobs_TK[0], full.topk(3).values, atol=1e-4, rtol=0)
    assert first.top_ids_TK[0].tolist() == full.topk(3).indices.tolist()


def test_sliding_windows_take_prompts_of_equal_length_only(load):
    assert pads_prompts(load("llama"))
    assert not pads_prompts(load("mistral"))
    with pytest.raises(ValueError, match="equal lengths"):
        prefill(load("mistral"), text_groups())


def test_a_model_that_disagrees_is_not_shared(load, caplog):
    """Positions that ignore what was asked for: the probe notices."""
    loaded = load("llama")
    rotary = loaded.model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda hidden, position_ids: forward(
        hidden, torch.arange(hidden.shape[1])[None].expand_as(position_ids)
    )
    with caplog.at_level(logging.WARNING):
        assert not check_sharing(loaded)
    assert "differ by" in caplog.text


def test_batch_dependent_frequencies_are_not_shared(load):
    loaded = load("llama")
    assert may_share(loaded)
    loaded.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert not may_share(loaded)


@pytest.mark.parametrize("name", VISION)
def test_a_vision_model_trains_a_step(load, name):
    loaded = load(name)
    groups = image_groups()
    optimiser = torch.optim.SGD(loaded.model.parameters(), lr=1e-3)
    before = flatten(group_logprobs(loaded, groups)).mean()
    (-before).backward()
    optimiser.step()
    with torch.no_grad():
        after = flatten(group_logprobs(loaded, groups)).mean()
    assert after > before


def test_the_probe_has_an_image_where_the_model_sees(load):
    loaded = load("internvl")
    first, second = probe_groups(loaded)
    assert len(first.images) == 1 and not second.images
    assert (first.prompt_ids == IMAGE).sum() == 4
    assert EOS in loaded.eos_ids
