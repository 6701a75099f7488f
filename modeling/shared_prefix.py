"""Logprobs of prompt groups, the prompt computed once.

Each group's prompt goes through the model once; its key-value cache is repeated for the group's
responses, which run against it together. The head sees response positions only. With gradients
enabled, gradients flow through the repeated cache into the prompt.

Alignment, once and for ever: value i of a response is log p(response[i] | prompt, response[:i]).
The prompt's last position predicts response[0]. `_response_hidden` does that shift for the shared
path and `_plain_hidden` for its reference; packed.py and padded.py do it for theirs and nobody else
shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modeling.groups import TokenGroup
from modeling.load import LoadedModel
from modeling.logprobs import TokenScores, selected_logprobs
from modeling.prefix import Prefix, multimodal_inputs, pad, pads_prompts, prefill


def group_logprobs(
    loaded: LoadedModel,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
) -> list[list[Tensor]]:
    """Per group and response, float32 [tokens] logprobs (nats), by the shared path.

    Args:
        loaded: a model that check_sharing approves of.
        groups: any prompt and response lengths.
        temperature: of the distribution, above 0.
        suppressed_ids: left out of the distribution.
    """
    scores = group_scores(loaded, groups, temperature=temperature, suppressed_ids=suppressed_ids)
    return [[one.logprobs_T for one in group] for group in scores]


def plain_logprobs(
    loaded: LoadedModel,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
) -> list[list[Tensor]]:
    """The same values, each sequence whole and alone: the reference, for any architecture."""
    scores = plain_scores(loaded, groups, temperature=temperature, suppressed_ids=suppressed_ids)
    return [[one.logprobs_T for one in group] for group in scores]


def group_scores(
    loaded: LoadedModel,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
    top_k: int = 0,
) -> list[list[TokenScores]]:
    """group_logprobs with the likeliest ids and the ids the groups name."""
    results: list[list[TokenScores]] = [[] for _ in groups]
    for members in _batches(loaded, groups):
        batch = [groups[index] for index in members]
        prefix = prefill(loaded, batch)
        scores = prefix_scores(
            loaded,
            prefix,
            batch,
            temperature=temperature,
            suppressed_ids=suppressed_ids,
            top_k=top_k,
        )
        for index, one in zip(members, scores, strict=True):
            results[index] = one
    return results


def prefix_scores(
    loaded: LoadedModel,
    prefix: Prefix,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
    top_k: int = 0,
) -> list[list[TokenScores]]:
    """Scores of the groups' responses after a prefix with one row per group.

    Slices of a group can be scored one after the other from the same prefix.
    """
    responses = [response for group in groups for response in group.responses]
    if not responses:
        return [[] for _ in groups]
    repeated = prefix.repeat([len(group.responses) for group in groups])
    hidden_TD, ids_T = _response_hidden(loaded, repeated, responses)
    scores = head_scores(
        loaded,
        hidden_TD,
        ids_T,
        groups,
        temperature=temperature,
        suppressed_ids=suppressed_ids,
        top_k=top_k,
    )
    return cut(scores, groups)


def plain_scores(
    loaded: LoadedModel,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
    top_k: int = 0,
) -> list[list[TokenScores]]:
    """plain_logprobs with the likeliest ids and the ids the groups name."""
    results = []
    for group in groups:
        scores: list[TokenScores] = []
        for index, response in enumerate(group.responses):
            named = group.named_ids[index : index + 1]
            single = replace(group, responses=(response,), named_ids=named)
            hidden_TD, ids_T = _plain_hidden(loaded, single)
            [one] = cut(
                head_scores(
                    loaded,
                    hidden_TD,
                    ids_T,
                    [single],
                    temperature=temperature,
                    suppressed_ids=suppressed_ids,
                    top_k=top_k,
                ),
                [single],
            )
            scores += one
        results.append(scores)
    return results


def _batches(loaded: LoadedModel, groups: Sequence[TokenGroup]) -> list[list[int]]:
    """Indices of groups whose prompts run together."""
    if not groups:
        return []
    if pads_prompts(loaded):
        return [list(range(len(groups)))]
    by_length: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        by_length.setdefault(len(group.prompt_ids), []).append(index)
    return list(by_length.values())


def _response_hidden(
    loaded: LoadedModel, prefix: Prefix, responses: Sequence[NDArray[np.integer]]
) -> tuple[Tensor, Tensor]:
    """Hidden states that predict each response token, and those tokens: [T, D], int64 [T].

    T runs over all tokens of all responses in order; prefix has a row per response.
    """
    ids_BR, mask_BR = pad(responses, loaded.device)
    first_B1D = prefix.last_hidden_BD[:, None]
    # A response's last token predicts nothing that is asked for.
    if ids_BR.shape[1] == 1:
        hidden_BRD = first_B1D
    else:
        inputs_BR = ids_BR[:, :-1]
        lengths_B1 = mask_BR.sum(1, keepdim=True)
        offsets_BR = torch.arange(inputs_BR.shape[1], device=loaded.device).expand_as(inputs_BR)
        # Padding repeats the last position: learned position tables have no row beyond the limit.
        # It stays visible to itself, so that no attention row is ever fully masked.
        positions_BR = prefix.lengths_B[:, None] + offsets_BR.minimum(lengths_B1 - 1)
        output = loaded.model.base_model(
            input_ids=inputs_BR,
            attention_mask=torch.cat([prefix.mask_BP, torch.ones_like(inputs_BR)], dim=1),
            position_ids=positions_BR,
            past_key_values=prefix.cache,
            use_cache=True,
        )
        hidden_BRD = torch.cat([first_B1D, output.last_hidden_state], dim=1)
    real_BR = mask_BR.bool()
    return hidden_BRD[real_BR], ids_BR[real_BR]


def _plain_hidden(loaded: LoadedModel, group: TokenGroup) -> tuple[Tensor, Tensor]:
    """The same of one response, in a forward pass of its own without cache."""
    response = group.responses[0]
    whole = np.concatenate([group.prompt_ids, response[:-1]])
    ids_1T, mask_1T = pad([whole], loaded.device)
    output = loaded.model.base_model(
        input_ids=ids_1T,
        attention_mask=mask_1T,
        use_cache=False,
        **multimodal_inputs(loaded, ids_1T, [group]),
    )
    hidden_TD = output.last_hidden_state[0, len(group.prompt_ids) - 1 :]
    return hidden_TD, torch.from_numpy(response.astype(np.int64)).to(loaded.device)


def head_scores(
    loaded: LoadedModel,
    hidden_TD: Tensor,
    ids_T: Tensor,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
    top_k: int = 0,
    entropy: bool = False,
) -> TokenScores:
    """Head over all response positions of the groups at once, in order; `cut` takes them apart.

    Args:
        loaded: whose head.
        hidden_TD: hidden state that predicts each response token.
        ids_T: int64, those tokens.
        groups: what they are of; says which ids are named. Where responses name unequal numbers of
            ids, the columns beyond are padding.
        temperature, suppressed_ids, top_k, entropy: see selected_logprobs.
    """
    return selected_logprobs(
        hidden_TD,
        loaded.head,
        ids_T,
        temperature=temperature,
        suppressed_ids=suppressed_ids,
        top_k=top_k,
        named_ids_TM=_pad_named(groups, loaded.device),
        entropy=entropy,
    )


def cut(scores: TokenScores, groups: Sequence[TokenGroup]) -> list[list[TokenScores]]:
    """Scores of all response tokens as one entry per group and response."""
    lengths = [len(response) for group in groups for response in group.responses]
    columns = zip(
        _named(groups),
        scores.logprobs_T.split(lengths),
        scores.top_ids_TK.split(lengths),
        scores.top_logprobs_TK.split(lengths),
        scores.named_logprobs_TM.split(lengths),
        strict=True,
    )
    flat = [
        TokenScores(
            logprobs, top_ids, top_logprobs, named[:, : ids.shape[1]], logprobs.new_empty(0)
        )
        for ids, logprobs, top_ids, top_logprobs, named in columns
    ]
    counts = [len(group.responses) for group in groups]
    ends = np.cumsum(counts)
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _named(groups: Sequence[TokenGroup]) -> list[NDArray[np.integer]]:
    """Named ids of every response in order; [1, 0] where a group names none."""
    none = np.empty((1, 0), np.int64)
    return [one for group in groups for one in group.named_ids or (none,) * len(group.responses)]


def _pad_named(groups: Sequence[TokenGroup], device: torch.device) -> Tensor:
    """Named ids of all response tokens as int64 [T, widest]."""
    named = _named(groups)
    lengths = [len(response) for group in groups for response in group.responses]
    width = max((ids.shape[1] for ids in named), default=0)
    ids_TM = np.zeros((sum(lengths), width), dtype=np.int64)
    start = 0
    for ids, length in zip(named, lengths, strict=True):
        ids_TM[start : start + length, : ids.shape[1]] = ids
        start += length
    return torch.from_numpy(ids_TM).to(device)
