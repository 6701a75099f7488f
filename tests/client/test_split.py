"""Requests are cut by tokens and bytes, and put together again as if they had never been cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preceptor.codec import prompt_group
from preceptor.split import Limits, merge, split
from preceptor.teacher_errors import MessageTooLarge, TeacherReplyInvalid
from preceptor.v1 import teacher_pb2
from tests.client.scripted_teacher import score_group

WIDE = 64 * 2**20
options = teacher_pb2.ScoreOptions(top_k=2)
sizes = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=0, max_size=5)),
    max_size=8,
)


def make(shapes: list[tuple[int, list[int]]]) -> list[teacher_pb2.PromptGroup]:
    draw = np.random.default_rng(0)
    return [
        prompt_group(f"g{i}", draw.integers(0, 90, p), [draw.integers(0, 90, n) for n in ns])
        for i, (p, ns) in enumerate(shapes)
    ]


def tokens_of(group: teacher_pb2.PromptGroup) -> int:
    return len(group.prompt.token_ids + b"".join(t.response_ids for t in group.trajectories)) // 4


@settings(deadline=None)
@given(sizes, st.integers(1, 150), st.integers(8_000, 20_000))
def test_split_then_merge_equals_unsplit(shapes, tokens, message_bytes):
    groups = make(shapes)
    requests = split(groups, options.top_k, Limits(tokens, message_bytes))
    parts: dict[int, list[teacher_pb2.GroupResult]] = {}
    for pieces in requests:
        sent = [piece.group for piece in pieces]
        assert len({group.group_id for group in sent}) == len(sent)
        assert teacher_pb2.ScoreRequest(groups=sent).ByteSize() <= message_bytes
        # Only a single trajectory may exceed the tokens.
        alone = len(sent) == 1 and len(sent[0].trajectories) <= 1
        assert alone or sum(map(tokens_of, sent)) <= tokens
        for piece in pieces:
            result = score_group(piece.group, options, "t")
            assert result.ByteSize() <= message_bytes
            parts.setdefault(piece.index, []).append(result)
    whole = [score_group(group, options, "t") for group in groups]
    assert [merge(group, parts[index]) for index, group in enumerate(groups)] == whole


def test_a_group_that_fits_is_not_cut():
    groups = make([(10, [10, 10]), (10, [10, 10]), (10, [10, 10])])
    requests = split(groups, 0, Limits(tokens=60, message_bytes=WIDE))
    assert [[piece.group.group_id for piece in pieces] for pieces in requests] == [
        ["g0", "g1"],
        ["g2"],
    ]
    assert requests[0][0].group is groups[0]


def test_a_trajectory_of_too_many_tokens_goes_alone():
    [[first], [second]] = split(make([(10, [5, 500])]), 0, Limits(tokens=20, message_bytes=WIDE))
    assert (first.first, len(first.group.trajectories)) == (0, 1)
    assert (second.first, len(second.group.trajectories)) == (1, 1)


def test_the_teachers_own_prompt_travels_with_every_piece():
    [group] = make([(10, [5, 5])])
    group.teacher_prompt.token_ids = b"\1\0\0\0" * 30
    requests = split([group], 0, Limits(tokens=36, message_bytes=WIDE))
    assert len(requests) == 2
    assert all(pieces[0].group.teacher_prompt == group.teacher_prompt for pieces in requests)


@pytest.mark.pitfall("G1")
def test_what_fits_in_no_message_names_the_limit_and_the_setting():
    with pytest.raises(MessageTooLarge, match=r"'g1'.*request.*limit is 8192.*max_message_bytes"):
        split(make([(10, [5]), (10, [5, 3000])]), 0, Limits(10**6, 8192))


@pytest.mark.pitfall("G1")
def test_the_reply_is_estimated_too():
    groups = make([(10, [1000])])
    split(groups, 0, Limits(10**6, 8192))
    with pytest.raises(MessageTooLarge, match=r"reply.*limit is 8192.*top_k"):
        split(groups, 10, Limits(10**6, 8192))


def test_equal_group_ids_are_refused():
    with pytest.raises(ValueError, match="'g0' appears twice"):
        split(make([(1, [1])]) * 2, 0, Limits(10, WIDE))


def test_suppressed_ids_count_in_both_messages():
    groups = make([(10, [1000])])
    split(groups, 0, Limits(10**6, 8192))
    with pytest.raises(MessageTooLarge, match=r"takes up to 9\d\d\d bytes, the limit is 8192"):
        split(groups, 0, Limits(10**6, 8192, suppressed_bytes=4000))


def test_foreign_trajectories_are_refused():
    [group] = make([(3, [1, 1])])
    result = score_group(group, options, "t")
    result.trajectories[1].trajectory_id = "x"
    with pytest.raises(TeacherReplyInvalid, match="'x'"):
        merge(group, [result])
