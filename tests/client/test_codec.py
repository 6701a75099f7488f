"""Arrays on the wire: what goes in comes out, and what is no id, mask or logprob goes nowhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preceptor.codec import (
    CodecError,
    Score,
    TeacherRefusal,
    decode_ids,
    decode_logprobs,
    decode_mask,
    encode_id_set,
    encode_id_table,
    encode_ids,
    encode_logprobs,
    encode_mask,
    prompt_group,
    prompt_message,
    read_group,
)
from preceptor.v1 import teacher_pb2

ids = st.lists(st.integers(0, 2**31 - 1))
logprobs = st.lists(st.floats(max_value=0.0, width=32, allow_nan=False))


@given(ids)
def test_ids_round_trip(values):
    assert decode_ids(encode_ids(values)).tolist() == values


@given(logprobs)
def test_logprobs_round_trip_bit_for_bit(values):
    encoded = encode_logprobs(values)
    decoded = decode_logprobs(encoded, len(values))
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == encoded == np.array(values, "<f4").tobytes()


@given(st.lists(st.integers(0, 1), min_size=1))
def test_masks_round_trip(values):
    assert decode_mask(encode_mask(values), len(values)).tolist() == values


def test_ids_are_little_endian_int32():
    assert encode_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@pytest.mark.pitfall("L9")
@pytest.mark.parametrize("bad", [-1, 2**31, 2**63, 2**64, -(2**31)])
def test_ids_outside_int32_never_reach_the_wire(bad):
    with pytest.raises(CodecError):
        encode_ids([5, bad, 7])
    with pytest.raises(CodecError):
        prompt_group("g", [1], [[5, bad]])


@pytest.mark.pitfall("L9")
def test_the_largest_int32_is_an_id():
    assert decode_ids(encode_ids([2**31 - 1])).tolist() == [2**31 - 1]


@pytest.mark.parametrize("bad", [[1.0, 2.0], [True], ["a"], [None]])
def test_ids_are_integers(bad):
    with pytest.raises(CodecError):
        encode_ids(bad)


@pytest.mark.parametrize(
    ("prompt", "responses", "words"),
    [
        ([1, 2], [4, 5, 2], r"response 0: token ids must have 1 dimension, found 0"),
        ([1, 2], np.array([4, 5]), "response 0"),
        ([1, 2], [[4], [[5, 6]]], r"response 1: .* found 2 \(shape \(1, 2\)\)"),
        ([[1, 2]], [[4]], r"found 2 \(shape \(1, 2\)\)"),
        (1, [[4]], "found 0"),
        ([1, 2], [[4], [[5], [6, 7]]], "response 1: token ids are no array"),
    ],
)
def test_ids_of_another_shape_are_refused_and_not_flattened(prompt, responses, words):
    with pytest.raises(CodecError, match=words):
        prompt_group("g", prompt, responses)


def test_the_rows_of_an_array_are_responses():
    group = prompt_group("g", np.array([1]), np.array([[4, 5], [6, 7]]))
    assert [decode_ids(one.response_ids).tolist() for one in group.trajectories] == [[4, 5], [6, 7]]


def test_tables_and_sets_of_ids():
    assert decode_ids(encode_id_table([[1, 2], [3, 4]])).tolist() == [1, 2, 3, 4]
    assert encode_id_table(np.empty((3, 0), int)) == b""
    for flat in ([1, 2], 3, [[[1]]]):
        with pytest.raises(CodecError, match="2 dimensions"):
            encode_id_table(flat)
    assert encode_id_set([7, 3, 7]) == encode_id_set((3, 7)) == encode_ids([3, 7])
    assert encode_id_set(()) == b""
    with pytest.raises(CodecError, match="-1"):
        encode_id_set([-1])


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([[1, 1], [1, 0]], "response 1: a mask of 2 values for 1 tokens"),
        ([[1, 1], []], "response 1: a mask of 0 values for 1 tokens"),
        ([[1, 1]], "1 loss_masks for 2 responses"),
        ([[[1, 1]], [1]], "1 dimension"),
    ],
)
def test_masks_that_do_not_fit_their_responses(masks, words):
    with pytest.raises(CodecError, match=words):
        prompt_group("g", [1], [[4, 5], [6]], loss_masks=masks)


def test_masks_travel_with_their_responses():
    group = prompt_group("g", [1], [[4, 5], [6]], loss_masks=[[1, 0], np.array([True])])
    assert [one.loss_mask for one in group.trajectories] == [b"\1\0", b"\1"]


@pytest.mark.pitfall("L12")
def test_zero_and_minus_infinity_are_logprobs():
    assert decode_logprobs(encode_logprobs([0.0, -np.inf]), 2).tolist() == [0.0, -np.inf]


@pytest.mark.pitfall("L12")
@pytest.mark.parametrize("bad", [0.1, np.nan, np.inf])
def test_no_logprob_is_refused_on_both_sides(bad):
    with pytest.raises(CodecError, match="position 1"):
        encode_logprobs([-1.0, bad])
    with pytest.raises(CodecError, match="position 1"):
        decode_logprobs(np.array([-1.0, bad], "<f4").tobytes(), 2)


@pytest.mark.pitfall("L6")
@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_padded_or_cut(count):
    with pytest.raises(CodecError, match="nothing is padded"):
        decode_logprobs(encode_logprobs([-1.0, -2.0]), count)


def test_a_torn_array_is_refused():
    with pytest.raises(CodecError, match="5 bytes"):
        decode_ids(b"\0\0\0\0\0")


def test_masks_hold_zeros_and_ones():
    assert decode_mask(b"", 3).tolist() == [1, 1, 1]
    with pytest.raises(CodecError):
        encode_mask([0, 2])
    with pytest.raises(CodecError):
        decode_mask(b"\x02\x00", 2)
    with pytest.raises(CodecError):
        decode_mask(b"\x01", 2)


@pytest.mark.pitfall("L2")
def test_a_prompt_is_never_empty():
    with pytest.raises(CodecError, match="never empty"):
        prompt_message([])


def ok(trajectory_id: str, values: list[float]) -> teacher_pb2.TrajectoryResult:
    return teacher_pb2.TrajectoryResult(
        trajectory_id=trajectory_id,
        status=teacher_pb2.TRAJECTORY_STATUS_OK,
        logprobs=np.array(values, "<f4").tobytes(),
    )


def read(*results: teacher_pb2.TrajectoryResult) -> list[Score | TeacherRefusal]:
    group = prompt_group("g", [1, 2], [[3, 4], [5]])
    return read_group(group, teacher_pb2.GroupResult(group_id="g", trajectories=results))


@pytest.mark.pitfall("L2")
def test_a_response_has_one_value_per_id():
    first, second = read(ok("0", [-1.0, -2.0]), ok("1", [-3.0]))
    assert first.logprobs.tolist() == [-1.0, -2.0]
    assert second.logprobs.tolist() == [-3.0]
    assert first.top_ids.shape == first.top_logprobs.shape == first.named_logprobs.shape == (2, 0)


@pytest.mark.pitfall("L6")
def test_a_list_shorter_than_the_ids_is_refused():
    with pytest.raises(CodecError, match="1 logprobs for 2 tokens"):
        read(ok("0", [-1.0]), ok("1", [-3.0]))


def test_swapped_or_missing_results_are_refused():
    with pytest.raises(CodecError, match="asked for trajectory '0'"):
        read(ok("1", [-3.0]), ok("0", [-1.0, -2.0]))
    with pytest.raises(CodecError, match="1 results for 2"):
        read(ok("0", [-1.0, -2.0]))


def test_a_refusal_is_a_value_and_its_neighbour_is_read():
    refused = teacher_pb2.TrajectoryResult(
        trajectory_id="0",
        status=teacher_pb2.TRAJECTORY_STATUS_INVALID_ARGUMENT,
        refusal=teacher_pb2.REFUSAL_TOO_LONG,
        message="9 tokens, the limit is 8",
    )
    first, second = read(refused, ok("1", [-3.0]))
    assert isinstance(first, TeacherRefusal) and first.refusal == teacher_pb2.REFUSAL_TOO_LONG
    assert "limit is 8" in str(first) and "REFUSAL_TOO_LONG" in str(first)
    assert isinstance(second, Score)


def test_a_result_without_a_status_is_no_score():
    unset = ok("0", [-1.0, -2.0])
    unset.status = teacher_pb2.TRAJECTORY_STATUS_UNSPECIFIED
    assert isinstance(read(unset, ok("1", [-3.0]))[0], TeacherRefusal)
