"""How one token is chosen: settings, random numbers, inverse CDF. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class UnsupportedSampling(ValueError):
    """Sampling settings that cannot be honoured."""


@dataclass(frozen=True)
class Sampling:
    """What responses are drawn from, and where they end. Equal settings share a batch.

    Attributes:
        max_new_tokens: longest response, at least 1.
        eos_ids: ids that end a response; the one that did is part of it.
        suppressed_ids: leave the distribution before anything else.
        temperature: 0 is greedy.
        top_p: in (0, 1]; 1 keeps every token.
        top_k: 0 keeps every token.
        named_top_k: the likeliest ids to report at each token, whatever was chosen; 0: none.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    named_top_k: int = 0

    def check(self, vocabulary: int, placeholder_id: int | None) -> None:
        """Refuse what cannot be honoured by a model with `vocabulary` ids.

        Raises:
            UnsupportedSampling: naming the setting and its limits.
        """
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UnsupportedSampling(f"temperature {self.temperature} is not finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise UnsupportedSampling(f"top_p {self.top_p} is not in (0, 1]")
        if self.top_k < 0:
            raise UnsupportedSampling(f"top_k {self.top_k} is below 0 (0 keeps every token)")
        if self.max_new_tokens < 1:
            raise UnsupportedSampling(f"max_new_tokens {self.max_new_tokens} is below 1")
        for name, ids in (("eos_ids", self.eos_ids), ("suppressed_ids", self.suppressed_ids)):
            outside = [one for one in ids if not 0 <= one < vocabulary]
            if outside:
                raise UnsupportedSampling(
                    f"{name} has id {outside[0]}; this model's ids lie in [0, {vocabulary})"
                )
        allowed = vocabulary - len(set(self.suppressed_ids))
        if allowed == 0:
            raise UnsupportedSampling(f"suppressed_ids names all {vocabulary} ids")
        if self.named_top_k > allowed:
            raise UnsupportedSampling(
                f"named_top_k {self.named_top_k} exceeds the {allowed} ids that are not suppressed "
                "(trainer.loss.top_k)"
            )
        if placeholder_id is not None and placeholder_id not in self.suppressed_ids:
            raise UnsupportedSampling(
                f"suppressed_ids lacks the image placeholder (id {placeholder_id}); a response "
                "that holds it cannot be scored. Add it, for behaviour, old and new logprobs alike"
            )


def uniforms(seed: int, sample: int, count: int) -> NDArray[np.float64]:
    """The first `count` random numbers in [0, 1) of sample number `sample` of a task.

    They depend on (seed, sample) alone, both below 2^64.
    """
    key = np.array([seed, sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose(
    logits_BA: Tensor, uniforms_B: Tensor, *, temperature: float, top_p: float, top_k: int
) -> Tensor:
    """One column a row by inverse CDF, int64 [B].

    top_k is applied first; top_p keeps the fewest likeliest columns whose share of what top_k left
    reaches it.

    Args:
        logits_BA: float32, of the columns that may be chosen.
        uniforms_B: float64 in [0, 1).
        temperature: 0: the likeliest column.
    """
    if temperature == 0:
        return logits_BA.argmax(-1)
    if temperature != 1:
        # The largest becomes 0, so that dividing cannot overflow.
        logits_BA = (logits_BA - logits_BA.amax(-1, keepdim=True)) / temperature
    probs_BA = logits_BA.softmax(-1)
    columns = probs_BA.shape[-1]
    if top_p == 1 and not 0 < top_k < columns:
        cdf_BA = probs_BA.cumsum(-1, dtype=torch.float64)
        return _invert(cdf_BA, uniforms_B, cdf_BA[:, -1], torch.tensor(columns - 1))
    probs_BA, order_BA = probs_BA.sort(dim=-1, descending=True, stable=True)
    cdf_BA = probs_BA.cumsum(-1, dtype=torch.float64)
    most = min(top_k or columns, columns)
    wanted_B = top_p * cdf_BA[:, most - 1]
    before_BA = cdf_BA - probs_BA
    last_B = (before_BA < wanted_B[:, None]).sum(-1).clamp(1, most) - 1
    mass_B = cdf_BA.gather(-1, last_B[:, None]).squeeze(-1)
    ranks_B = _invert(cdf_BA, uniforms_B, mass_B, last_B)
    return order_BA.gather(-1, ranks_B[:, None]).squeeze(-1)


def _invert(cdf_BA: Tensor, uniforms_B: Tensor, mass_B: Tensor, last_B: Tensor) -> Tensor:
    """First column whose CDF exceeds uniform x mass; columns without mass are passed over."""
    targets_B1 = (uniforms_B * mass_B)[:, None]
    found_B = torch.searchsorted(cdf_BA, targets_B1, right=True).squeeze(-1)
    # uniform x mass may round up to the mass itself.
    return found_B.minimum(last_B.to(found_B.device))
