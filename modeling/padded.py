"""Logprobs of prompt groups with every sequence whole in a row of its own, padded on the right.

Prompts, and their images, are computed again for every sample: the plain way, for architectures
that admit nothing better and as what the packed way is compared with. One forward pass a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from modeling.groups import TokenGroup
from modeling.load import LoadedModel
from modeling.logprobs import TokenScores
from modeling.prefix import multimodal_inputs, pad
from modeling.shared_prefix import head_scores


def padded_scores(
    loaded: LoadedModel,
    groups: Sequence[TokenGroup],
    *,
    suppressed_ids: Sequence[int] = (),
    entropy: bool = False,
) -> TokenScores:
    """Scores of every response token at temperature 1, in order; see packed_scores."""
    rows = [
        (replace(group, responses=(response,), named_ids=()), response)
        for group in groups
        for response in group.responses
    ]
    ids_BT, mask_BT = pad(
        [np.concatenate([group.prompt_ids, response[:-1]]) for group, response in rows],
        loaded.device,
    )
    output = loaded.model.base_model(
        input_ids=ids_BT,
        attention_mask=mask_BT,
        use_cache=False,
        **multimodal_inputs(loaded, ids_BT, [group for group, _ in rows]),
    )
    hidden_ND = torch.cat(
        [
            output.last_hidden_state[index, len(group.prompt_ids) - 1 :][: len(response)]
            for index, (group, response) in enumerate(rows)
        ]
    )
    targets_N = torch.from_numpy(
        np.concatenate([response for _, response in rows]).astype(np.int64)
    )
    return head_scores(
        loaded,
        hidden_ND,
        targets_N.to(loaded.device),
        groups,
        suppressed_ids=suppressed_ids,
        entropy=entropy,
    )
