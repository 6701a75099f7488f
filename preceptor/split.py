"""Prompt groups cut into requests that fit, and results put together again. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from preceptor.codec import IDS
from preceptor.teacher_errors import MessageTooLarge, TeacherReplyInvalid
from preceptor.v1 import teacher_pb2

# Upper bounds, in bytes, on what protobuf adds: per request, per group (identity included), per
# trajectory (a refusal's message included).
_PER_REQUEST = 1024
_PER_GROUP = 512
_PER_TRAJECTORY = 1024


@dataclass(frozen=True)
class Limits:
    """What a request may hold.

    Attributes:
        tokens: prompt (once a group) and response tokens. A single trajectory may exceed it.
        message_bytes: of the request, and of the reply to each of its groups. Nothing exceeds it.
        suppressed_bytes: that travel with every request and come back with every group.
    """

    tokens: int
    message_bytes: int
    suppressed_bytes: int = 0


@dataclass(frozen=True)
class Piece:
    """Trajectories first .. first + len(group.trajectories) of the caller's group number `index`.

    Attributes:
        group: the caller's group, or a copy with these trajectories alone.
    """

    index: int
    first: int
    group: teacher_pb2.PromptGroup


@dataclass(frozen=True)
class _Cost:
    tokens: int
    request_bytes: int
    reply_bytes: int

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.tokens + other.tokens,
            self.request_bytes + other.request_bytes,
            self.reply_bytes + other.reply_bytes,
        )


def split(
    groups: Sequence[teacher_pb2.PromptGroup], top_k: int, limits: Limits
) -> list[list[Piece]]:
    """Requests, in order. A group is cut by trajectories only if it fits in no request whole.

    Raises:
        MessageTooLarge: a single trajectory with its prompt, or its reply, exceeds message_bytes.
        ValueError: two groups with the same group_id.
    """
    seen: set[str] = set()
    requests: list[list[Piece]] = []
    tokens = request_bytes = 0
    for index, group in enumerate(groups):
        if group.group_id in seen:
            raise ValueError(f"group_id {group.group_id!r} appears twice; it must be unique")
        seen.add(group.group_id)
        for piece, cost in _pieces(index, group, top_k, limits):
            fits = (
                tokens + cost.tokens <= limits.tokens
                and request_bytes + cost.request_bytes <= limits.message_bytes
            )
            # Pieces of one group never share a request: their group_id is unique within it.
            if not requests or not fits or piece.first > 0:
                requests.append([])
                tokens, request_bytes = 0, _PER_REQUEST + limits.suppressed_bytes
            requests[-1].append(piece)
            tokens += cost.tokens
            request_bytes += cost.request_bytes
    return requests


def merge(
    group: teacher_pb2.PromptGroup, parts: Sequence[teacher_pb2.GroupResult]
) -> teacher_pb2.GroupResult:
    """One result from those of a group's pieces, given in order.

    Raises:
        TeacherReplyInvalid: the trajectories are not those of the group in its order.
    """
    merged = parts[0]
    if len(parts) > 1:
        merged = teacher_pb2.GroupResult()
        merged.CopyFrom(parts[0])
    for part in parts[1:]:
        merged.trajectories.extend(part.trajectories)
    asked = [trajectory.trajectory_id for trajectory in group.trajectories]
    got = [trajectory.trajectory_id for trajectory in merged.trajectories]
    if asked != got:
        raise TeacherReplyInvalid(
            f"group {group.group_id!r}: asked for trajectories {asked}, got {got}"
        )
    return merged


def _pieces(
    index: int, group: teacher_pb2.PromptGroup, top_k: int, limits: Limits
) -> Iterator[tuple[Piece, _Cost]]:
    """The group whole if it fits in a request of its own, else cut into as few as fit."""
    base = _prompt_cost(group)
    costs = [_trajectory_cost(trajectory, top_k) for trajectory in group.trajectories]
    whole = sum(costs, base)
    if _fits(whole, limits):
        yield Piece(index, 0, group), whole
        return
    start = 0
    while start < max(1, len(costs)):
        total, end = base, start
        while end < len(costs) and (end == start or _fits(total + costs[end], limits)):
            total, end = total + costs[end], end + 1
        _check_bytes(group, start, total, limits)
        # The last piece may be the whole group: one trajectory of too many tokens goes alone.
        part = teacher_pb2.PromptGroup(
            group_id=group.group_id,
            prompt=group.prompt,
            trajectories=group.trajectories[start:end],
            teacher_prompt=group.teacher_prompt if group.HasField("teacher_prompt") else None,
        )
        yield Piece(index, start, part), total
        start = max(end, start + 1)


def _fits(cost: _Cost, limits: Limits) -> bool:
    return (
        cost.tokens <= limits.tokens and max(_message_bytes(cost, limits)) <= limits.message_bytes
    )


def _message_bytes(cost: _Cost, limits: Limits) -> tuple[int, int]:
    """Of a request of these pieces alone, and of its reply."""
    shared = limits.suppressed_bytes
    return cost.request_bytes + _PER_REQUEST + shared, cost.reply_bytes + shared


def _check_bytes(
    group: teacher_pb2.PromptGroup, trajectory: int, cost: _Cost, limits: Limits
) -> None:
    request, reply = _message_bytes(cost, limits)
    if max(request, reply) > limits.message_bytes:
        what, size = ("request", request) if request >= reply else ("reply", reply)
        raise MessageTooLarge(
            f"group {group.group_id!r}, trajectory number {trajectory}: its {what} takes up to "
            f"{size} bytes, the limit is {limits.message_bytes}; raise max_message_bytes of the "
            "client and of the teacher, or send smaller images, fewer named ids or a lower top_k"
        )


def _prompt_cost(group: teacher_pb2.PromptGroup) -> _Cost:
    seen_by_teacher = group.teacher_prompt if group.HasField("teacher_prompt") else group.prompt
    name = len(group.group_id.encode())
    return _Cost(
        tokens=len(seen_by_teacher.token_ids) // IDS.itemsize,
        request_bytes=group.prompt.ByteSize()
        + (group.teacher_prompt.ByteSize() if group.HasField("teacher_prompt") else 0)
        + name
        + _PER_GROUP,
        reply_bytes=name + _PER_GROUP,
    )


def _trajectory_cost(trajectory: teacher_pb2.Trajectory, top_k: int) -> _Cost:
    # A logprob takes as many bytes as an id.
    response = len(trajectory.response_ids)
    name = len(trajectory.trajectory_id.encode())
    return _Cost(
        tokens=response // IDS.itemsize,
        request_bytes=trajectory.ByteSize() + 32,
        reply_bytes=response * (1 + 2 * top_k) + len(trajectory.named_ids) + name + _PER_TRAJECTORY,
    )
