"""The engine in this process: slices, fallbacks, proof of life."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modeling.groups import TokenGroup
from modeling.load import load_model
from modeling.shared_prefix import plain_logprobs
from services.teacher.call import Options
from services.teacher.engines.torch import TorchEngine
from services.teacher.settings import TeacherSettings
from tests.tiny_models import make_mistral

OPTIONS = Options(temperature=1.0, top_k=2)


def groups():
    random = np.random.default_rng(5)
    return [
        TokenGroup(
            random.integers(5, 96, prompt), tuple(random.integers(5, 96, n) for n in responses)
        )
        for prompt, responses in ((9, (3, 30, 1, 12)), (20, (2,)), (4, (6, 6)))
    ]


def scored(engine):
    return {key: one for batch in engine.score(groups(), OPTIONS) for key, one in batch.items()}


@pytest.fixture(scope="module")
def reference(llama_folder):
    with torch.no_grad():
        values = plain_logprobs(load_model(llama_folder), groups())
    return {
        (index, row): one.numpy()
        for index, group in enumerate(values)
        for row, one in enumerate(group)
    }


@pytest.mark.pitfall("L4")
@pytest.mark.parametrize("budget", (1, 40, 10_000))
@pytest.mark.parametrize("shares", (True, False))
def test_budget_and_fallback_change_nothing(llama_folder, reference, budget, shares):
    engine = TorchEngine(TeacherSettings(model=str(llama_folder), max_batch_tokens=budget))
    engine.card.shares_prompts = shares
    found = scored(engine)
    assert found.keys() == reference.keys()
    for key, one in found.items():
        np.testing.assert_allclose(one.logprobs, reference[key], atol=1e-4)
        assert one.top_ids.shape == one.top_logprobs.shape == (len(reference[key]), 2)


def test_a_long_group_computes_its_prompt_once(llama_folder):
    engine = TorchEngine(TeacherSettings(model=str(llama_folder), max_batch_tokens=40))
    lengths = []
    handle = engine._loaded.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    list(engine.score(groups()[:1], OPTIONS))
    handle.remove()
    # The prompt of 9 once, then responses of 1 and 3, 12 and 30 tokens but their last.
    assert lengths == [9, 2, 11, 29]


def test_sliding_windows_are_scored_right(tmp_path):
    folder = make_mistral(tmp_path)
    engine = TorchEngine(TeacherSettings(model=str(folder)))
    assert engine.card.shares_prompts
    with torch.no_grad():
        wanted = plain_logprobs(load_model(folder), groups())
    for (index, row), one in scored(engine).items():
        np.testing.assert_allclose(one.logprobs, wanted[index][row].numpy(), atol=1e-4)


@pytest.mark.pitfall("G8")
def test_an_engine_that_answers_nan_fails_its_probe(llama_folder):
    engine = TorchEngine(TeacherSettings(model=str(llama_folder)))
    engine.probe()
    with torch.no_grad():
        engine._loaded.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="NaN"):
        engine.probe()
