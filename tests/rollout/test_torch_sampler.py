"""Batched sampling agrees with plain recomputation, with running alone, and with a cold engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from modeling.groups import TokenGroup
from modeling.head import Head
from modeling.images import expand_placeholders
from modeling.load import load_model, load_weights
from modeling.shared_prefix import plain_logprobs
from services.rollout.engines.torch import SampleRequest, generate, probe
from services.rollout.sampling import Sampling, UnsupportedSampling
from tests.tiny_models import (
    BOS,
    EOS,
    IMAGE,
    INTERNVL_FEATURES,
    PAD,
    draw_image,
    make_llama,
)

ALL = ("llama", "gpt2", "mistral", "gemma2", "llava", "internvl")
VISION = ("llava", "internvl")
# A fifth of the ids end a response, so that rows leave a batch at different steps.
ENDS = (EOS, *range(10, 30))
SUPPRESSED = (PAD, IMAGE, 40, 41)
SETTINGS = Sampling(16, ENDS, SUPPRESSED)


def text_request(seed, tokens, samples=2):
    prompt = np.random.default_rng(seed).integers(5, 96, tokens)
    return SampleRequest(prompt, samples, seed)


def image_request(seed, tokens, samples=2):
    text = text_request(seed, tokens, samples)
    ids = expand_placeholders([BOS, IMAGE, *text.prompt_ids], [INTERNVL_FEATURES], IMAGE)
    return replace(text, prompt_ids=ids, images=(draw_image(seed),))


def requests_for(name, count):
    """Prompts of 1 to 12 tokens; every second has an image if the model takes them."""
    make = [text_request, image_request if name in VISION else text_request]
    return [make[seed % 2](seed, 1 + seed * 7 % 12) for seed in range(count)]


def all_ids(results):
    return [[one.ids.tolist() for one in group] for group in results]


def with_bias(loaded, token, value):
    """The model with `value` added to one id's logit."""
    old = loaded.head.projection
    projection = torch.nn.Linear(old.in_features, old.out_features)
    with torch.no_grad():
        projection.weight.copy_(old.weight)
        projection.bias.zero_()
        projection.bias[token] = value
    return replace(loaded, head=Head(projection))


@pytest.mark.parametrize("name", ALL)
def test_behaviour_logprobs_are_recomputed_plainly(load, name):
    """Whatever the temperature and truncation: they are of the whole distribution at 1."""
    loaded = load(name)
    requests = requests_for(name, 5)
    sampling = replace(SETTINGS, temperature=0.7, top_p=0.9, top_k=50)
    results = generate(loaded, requests, sampling)
    groups = [
        TokenGroup(request.prompt_ids, tuple(one.ids for one in results[index]), request.images)
        for index, request in enumerate(requests)
    ]
    with torch.no_grad():
        expected = plain_logprobs(loaded, groups, suppressed_ids=SUPPRESSED)
    for ours, theirs in zip(results, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs.dtype == np.float32 and one.ids.dtype == np.int32
            np.testing.assert_allclose(one.logprobs, other.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llava"])
def test_the_likeliest_ids_are_named_at_every_token(load, name):
    """Whatever was chosen, and in order; as the model alone would name them."""
    loaded = load(name)
    request = text_request(3, 6)
    sampling = replace(SETTINGS, temperature=1.3, top_k=4, named_top_k=5)
    for one in generate(loaded, [request], sampling)[0]:
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, one.ids]))
        with torch.no_grad():
            logits_TV = loaded.model(ids[None]).logits[0, 5:-1].clone()
        logits_TV[:, list(SUPPRESSED)] = -torch.inf
        assert one.named_ids.dtype == np.int32
        assert one.named_ids.tolist() == logits_TV.topk(5).indices.tolist()
    (plain, _) = generate(loaded, [request], SETTINGS)[0]
    assert plain.named_ids.shape == (len(plain.ids), 0)


@pytest.mark.pitfall("L11")
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "llava"])
def test_alone_is_as_in_a_batch_of_20(load, name):
    loaded = load(name)
    requests = requests_for(name, 20)
    together = generate(loaded, requests, SETTINGS)
    alone = [generate(loaded, [request], SETTINGS)[0] for request in requests]
    assert all_ids(together) == all_ids(alone)
    assert len({len(one.ids) for group in together for one in group}) > 5


def test_a_sample_does_not_depend_on_how_many_there_are(load):
    loaded = load("llama")
    few, many = (generate(loaded, [text_request(1, 5, n)], SETTINGS)[0] for n in (2, 7))
    assert all_ids([few]) == all_ids([many[:2]])
    assert len({one.ids.tobytes() for one in many}) >= 5


