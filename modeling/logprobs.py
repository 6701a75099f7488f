"""Logprobs of chosen ids without ever holding a [tokens, vocabulary] tensor.

4096 tokens of a 151,936-word vocabulary would be 2.3 GiB of float32; here the head is applied to a
chunk of positions at a time, and recomputed chunk by chunk in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modeling.head import Head

# float32 values of a chunk of logits: 64 MiB.
CHUNK_VALUES = 2**24


@dataclass(frozen=True)
class TokenScores:
    """Logprobs (nats, float32) at T positions.

    Attributes:
        logprobs_T: of the ids that were chosen.
        top_ids_TK, top_logprobs_TK: int64 and float32, the K likeliest in order; K may be 0.
        named_logprobs_TM: of M further ids a position; M may be 0.
        entropy_T: of the distribution, nats, without gradient; empty unless asked for.
    """

    logprobs_T: Tensor
    top_ids_TK: Tensor
    top_logprobs_TK: Tensor
    named_logprobs_TM: Tensor
    entropy_T: Tensor


def selected_logprobs(
    hidden_TD: Tensor,
    head: Head,
    ids_T: Tensor,
    *,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
    top_k: int = 0,
    named_ids_TM: Tensor | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """log-softmax(head(hidden) / temperature) at the ids asked for, differentiable.

    Args:
        hidden_TD: last hidden states; position t predicts ids_T[t].
        ids_T: int64, below the vocabulary.
        temperature: above 0.
        suppressed_ids: leave the distribution before it is normalised; one that is asked for
            anyway gets -inf.
        top_k: also return the likeliest ids. No gradient flows through them.
        named_ids_TM: int64, further ids a position; differentiable.
        entropy: also the entropy at each position, one more pass over the logits.
        chunk_tokens: positions whose logits exist at once; None: as many as 64 MiB hold.

    Raises:
        ValueError: a temperature that is not positive and finite.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature} is not positive and finite")
    if named_ids_TM is None:
        named_ids_TM = ids_T.new_empty((len(ids_T), 0))
    vocabulary = head.projection.out_features
    chunk = chunk_tokens or max(1, CHUNK_VALUES // vocabulary)
    suppressed = torch.tensor(sorted(suppressed_ids), dtype=torch.int64, device=ids_T.device)
    # One chunk's logits may be kept for the backward pass; more than one are recomputed.
    recompute = torch.is_grad_enabled() and len(ids_T) > chunk

    def score(hidden: Tensor, ids: Tensor, named: Tensor) -> tuple[Tensor, ...]:
        return _score_chunk(head, hidden, ids, named, temperature, suppressed, top_k, entropy)

    parts = []
    for start in range(0, max(1, len(ids_T)), chunk):
        rows = slice(start, start + chunk)
        arguments = (hidden_TD[rows], ids_T[rows], named_ids_TM[rows])
        if recompute:
            parts.append(checkpoint(score, *arguments, use_reentrant=False))
        else:
            parts.append(score(*arguments))
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score_chunk(
    head: Head,
    hidden_TD: Tensor,
    ids_T: Tensor,
    named_ids_TM: Tensor,
    temperature: float,
    suppressed: Tensor,
    top_k: int,
    entropy: bool,
) -> tuple[Tensor, ...]:
    logits_TV = head(hidden_TD)
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    if len(suppressed):
        logits_TV = logits_TV.index_fill(-1, suppressed, -torch.inf)
    normaliser_T = torch.logsumexp(logits_TV, dim=-1)
    logprobs_T = logits_TV.gather(-1, ids_T[:, None]).squeeze(-1) - normaliser_T
    named_logprobs_TM = logits_TV.gather(-1, named_ids_TM) - normaliser_T[:, None]
    with torch.no_grad():
        top_logits_TK, top_ids_TK = logits_TV.topk(top_k, dim=-1)
        top_logprobs_TK = top_logits_TK - normaliser_T[:, None]
        entropy_T = _entropy(logits_TV, normaliser_T) if entropy else normaliser_T.new_empty(0)
    return logprobs_T, top_ids_TK, top_logprobs_TK, named_logprobs_TM, entropy_T


def _entropy(logits_TV: Tensor, normaliser_T: Tensor) -> Tensor:
    """-sum p log p. A suppressed id has p = 0 and contributes nothing."""
    logprobs_TV = logits_TV - normaliser_T[:, None]
    return -(logprobs_TV.exp() * logprobs_TV.clamp_min(torch.finfo(torch.float32).min)).sum(-1)
