"""Whether responses may share their prompt's computation: asked of the model, not believed."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from modeling.groups import TokenGroup
from modeling.images import decode_image, expand_placeholders, feature_count
from modeling.load import LoadedModel
from modeling.logprobs import TokenScores
from modeling.shared_prefix import group_logprobs, plain_logprobs

logger = logging.getLogger(__name__)

# Largest difference in nats between both paths, by dtype of the weights.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
# Modelling code met with inputs it does not foresee; the plain path does not need them.
PROBE_ERRORS = (ValueError, TypeError, RuntimeError, IndexError, AttributeError)
PROBE_LENGTHS = ((5, (3, 1)), (9, (2, 6)))


@torch.no_grad()
def check_sharing(loaded: LoadedModel) -> bool:
    """Compare the shared path with the plain one on a small seeded probe, with an image where the
    model takes them.

    Run it once after loading. On disagreement a warning is logged and the caller uses
    plain_logprobs (slower, any architecture).
    """
    if not may_share(loaded):
        logger.warning(
            "%s: the architecture does not admit a shared prompt; each response is computed whole",
            loaded.model_id,
        )
        return False
    probe = probe_groups(loaded)
    try:
        shared = group_logprobs(loaded, probe)
    except PROBE_ERRORS as error:
        logger.warning(
            "%s: the shared prompt fails (%s: %s); each response is computed whole",
            loaded.model_id,
            type(error).__name__,
            error,
        )
        return False
    plain = plain_logprobs(loaded, probe)
    difference = max(
        float((one - other).abs().max())
        for ours, theirs in zip(shared, plain, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    limit = TOLERANCE[loaded.dtype]
    # A NaN is no agreement either.
    if difference <= limit:
        return True
    logger.warning(
        "%s: shared and plain logprobs differ by %.2g nat (limit %g); each response is computed "
        "whole",
        loaded.model_id,
        difference,
        limit,
    )
    return False


@torch.no_grad()
def agrees_with_plain(loaded: LoadedModel, path: Callable[..., TokenScores]) -> bool:
    """Whether another way to lay sequences out gives the plain way's logprobs, on the probe.

    Args:
        loaded: the model.
        path: modeling.packed.packed_scores or modeling.padded.padded_scores.
    """
    probe = probe_groups(loaded)
    try:
        scores = path(loaded, probe).logprobs_T
    except PROBE_ERRORS as error:
        logger.warning(
            "%s: %s fails (%s: %s)", loaded.model_id, path.__name__, type(error).__name__, error
        )
        return False
    plain = torch.cat([one for group in plain_logprobs(loaded, probe) for one in group])
    difference = float((scores - plain).abs().max())
    limit = TOLERANCE[loaded.dtype]
    if difference <= limit:
        return True
    logger.warning(
        "%s: %s differs from the plain forward by %.2g nat (limit %g)",
        loaded.model_id,
        path.__name__,
        difference,
        limit,
    )
    return False


def may_share(loaded: LoadedModel) -> bool:
    """Whether the architecture admits a repeated cache, as far as its config tells.

    Recurrent layers do not (their state is overwritten in place), nor rotary embeddings whose
    frequencies depend on the longest sequence in the batch.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = [one.get("rope_type") for one in (parameters, *nested)]
    if any(kind in ("dynamic", "longrope") for kind in kinds):
        return False
    layers = DynamicCache(config=loaded.model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def probe_groups(loaded: LoadedModel, seed: int = 0) -> list[TokenGroup]:
    """Small seeded groups of unequal prompts and responses, the first with an image if possible."""
    random = np.random.default_rng(seed)
    allowed = np.setdiff1d(
        np.arange(min(loaded.embedding_rows, len(loaded.tokenizer))),
        [] if loaded.image_placeholder_id is None else [loaded.image_placeholder_id],
    )
    images, prefix = _probe_image(loaded, random)
    groups = []
    for prompt_tokens, response_tokens in PROBE_LENGTHS:
        prompt = random.choice(allowed, prompt_tokens)
        responses = tuple(random.choice(allowed, count) for count in response_tokens)
        groups.append(TokenGroup(np.concatenate([prefix, prompt]), responses, images))
        images, prefix = (), prefix[:0]
    return groups


def _probe_image(
    loaded: LoadedModel, random: np.random.Generator
) -> tuple[tuple[bytes, ...], NDArray[np.int32]]:
    """A noise image of the processor's size and its placeholders; nothing for text-only models."""
    none: tuple[tuple[bytes, ...], NDArray[np.int32]] = ((), np.empty(0, dtype=np.int32))
    if loaded.image_placeholder_id is None or loaded.image_processor is None:
        return none
    size = getattr(loaded.image_processor, "size", None)
    height, width = (int(getattr(size, side, None) or 224) for side in ("height", "width"))
    pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    image = buffer.getvalue()
    count = feature_count(loaded, decode_image(image))
    placeholder = loaded.image_placeholder_id
    return (image,), expand_placeholders([placeholder], [count], placeholder)
