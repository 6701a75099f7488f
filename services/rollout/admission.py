"""What a task must satisfy before it reaches the engine. A bad one is refused alone."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from modeling.images import ImageError, decode_image, feature_count
from modeling.load import LoadedModel
from preceptor.codec import CodecError, decode_ids
from preceptor.v1 import common_pb2, queue_pb2
from services.rollout.engines.torch import SampleRequest
from services.rollout.sampling import Sampling, UnsupportedSampling


class BadTask(ValueError):
    """A task that nobody with this model can serve, and why."""


def read_task(loaded: LoadedModel, task: queue_pb2.PromptTask) -> tuple[SampleRequest, Sampling]:
    """The task as the engine wants it.

    Raises:
        BadTask: with the value, the limit and where they come from.
    """
    try:
        sampling = _sampling(task.sampling)
        sampling.check(loaded.head.projection.out_features, loaded.image_placeholder_id)
        prompt_ids = _prompt_ids(loaded, task.prompt)
        _check_images(loaded, task.prompt, prompt_ids)
    except (CodecError, ImageError, UnsupportedSampling) as error:
        raise BadTask(str(error)) from error
    if task.samples < 1:
        raise BadTask("the task asks for 0 samples")
    longest = len(prompt_ids) + sampling.max_new_tokens
    if longest > loaded.max_sequence_tokens:
        raise BadTask(
            f"prompt of {len(prompt_ids)} tokens and max_new_tokens {sampling.max_new_tokens} make "
            f"{longest}; {loaded.model_id} takes {loaded.max_sequence_tokens}"
        )
    images = tuple(image.data for image in task.prompt.images)
    return SampleRequest(prompt_ids, task.samples, task.sampling.seed, images), sampling


def _sampling(message: common_pb2.SamplingSettings) -> Sampling:
    return Sampling(
        max_new_tokens=message.max_new_tokens,
        eos_ids=tuple(decode_ids(message.eos_ids).tolist()),
        suppressed_ids=tuple(decode_ids(message.suppressed_ids).tolist()),
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        named_top_k=message.named_top_k,
    )


def _prompt_ids(loaded: LoadedModel, prompt: common_pb2.Prompt) -> NDArray[np.int32]:
    ids = decode_ids(prompt.token_ids)
    if not len(ids):
        raise BadTask("the prompt is empty; a first token has no logprob without one")
    outside = np.flatnonzero((ids < 0) | (ids >= loaded.embedding_rows))
    if outside.size:
        raise BadTask(
            f"the prompt has id {ids[outside[0]]} at position {outside[0]}; ids of "
            f"{loaded.model_id} lie in [0, {loaded.embedding_rows})"
        )
    return ids


def _check_images(
    loaded: LoadedModel, prompt: common_pb2.Prompt, prompt_ids: NDArray[np.int32]
) -> None:
    """Each image is what its hash says, can be read, and has its placeholders in the prompt."""
    features = []
    for index, image in enumerate(prompt.images):
        if hashlib.sha256(image.data).digest() != image.sha256:
            raise BadTask(f"image {index}: its bytes do not have the sha256 that came with them")
        features.append(feature_count(loaded, decode_image(image.data)))
    placeholder = loaded.image_placeholder_id
    if placeholder is None:
        return
    found = int((prompt_ids == placeholder).sum())
    if found != sum(features):
        raise BadTask(
            f"the prompt has {found} image placeholders (id {placeholder}), its {len(features)} "
            f"images make {sum(features)} features {features}; placeholders come expanded, one per "
            "feature"
        )
