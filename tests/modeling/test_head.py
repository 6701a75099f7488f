"""Logits bent after the projection are reproduced, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

from modeling.head import UnsupportedModel, find_head
from tests.tiny_models import llama_config

IDS = [5, 6, 7]


def small(config_class, **changes):
    settings = {**llama_config().to_dict(), **changes}
    for name in ("architectures", "model_type", "transformers_version", "head_dim"):
        settings.pop(name, None)
    return config_class(**settings)


@pytest.mark.parametrize(
    ("config_class", "model_class", "change", "scale"),
    (
        (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}, 0.25),
        (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0}, 0.125),
    ),
)
def test_scaled_logits(config_class, model_class, change, scale):
    torch.manual_seed(0)
    model = model_class(small(config_class, **change)).eval()
    assert find_head(model, IDS).scale == scale


def test_capped_logits(load):
    loaded = load("gemma2")
    assert loaded.head.softcap == 2.0
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        hidden = loaded.model.base_model(ids).last_hidden_state
        wanted = loaded.model(ids).logits
        assert wanted.abs().max() <= 2.0
        torch.testing.assert_close(loaded.head(hidden), wanted)
        assert (loaded.head.projection(hidden) - wanted).abs().max() > 0.01


def test_an_unknown_bend_is_refused(load):
    model = load("llama").model
    forward = model.forward

    def bent(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.sin()
        return output

    model.forward = bent
    with pytest.raises(UnsupportedModel, match=r"head\.py"):
        find_head(model, IDS)