def test_greedy_is_the_likeliest_id_at_each_step(load):
    loaded = load("gpt2")
    request = text_request(3, 6, samples=1)
    sampling = replace(SETTINGS, temperature=0.0, eos_ids=())
    ids = request.prompt_ids
    with torch.no_grad():
        for _ in range(sampling.max_new_tokens):
            logits_V = loaded.model(torch.from_numpy(ids)[None]).logits[0, -1]
            logits_V[list(SUPPRESSED)] = -torch.inf
            ids = np.append(ids, int(logits_V.argmax()))
    (written,) = generate(loaded, [request], sampling)[0]
    assert written.ids.tolist() == ids[6:].tolist()


def test_first_tokens_follow_the_model(load):
    loaded = load("llama")
    samples = 4000
    request = text_request(5, 4, samples)
    drawn = generate(loaded, [request], Sampling(1, ENDS, SUPPRESSED))[0]
    counts_V = np.bincount([one.ids[0] for one in drawn], minlength=96)
    with torch.no_grad():
        logits_V = loaded.model(torch.from_numpy(request.prompt_ids)[None]).logits[0, -1]
        logits_V[list(SUPPRESSED)] = -torch.inf
    probs_V = logits_V.softmax(-1).numpy()
    deviation_V = np.abs(counts_V - samples * probs_V)
    # Five standard deviations, plus one count for the discreteness of rare ids.
    assert (deviation_V <= 5 * np.sqrt(samples * probs_V * (1 - probs_V)) + 1).all()


def test_responses_end_with_an_eos_id_or_at_the_limit(load):
    loaded = load("llama")
    rows = [one for group in generate(loaded, requests_for("llama", 20), SETTINGS) for one in group]
    assert {one.stopped for one in rows} == {True, False}
    for one in rows:
        assert not set(one.ids[:-1].tolist()) & set(ENDS)
        assert one.stopped == (one.ids[-1] in ENDS)
        assert one.stopped or len(one.ids) == SETTINGS.max_new_tokens
    endless = generate(loaded, [text_request(0, 3)], replace(SETTINGS, eos_ids=()))[0]
    assert [len(one.ids) for one in endless] == [16, 16]
    at_once = generate(loaded, [text_request(0, 3)], replace(SETTINGS, eos_ids=tuple(range(96))))
    assert [(len(one.ids), one.stopped) for one in at_once[0]] == [(1, True)] * 2


@pytest.mark.pitfall("L15")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_placeholder_is_never_sampled_however_likely(load, temperature):
    loaded = with_bias(load("llava"), IMAGE, 100.0)
    requests = [image_request(seed, 4, samples=8) for seed in range(4)]
    sampling = replace(SETTINGS, temperature=temperature)
    results = generate(loaded, requests, sampling)
    assert not any(IMAGE in one.ids for group in results for one in group)
    # Its mass is spread over the others, as the trainer and its losses see it.
    assert all(np.isfinite(one.logprobs).all() for group in results for one in group)
    with pytest.raises(UnsupportedSampling, match="image placeholder"):
        generate(loaded, requests, replace(sampling, suppressed_ids=(PAD,)))


def test_a_likely_id_that_is_not_suppressed_is_sampled(load):
    """The other half of L15: the bias above does what it should."""
    results = generate(with_bias(load("llama"), 50, 100.0), [text_request(0, 4)], SETTINGS)
    assert {token for one in results[0] for token in one.ids.tolist()} == {50}


@pytest.mark.pitfall("G12")
def test_after_a_swap_as_from_a_cold_engine(load, folders, tmp_path):
    other = make_llama(tmp_path / "other", seed=1)
    requests = requests_for("llama", 4)
    loaded = load("llama")
    before = generate(loaded, requests, SETTINGS)
    load_weights(loaded.model, other)
    after = generate(loaded, requests, SETTINGS)
    cold = generate(load_model(other), requests, SETTINGS)
    assert all_ids(after) == all_ids(cold) != all_ids(before)
    for ours, theirs in zip(after, cold, strict=True):
        for one, same in zip(ours, theirs, strict=True):
            assert np.array_equal(one.logprobs, same.logprobs)


def test_weights_that_answer_nan_are_no_response(load):
    loaded = load("llama")
    probe(loaded)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="answers NaN"):
        generate(loaded, [text_request(0, 3)], SETTINGS)
    with pytest.raises(FloatingPointError):
        probe(loaded)


def test_on_step_counts_tokens_and_can_end_the_generation(load):
    loaded = load("llama")
    written: list[int] = []
    results = generate(loaded, requests_for("llama", 6), SETTINGS, written.append)
    assert sum(written) == sum(len(one.ids) for group in results for one in group)
    assert written[0] == 12

    class Enough(Exception):
        pass

    def stop_at_once(tokens):
        raise Enough

    with pytest.raises(Enough):
        generate(loaded, requests_for("llama", 6), SETTINGS, stop_at_once)


def test_nothing_to_do(load):
    assert generate(load("llama"), [], SETTINGS) == []
