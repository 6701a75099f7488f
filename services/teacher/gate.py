"""The gate: what a request must satisfy before it reaches the engine.

A bad trajectory is refused alone, with its reason; its neighbours go on. What is wrong with a
prompt concerns all trajectories of its group. What concerns the whole call is in call.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modeling.groups import TokenGroup
from modeling.images import ImageError, ImageTooLarge, ImageTooNarrow
from preceptor.codec import CodecError, decode_ids, decode_mask
from preceptor.v1 import common_pb2, teacher_pb2
from preceptor.v1.teacher_pb2 import Refusal, TrajectoryResult, TrajectoryStatus
from services.teacher.bounds import cut, shown


class Refused(Exception):
    """A prompt or a trajectory that is not scored, and why."""

    def __init__(
        self,
        refusal: Refusal,
        message: str,
        status: TrajectoryStatus = teacher_pb2.TRAJECTORY_STATUS_INVALID_ARGUMENT,
    ) -> None:
        super().__init__(cut(message))
        self.refusal = refusal
        self.status = status

    def result(self, trajectory_id: str) -> TrajectoryResult:
        """For the wire."""
        return TrajectoryResult(
            trajectory_id=trajectory_id,
            status=self.status,
            refusal=self.refusal,
            message=str(self),
        )


@dataclass(frozen=True)
class Rules:
    """The loaded model's limits.

    Attributes:
        card: of the teacher.
        count_pixels: encoded image -> pixels, without decoding it; raises ImageError.
        count_features: encoded image -> features; raises ImageError.
    """

    card: teacher_pb2.TeacherCard
    count_pixels: Callable[[bytes], int]
    count_features: Callable[[bytes], int]


@dataclass(frozen=True)
class Admitted:
    """A group after the gate.

    Attributes:
        work: what the engine gets; None when nothing is left of it.
        rows: index among the request's trajectories of each response in `work`.
        refused: index -> result, for the others.
    """

    work: TokenGroup | None
    rows: tuple[int, ...]
    refused: dict[int, TrajectoryResult]


class _Pixels:
    """What a request's images have taken of max_request_pixels."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    def spend(self, pixels: int, index: int) -> None:
        """Raise Refused, and take nothing, where an image is beyond the limit."""
        if self._spent + pixels > self._limit:
            raise Refused(
                teacher_pb2.REFUSAL_IMAGE_TOO_LARGE,
                f"image {index}: its {pixels} pixels make {self._spent + pixels} in this request, "
                f"the limit is {self._limit} (teacher.max_request_pixels); send fewer groups a "
                "call (request_tokens of the client) or smaller images",
            )
        self._spent += pixels


def admit(groups: Sequence[teacher_pb2.PromptGroup], rules: Rules) -> list[Admitted]:
    """Check all groups of a request, in order."""
    seen: set[str] = set()
    admitted = []
    pixels = _Pixels(rules.card.limits.max_request_pixels)
    for group in groups:
        admitted.append(_admit_group(group, rules, pixels, duplicate=group.group_id in seen))
        seen.add(group.group_id)
    return admitted


def _admit_group(
    group: teacher_pb2.PromptGroup, rules: Rules, pixels: _Pixels, duplicate: bool
) -> Admitted:
    try:
        if duplicate:
            raise Refused(
                teacher_pb2.REFUSAL_DUPLICATE_ID,
                f"group id {shown(group.group_id)} occurs twice in this request",
            )
        prompt = group.teacher_prompt if group.HasField("teacher_prompt") else group.prompt
        prompt_ids = _check_prompt(prompt, rules, pixels)
    except Refused as refused:
        results = (refused.result(one.trajectory_id) for one in group.trajectories)
        return Admitted(None, (), dict(enumerate(results)))
    rows: list[int] = []
    responses, named = [], []
    refusals: dict[int, TrajectoryResult] = {}
    seen: set[str] = set()
    for row, trajectory in enumerate(group.trajectories):
        try:
            if trajectory.trajectory_id in seen:
                raise Refused(
                    teacher_pb2.REFUSAL_DUPLICATE_ID,
                    f"trajectory id {shown(trajectory.trajectory_id)} occurs twice in its group",
                )
            seen.add(trajectory.trajectory_id)
            response_ids, named_ids = _check_trajectory(trajectory, len(prompt_ids), rules.card)
        except Refused as refused:
            refusals[row] = refused.result(trajectory.trajectory_id)
            continue
        rows.append(row)
        responses.append(response_ids)
        named.append(named_ids)
    if not rows:
        return Admitted(None, (), refusals)
    images = tuple(image.data for image in prompt.images)
    return Admitted(
        TokenGroup(prompt_ids, tuple(responses), images, tuple(named)), tuple(rows), refusals
    )


