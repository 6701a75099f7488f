"""Prompts through the model once, ready to be continued many times."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from modeling.groups import TokenGroup
from modeling.images import image_inputs
from modeling.load import LoadedModel


@dataclass(frozen=True)
class Prefix:
    """Prompts that went through the model: B rows of P columns, right-padded.

    Attributes:
        cache: keys and values of the prompts. `repeat` copies; whoever extends it owns it.
        mask_BP: int64, 1 at real tokens.
        lengths_B: int64, tokens of each prompt: the position of what comes next.
        last_hidden_BD: hidden state that predicts the first response token.
    """

    cache: Cache
    mask_BP: Tensor
    lengths_B: Tensor
    last_hidden_BD: Tensor

    def repeat(self, counts: Sequence[int]) -> Prefix:
        """Row b `counts[b]` times in a row. Differentiable; this prefix stays as it is."""
        rows = torch.arange(len(counts), device=self.mask_BP.device)
        rows = rows.repeat_interleave(torch.tensor(counts, device=rows.device))
        return self.select(rows)

    def select(self, rows: Tensor) -> Prefix:
        """The rows named (int64), in that order, with a cache of their own."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        cache.reorder_cache(rows)  # type: ignore[arg-type]
        return Prefix(cache, self.mask_BP[rows], self.lengths_B[rows], self.last_hidden_BD[rows])


def prefill(loaded: LoadedModel, groups: Sequence[TokenGroup]) -> Prefix:
    """Run the prompts of the groups, one row each, in one forward pass.

    Raises:
        ValueError: prompts of unequal lengths for a model that `pads_prompts` says cannot.
    """
    lengths = [len(group.prompt_ids) for group in groups]
    if len(set(lengths)) > 1 and not pads_prompts(loaded):
        raise ValueError("this model's prompts must be of equal lengths; see pads_prompts")
    ids_BP, mask_BP = pad([group.prompt_ids for group in groups], loaded.device)
    lengths_B = torch.tensor(lengths, device=loaded.device)
    positions_BP = torch.arange(ids_BP.shape[1], device=loaded.device).expand_as(ids_BP)
    output = loaded.model.base_model(
        input_ids=ids_BP,
        attention_mask=mask_BP,
        position_ids=positions_BP,
        past_key_values=DynamicCache(config=loaded.model.config),
        use_cache=True,
        **multimodal_inputs(loaded, ids_BP, groups),
    )
    if output.past_key_values is None:
        raise ValueError(
            f"{type(loaded.model).__name__} keeps no cache now (gradient checkpointing switches it "
            "off); use plain_logprobs, or switch gradient checkpointing off"
        )
    rows_B = torch.arange(len(groups), device=loaded.device)
    last_hidden_BD = output.last_hidden_state[rows_B, lengths_B - 1]
    return Prefix(output.past_key_values, mask_BP, lengths_B, last_hidden_BD)


def pads_prompts(loaded: LoadedModel) -> bool:
    """Whether prompts of unequal lengths may share a batch.

    Padding lies between a short prompt and its response. Attention masks it, but a sliding window
    counts it: there, only prompts of equal lengths go together.
    """
    layers = DynamicCache(config=loaded.model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def pad(sequences: Sequence[NDArray[np.integer]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-pad to (ids_BT, mask_BT), int64. Padding holds id 0; the mask says what counts."""
    lengths_B = np.array([len(sequence) for sequence in sequences])
    mask_BT = np.less(np.arange(lengths_B.max(initial=0)), lengths_B[:, None])
    ids_BT = np.zeros(mask_BT.shape, dtype=np.int64)
    ids_BT[mask_BT] = np.concatenate(sequences)
    return torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device, torch.int64)


def multimodal_inputs(
    loaded: LoadedModel, ids_BP: Tensor, groups: Sequence[TokenGroup]
) -> dict[str, Tensor]:
    """Pixels of all images in row order, and the token types some families want beside them."""
    if loaded.image_placeholder_id is None:
        return {}
    inputs = image_inputs(loaded, [image for group in groups for image in group.images])
    if inputs:
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in loaded.forward_arguments:
                inputs[name] = torch.eq(ids_BP, loaded.image_placeholder_id).long()
    return inputs
