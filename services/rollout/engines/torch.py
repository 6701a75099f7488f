"""Batched sampling with the model's own cache: prompts once, then all responses token by token.

What sample i of a request becomes depends on its prompt, the settings and (seed, i), not on what it
is batched with (but for rounding: a random number that falls within 1e-7 of a boundary between two
ids may fall on the other side).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modeling.groups import TokenGroup
from modeling.load import LoadedModel
from modeling.prefix import Prefix, pads_prompts, prefill
from services.rollout.sampling import Sampling, choose, uniforms


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A prompt, and how many responses to write.

    Attributes:
        prompt_ids: int [prompt_tokens], at least one, image placeholders expanded. With
            max_new_tokens it fits loaded.max_sequence_tokens.
        samples: responses to write.
        seed: sample i draws from (seed, i) alone.
        images: encoded, in the order of their placeholders.
    """

    prompt_ids: NDArray[np.integer]
    samples: int
    seed: int
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, eq=False)
class Sampled:
    """A response of n tokens, the id that ended it included.

    Attributes:
        ids: int32 [n].
        logprobs: float32 [n] nats, under the untruncated distribution at temperature 1 without the
            suppressed ids.
        named_ids: int32 [n, named_top_k], the likeliest ids of that distribution, likeliest first.
        stopped: it ended with an EOS id; else max_new_tokens ended it.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    named_ids: NDArray[np.int32]
    stopped: bool


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    requests: Sequence[SampleRequest],
    sampling: Sampling,
    on_step: Callable[[int], None] | None = None,
) -> list[list[Sampled]]:
    """Per request, its samples in order.

    Args:
        loaded: a model that modeling.sharing.check_sharing approves of.
        requests: all with the same settings; they run together.
        sampling: the settings.
        on_step: called after each token position with the number of response tokens just written.
            Whatever it raises ends the generation.

    Raises:
        UnsupportedSampling: see Sampling.check.
        FloatingPointError: the model answers NaN.
        RuntimeError and others: whatever torch raises.
    """
    vocabulary = loaded.head.projection.out_features
    sampling.check(vocabulary, loaded.image_placeholder_id)
    results: list[list[Sampled]] = [[] for _ in requests]
    for members in _batches(loaded, requests):
        batch = [requests[index] for index in members]
        prompts = prefill(loaded, [TokenGroup(one.prompt_ids, (), one.images) for one in batch])
        prefix = prompts.repeat([one.samples for one in batch])
        numbers = [
            uniforms(one.seed, sample, sampling.max_new_tokens)
            for one in batch
            for sample in range(one.samples)
        ]
        uniforms_BT = torch.from_numpy(np.stack(numbers)).to(loaded.device)
        rows = iter(_decode(loaded, prefix, uniforms_BT, sampling, on_step))
        for index, one in zip(members, batch, strict=True):
            results[index] = [next(rows) for _ in range(one.samples)]
    return results


def probe(loaded: LoadedModel) -> None:
    """Write one token: proof that the engine still works.

    Raises:
        FloatingPointError, RuntimeError: it does not.
    """
    placeholder = loaded.image_placeholder_id
    suppressed = () if placeholder is None else (placeholder,)
    first_id = next(one for one in range(loaded.embedding_rows) if one not in suppressed)
    request = SampleRequest(np.array([first_id]), samples=1, seed=0)
    generate(loaded, [request], Sampling(1, loaded.eos_ids, suppressed))


def _batches(loaded: LoadedModel, requests: Sequence[SampleRequest]) -> list[list[int]]:
    """Indices of requests whose prompts run together."""
    if not requests or pads_prompts(loaded):
        return [list(range(len(requests)))] if requests else []
    by_length: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        by_length.setdefault(len(request.prompt_ids), []).append(index)
    return list(by_length.values())


def _decode(
    loaded: LoadedModel,
    prefix: Prefix,
    uniforms_BT: Tensor,
    sampling: Sampling,
    on_step: Callable[[int], None] | None,
) -> list[Sampled]:
    """One response for each of the prefix's B rows; uses the prefix up.

    R of the B rows are still in the batch: rows that have ended stay until they are half of it.
    """
    device = loaded.device
    rows, steps = uniforms_BT.shape
    # Suppressed ids are no columns at all: nothing downstream can choose them or count their mass.
    is_allowed_V = torch.ones(loaded.head.projection.out_features, dtype=torch.bool)
    is_allowed_V[list(sampling.suppressed_ids)] = False
    allowed_A = is_allowed_V.nonzero().squeeze(-1).to(device)
    ends_A = torch.isin(allowed_A, torch.tensor(sampling.eos_ids, dtype=torch.int64, device=device))

    ids_BT = torch.zeros((rows, steps), dtype=torch.int64, device=device)
    logprobs_BT = torch.zeros((rows, steps), dtype=torch.float32, device=device)
    named_BTK = torch.zeros((rows, steps, sampling.named_top_k), dtype=torch.int64, device=device)
    lengths_B = torch.full((rows,), steps, device=device)
    stopped_B = torch.zeros(rows, dtype=torch.bool, device=device)

    rows_R = torch.arange(rows, device=device)
    running_R = torch.ones(rows, dtype=torch.bool, device=device)
    running = rows
    hidden_RD, positions_R1 = prefix.last_hidden_BD, prefix.lengths_B[:, None]
    # Without padding there is nothing to mask, and no mask is faster.
    mask_RC = None if prefix.mask_BP.all() else prefix.mask_BP
    for step in range(steps):
        logits_RA = loaded.head(hidden_RD).index_select(-1, allowed_A)
        columns_R = choose(
            logits_RA,
            uniforms_BT[rows_R, step],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        tokens_R = allowed_A[columns_R]
        chosen_R = logits_RA.gather(-1, columns_R[:, None]).squeeze(-1)
        ids_BT[rows_R, step] = tokens_R
        logprobs_BT[rows_R, step] = chosen_R - logits_RA.logsumexp(-1)
        if sampling.named_top_k:
            named_BTK[rows_R, step] = allowed_A[logits_RA.topk(sampling.named_top_k).indices]
        ended_R = running_R & ends_A[columns_R]
        lengths_B[rows_R[ended_R]] = step + 1
        stopped_B[rows_R[ended_R]] = True
        running_R = running_R & ~ended_R
        written, running = running, int(running_R.sum())
        if on_step is not None:
            on_step(written)
        if running == 0 or step == steps - 1:
            break
        if running <= len(rows_R) // 2:
            keep = running_R.nonzero().squeeze(-1)
            prefix.cache.reorder_cache(keep)  # type: ignore[arg-type]
            rows_R, running_R, tokens_R = rows_R[keep], running_R[keep], tokens_R[keep]
            positions_R1 = positions_R1[keep]
            mask_RC = None if mask_RC is None else mask_RC[keep]
        if mask_RC is not None:
            mask_RC = torch.cat([mask_RC, mask_RC.new_ones((len(rows_R), 1))], dim=1)
        output = loaded.model.base_model(
            input_ids=tokens_R[:, None],
            attention_mask=mask_RC,
            position_ids=positions_R1,
            past_key_values=prefix.cache,
            use_cache=True,
        )
        hidden_RD = output.last_hidden_state[:, -1]
        positions_R1 = positions_R1 + 1
    return _cut(loaded, ids_BT, logprobs_BT, named_BTK, lengths_B, stopped_B)


def _cut(
    loaded: LoadedModel,
    ids_BT: Tensor,
    logprobs_BT: Tensor,
    named_BTK: Tensor,
    lengths_B: Tensor,
    stopped_B: Tensor,
) -> list[Sampled]:
    """Each row up to where it ended."""
    ids = ids_BT.to("cpu", torch.int32).numpy()
    named = named_BTK.to("cpu", torch.int32).numpy()
    # log p may round to just above 0; the contract knows no such logprob.
    logprobs = logprobs_BT.clamp_max(0.0).cpu().numpy()
    rows = []
    for row, (length, stopped) in enumerate(
        zip(lengths_B.tolist(), stopped_B.tolist(), strict=True)
    ):
        if np.isnan(logprobs[row, :length]).any():
            raise FloatingPointError(f"{loaded.model_id} answers NaN; its weights are not usable")
        rows.append(
            Sampled(ids[row, :length], logprobs[row, :length], named[row, :length], stopped)
        )
    return rows
