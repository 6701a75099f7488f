"""Logprobs of prompt groups packed into rows, one forward pass whatever their lengths.

A row holds several groups: each group's prompt once, then its responses one after the other. An
attention mask lets a response see its prompt and itself; its positions continue the prompt's. One
pass a call, the same on every process, is also what sharded weights want: each pass gathers them.

Alignment as in modeling/shared_prefix.py: the prompt's last position predicts response[0].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from modeling.groups import TokenGroup
from modeling.load import LoadedModel
from modeling.logprobs import TokenScores
from modeling.prefix import multimodal_inputs
from modeling.shared_prefix import head_scores

# Attention costs a row its length squared, so rows stay short; a longer group gets its own.
ROW_TOKENS = 512
PADDING = -1


@dataclass(frozen=True)
class Packed:
    """R rows of T positions, int64.

    Attributes:
        order: indices of the groups as the rows hold them.
        ids_RT: token ids, 0 in the padding. A response's last token predicts nothing and is left
            out.
        positions_RT: within prompt + response.
        groups_RT: the group a position belongs to; PADDING at a row's end.
        segments_RT: 0 in a prompt; a group's responses count from 1.
        sources_N: for every response token, groups in their given order, the position that predicts
            it in the flattened rows.
        targets_N: those tokens.
    """

    order: list[int]
    ids_RT: NDArray[np.int64]
    positions_RT: NDArray[np.int64]
    groups_RT: NDArray[np.int64]
    segments_RT: NDArray[np.int64]
    sources_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]


def packed_tokens(group: TokenGroup) -> int:
    """Positions a group takes in a row."""
    return len(group.prompt_ids) + sum(len(response) - 1 for response in group.responses)


def pack(groups: Sequence[TokenGroup], row_tokens: int = ROW_TOKENS) -> Packed:
    """Lay groups out in rows of at most `row_tokens`, or as many as the largest group has."""
    sizes = [packed_tokens(group) for group in groups]
    rows = _first_fit(sizes, max(row_tokens, *sizes))
    width = max(sum(sizes[index] for index in row) for row in rows)
    shape = (len(rows), width)
    ids, positions, segments = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    owners = np.full(shape, PADDING, dtype=np.int64)
    sources: list[list[NDArray[np.int64]]] = [[] for _ in groups]
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            group = groups[index]
            prompt = len(group.prompt_ids)
            last = number * width + start + prompt - 1
            pieces = [(group.prompt_ids, 0)]
            pieces += [(response[:-1], prompt) for response in group.responses]
            for segment, (piece, first) in enumerate(pieces):
                end = start + len(piece)
                ids[number, start:end] = piece
                positions[number, start:end] = np.arange(first, first + len(piece))
                owners[number, start:end] = index
                segments[number, start:end] = segment
                if segment:
                    own = np.arange(start, end) + number * width
                    sources[index].append(np.concatenate([[last], own]))
                start = end
    return Packed(
        order=[index for row in rows for index in row],
        ids_RT=ids,
        positions_RT=positions,
        groups_RT=owners,
        segments_RT=segments,
        sources_N=np.concatenate([one for group in sources for one in group]),
        targets_N=np.concatenate([one for group in groups for one in group.responses]).astype(
            np.int64
        ),
    )


def visible(packed: Packed, device: torch.device, window: int | None = None) -> Tensor:
    """Which positions see which: bool [R, 1, T, T], query by key.

    Args:
        packed: the layout.
        device: of the mask.
        window: positions a layer looks back at most, itself included; None: all.
    """
    groups_RT, segments_RT, positions_RT = (
        torch.from_numpy(one).to(device)
        for one in (packed.groups_RT, packed.segments_RT, packed.positions_RT)
    )
    mask_RTT = groups_RT[:, :, None] == groups_RT[:, None]
    # A prompt is common to all its responses; other responses are not there. Padding sees padding:
    # a row of the mask that is all false would give NaN.
    mask_RTT &= (segments_RT == 0)[:, None] | (segments_RT[:, :, None] == segments_RT[:, None])
    back_RTT = positions_RT[:, :, None] - positions_RT[:, None]
    mask_RTT &= back_RTT >= 0
    if window is not None:
        mask_RTT &= back_RTT < window
    return mask_RTT[:, None]


def packed_scores(
    loaded: LoadedModel,
    groups: Sequence[TokenGroup],
    *,
    suppressed_ids: Sequence[int] = (),
    entropy: bool = False,
) -> TokenScores:
    """Scores of every response token at temperature 1, groups and responses in order.

    Cost: one pass over the tokens, prompts once, and attention over [T, T] of each row.

    Args:
        loaded: a model for which agrees_with_plain approves of this path.
        groups: any lengths; one at least, each with a response.
        suppressed_ids: left out of the distribution.
        entropy: also the distribution's entropy at each position.
    """
    packed = pack(groups)
    ids_RT, positions_RT, sources_N, targets_N = (
        torch.from_numpy(one).to(loaded.device)
        for one in (packed.ids_RT, packed.positions_RT, packed.sources_N, packed.targets_N)
    )
    output = loaded.model.base_model(
        input_ids=ids_RT,
        attention_mask=_masks(loaded, packed),
        position_ids=positions_RT,
        use_cache=False,
        **multimodal_inputs(loaded, ids_RT, [groups[index] for index in packed.order]),
    )
    hidden_ND = output.last_hidden_state.flatten(0, 1)[sources_N]
    return head_scores(
        loaded, hidden_ND, targets_N, groups, suppressed_ids=suppressed_ids, entropy=entropy
    )


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices by row: the largest first, each into the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        fits = next((row for row, left in enumerate(room) if left >= sizes[index]), None)
        if fits is None:
            rows.append([])
            room.append(capacity)
            fits = len(rows) - 1
        rows[fits].append(index)
        room[fits] -= sizes[index]
    return rows


def _masks(loaded: LoadedModel, packed: Packed) -> Tensor | dict[str, Tensor]:
    """What the model wants as attention_mask: one mask, or one for each kind of its layers."""
    config = loaded.model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=loaded.model.config).layers
    sliding = [isinstance(layer, DynamicSlidingWindowLayer) for layer in layers]
    if not any(sliding):
        return visible(packed, loaded.device)
    local = visible(packed, loaded.device, window=int(config.sliding_window))
    if all(sliding):
        return local
    return {"full_attention": visible(packed, loaded.device), "sliding_attention": local}
