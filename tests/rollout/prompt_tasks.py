"""Prompt tasks as the trainer issues them, and what a worker must make of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modeling.load import LoadedModel
from preceptor.codec import (
    decode_id_table,
    decode_ids,
    decode_logprobs,
    encode_ids,
    prompt_message,
)
from preceptor.policy import Version
from preceptor.queue import RolloutQueue
from preceptor.v1 import common_pb2, queue_pb2
from services.rollout.engines.torch import SampleRequest, generate
from services.rollout.sampling import Sampling
from tests.tiny_models import EOS, IMAGE, PAD

RUN = "run"
FIRST = Version(0, 0)


def settings(**changes) -> common_pb2.SamplingSettings:
    values = {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 12,
        "eos_ids": encode_ids([EOS, *range(10, 20)]),
        "suppressed_ids": encode_ids([PAD, IMAGE]),
        **changes,
    }
    return common_pb2.SamplingSettings(**values)


def task(
    slot: int,
    version: Version = FIRST,
    ids: Sequence[int] = (1, 50, 51),
    images: Sequence[bytes] = (),
    samples: int = 3,
    **sampling,
) -> queue_pb2.PromptTask:
    """A training task of step 4 that its slot tells apart."""
    return queue_pb2.PromptTask(
        id=queue_pb2.TaskId(run=RUN, incarnation=1, step=4, slot=slot),
        kind=queue_pb2.TASK_KIND_TRAIN,
        prompt=prompt_message(ids, images),
        samples=samples,
        policy=version.message(),
        sampling=settings(seed=1000 + slot, **sampling),
    )


def read_groups(
    queue: RolloutQueue, count: int, seconds: float
) -> dict[int, queue_pb2.RolloutGroup]:
    """`count` groups by slot, acknowledged; fewer if they do not come in time."""
    claims = []
    while len(claims) < count:
        found = queue.claim_groups(count, seconds)
        if not found:
            break
        queue.ack_groups(found)
        claims += found
    return {claim.message.id.slot: claim.message for claim in claims}


def check_group(
    loaded: LoadedModel, one: queue_pb2.PromptTask, group: queue_pb2.RolloutGroup, version: Version
) -> None:
    """The group holds what this model writes, alone, for the task."""
    assert group.schema_version == 1
    assert (group.id, group.kind) == (one.id, one.kind)
    assert (group.prompt, group.sampling) == (one.prompt, one.sampling)
    assert group.generation_seconds > 0
    # Read here by hand, so that what admission makes of the task is part of what is checked.
    wanted = one.sampling
    ends = decode_ids(wanted.eos_ids).tolist()
    sampling = Sampling(
        max_new_tokens=wanted.max_new_tokens,
        eos_ids=tuple(ends),
        suppressed_ids=tuple(decode_ids(wanted.suppressed_ids).tolist()),
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        named_top_k=wanted.named_top_k,
    )
    images = tuple(image.data for image in one.prompt.images)
    prompt_ids = decode_ids(one.prompt.token_ids)
    request = SampleRequest(prompt_ids, one.samples, wanted.seed, images)
    expected = generate(loaded, [request], sampling)[0]
    assert [rollout.sample for rollout in group.rollouts] == list(range(one.samples))
    for rollout, response in zip(group.rollouts, expected, strict=True):
        ids = decode_ids(rollout.response_ids)
        assert ids.tolist() == response.ids.tolist()
        logprobs = decode_logprobs(rollout.behaviour_logprobs, len(ids))
        np.testing.assert_allclose(logprobs, response.logprobs, atol=1e-4)
        named = decode_id_table(rollout.named_ids, len(ids), wanted.named_top_k)
        assert named.tolist() == response.named_ids.tolist()
        if ids[-1] in ends:
            assert rollout.finish_reason == queue_pb2.FINISH_REASON_STOP
        else:
            assert rollout.finish_reason == queue_pb2.FINISH_REASON_LENGTH
            assert len(ids) == wanted.max_new_tokens
        (span,) = rollout.policy_spans
        assert (Version.of(span.version), span.count) == (version, len(ids))
