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