def _check_prompt(prompt: common_pb2.Prompt, rules: Rules, pixels: _Pixels) -> NDArray[np.int32]:
    ids = _ids(prompt.token_ids, "the prompt", rules.card)
    if not len(ids):
        raise Refused(
            teacher_pb2.REFUSAL_EMPTY_PROMPT,
            "the prompt is empty; a first token has no logprob without one",
        )
    if prompt.images and "image" not in rules.card.modalities:
        raise Refused(
            teacher_pb2.REFUSAL_IMAGES_NOT_SUPPORTED,
            f"{rules.card.model_id} is a text-only model; the prompt has {len(prompt.images)} "
            "images",
        )
    features = [
        _check_image(image, index, rules, pixels) for index, image in enumerate(prompt.images)
    ]
    if rules.card.HasField("image_placeholder_id"):
        placeholder = rules.card.image_placeholder_id
        found = int((ids == placeholder).sum())
        if found != sum(features):
            raise Refused(
                teacher_pb2.REFUSAL_PLACEHOLDER_COUNT,
                f"the prompt has {found} image placeholders (id {placeholder}), its "
                f"{len(features)} images make {sum(features)} features {features}; placeholders "
                "are sent expanded, one per feature",
            )
    return ids


def _check_image(image: common_pb2.Image, index: int, rules: Rules, pixels: _Pixels) -> int:
    """Features of one image."""
    # Size before hash: hashing a huge message part is work too.
    limit = rules.card.limits.max_image_bytes
    if len(image.data) > limit:
        raise Refused(
            teacher_pb2.REFUSAL_IMAGE_TOO_LARGE,
            f"image {index} has {len(image.data)} bytes, the limit is {limit} "
            "(teacher.max_image_bytes)",
        )
    if hashlib.sha256(image.data).digest() != image.sha256:
        raise Refused(
            teacher_pb2.REFUSAL_IMAGE_HASH_MISMATCH,
            f"image {index}: its bytes do not have the sha256 that came with them",
        )
    try:
        pixels.spend(rules.count_pixels(image.data), index)
        return rules.count_features(image.data)
    except ImageTooLarge as error:
        setting = "" if isinstance(error, ImageTooNarrow) else " (teacher.max_image_pixels)"
        raise Refused(
            teacher_pb2.REFUSAL_IMAGE_TOO_LARGE, f"image {index}: {error}{setting}"
        ) from error
    except ImageError as error:
        raise Refused(teacher_pb2.REFUSAL_IMAGE_UNREADABLE, f"image {index}: {error}") from error


def _check_trajectory(
    trajectory: teacher_pb2.Trajectory, prompt_tokens: int, card: teacher_pb2.TeacherCard
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Response ids [n] and named ids [n, k]."""
    ids = _ids(trajectory.response_ids, "the response", card)
    if not len(ids):
        raise Refused(teacher_pb2.REFUSAL_EMPTY_RESPONSE, "the response is empty")
    total = prompt_tokens + len(ids)
    if total > card.max_sequence_tokens:
        raise Refused(
            teacher_pb2.REFUSAL_TOO_LONG,
            f"prompt of {prompt_tokens} and response of {len(ids)} tokens make {total}, the model "
            f"takes {card.max_sequence_tokens}",
        )
    try:
        mask = decode_mask(trajectory.loss_mask, len(ids))
    except CodecError as error:
        raise Refused(teacher_pb2.REFUSAL_MALFORMED_ARRAY, f"loss_mask: {error}") from error
    if card.HasField("image_placeholder_id"):
        _check_placeholders(ids, mask, card)
    named = _ids(trajectory.named_ids, "named_ids", card)
    if named.size % len(ids):
        raise Refused(
            teacher_pb2.REFUSAL_MALFORMED_ARRAY,
            f"{named.size} named_ids are no [n, k] for a response of n = {len(ids)} tokens",
        )
    if named.size // len(ids) > card.limits.max_top_k:
        raise Refused(
            teacher_pb2.REFUSAL_OPTION_NOT_SUPPORTED,
            f"{named.size // len(ids)} named_ids a position, this teacher's limit is "
            f"{card.limits.max_top_k} (teacher.max_top_k)",
        )
    return ids, named.reshape(len(ids), -1) if named.size else named.reshape(len(ids), 0)


def _check_placeholders(
    ids: NDArray[np.int32], mask: NDArray[np.uint8], card: teacher_pb2.TeacherCard
) -> None:
    placeholder = ids == card.image_placeholder_id
    written = np.flatnonzero(placeholder & (mask == 1))
    if written.size:
        raise Refused(
            teacher_pb2.REFUSAL_PLACEHOLDER_IN_RESPONSE,
            f"the student wrote the image placeholder (id {card.image_placeholder_id}) at position "
            f"{written[0]} of its response; list it in suppressed_ids when sampling",
        )
    if placeholder.any() and not card.shares_prompts:
        raise Refused(
            teacher_pb2.REFUSAL_PLACEHOLDER_IN_RESPONSE,
            "this teacher computes each response together with its prompt and would count the "
            f"image placeholder (id {card.image_placeholder_id}) in the response as an image's",
            teacher_pb2.TRAJECTORY_STATUS_UNIMPLEMENTED,
        )


def _ids(data: bytes, what: str, card: teacher_pb2.TeacherCard) -> NDArray[np.int32]:
    try:
        ids = decode_ids(data)
    except CodecError as error:
        raise Refused(teacher_pb2.REFUSAL_MALFORMED_ARRAY, f"{what}: {error}") from error
    outside = np.flatnonzero((ids < 0) | (ids >= card.embedding_rows))
    if outside.size:
        raise Refused(
            teacher_pb2.REFUSAL_ID_OUT_OF_RANGE,
            f"{what} has id {ids[outside[0]]} at position {outside[0]}; this teacher's ids lie in "
            f"[0, {card.embedding_rows})",
        )
    return ids
