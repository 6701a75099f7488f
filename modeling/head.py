"""From the last hidden state to float32 logits, as the model itself does it.

Some families bend their logits after the output projection: Gemma caps them, Cohere and Falcon-H1
multiply, Granite divides. The projection alone would then be silently wrong, so the bend is read
from the config and the result compared with the model's own logits at load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Largest deviation from the model's own logits, relative to the largest logit.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
PROBE_TOKENS = 8


class UnsupportedModel(ValueError):
    """A model whose logprobs cannot be computed faithfully here."""


@dataclass(frozen=True)
class Head:
    """Hidden states [..., D] -> float32 logits [..., V].

    Attributes:
        projection: the model's output embedding.
        scale: logits are multiplied by it.
        softcap: then bounded as softcap * tanh(logits / softcap); None: unbounded.
    """

    projection: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        logits_TV = self.projection(hidden_TD).float()
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        if self.softcap is not None:
            logits_TV = self.softcap * torch.tanh(logits_TV / self.softcap)
        return logits_TV


def find_head(model: PreTrainedModel, allowed_ids: list[int]) -> Head:
    """The head that reproduces the model's own logits on a few tokens.

    Args:
        model: a causal language model, in evaluation mode.
        allowed_ids: text ids to probe with, one at least.

    Raises:
        UnsupportedModel: no output embedding, or logits that no known bend explains.
    """
    projection = model.get_output_embeddings()
    if not isinstance(projection, nn.Linear):
        raise UnsupportedModel(
            f"{type(model).__name__} has no linear output embedding to score with"
        )
    ids = (allowed_ids * PROBE_TOKENS)[:PROBE_TOKENS]
    ids_BT = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        wanted = model(input_ids=ids_BT, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        heads = _candidates(model, projection)
        scored = [(_deviation(head(hidden), wanted), head) for head in heads]
    deviation, head = min(scored, key=lambda pair: pair[0])
    limit = TOLERANCE[model.dtype]
    if not deviation <= limit:
        raise UnsupportedModel(
            f"{type(model).__name__} changes its logits after the output projection in a way that "
            f"modeling/head.py does not know: they deviate by {deviation:.2g} of the largest logit "
            f"(limit {limit}). Teach Head about it."
        )
    return head


def _candidates(model: PreTrainedModel, projection: nn.Linear) -> list[Head]:
    """Heads that the config allows. The cap is never left out where one is configured: on small
    logits the probe could not tell."""
    config = model.config.get_text_config(decoder=True)
    softcap = getattr(config, "final_logit_softcapping", None)
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value:
            # The same name multiplies in one family and divides in another.
            scales += [float(value), 1.0 / float(value)]
    return [Head(projection, scale, softcap) for scale in scales]


def _deviation(logits: Tensor, wanted: Tensor) -> float:
    if logits.shape != wanted.shape:
        return float("inf")
    return float((logits - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
