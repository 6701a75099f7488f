"""Each bad thing is refused alone, by name, with the numbers a caller needs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from modeling.images import ImageError, ImageTooLarge, ImageTooNarrow
from preceptor.codec import encode_ids, image_message, prompt_group
from preceptor.v1 import common_pb2
from preceptor.v1 import teacher_pb2 as pb
from services.teacher.call import InvalidCall, Options, check_names, read_options
from services.teacher.gate import Rules, admit
from services.teacher.scores import Failure, Scores, group_result, reply_bytes, trajectory_result

PLACEHOLDER, ROWS, LONGEST, PIXELS = 3, 96, 20, 110


def rules(images=True, shares=True):
    """An image of n bytes has n pixels and makes 2 features."""

    def count(data: bytes) -> int:
        if data == b"huge":
            raise ImageTooLarge("the image has 9 pixels, the limit is 4")
        if data == b"broken":
            raise ImageError("the image cannot be read")
        if data == b"narrow":
            raise ImageTooNarrow("one side may be at most 200 times the other")
        return 2

    card = pb.TeacherCard(
        model_id="tiny",
        embedding_rows=ROWS,
        max_sequence_tokens=LONGEST,
        modalities=["text", "image"] if images else ["text"],
        image_placeholder_id=PLACEHOLDER if images else None,
        limits=pb.Limits(max_top_k=8, max_image_bytes=100, max_request_pixels=PIXELS),
        shares_prompts=shares,
    )
    return Rules(card, len, count)


def good():
    return prompt_group("g", [1, PLACEHOLDER, PLACEHOLDER, 7], [[8, 9], [10]], images=[b"fine"])


def change(edit):
    group = good()
    edit(group)
    return group


def raw(*ids):
    return np.array(ids, dtype="<i4").tobytes()


def set_prompt(*ids):
    return lambda group: setattr(group.prompt, "token_ids", raw(*ids))


def set_image(data):
    return lambda group: group.prompt.images[0].CopyFrom(image_message(data))


def set_first(name, value):
    return lambda group: setattr(group.trajectories[0], name, value)


def set_hash(group):
    group.prompt.images[0].sha256 = bytes(32)


def set_id(name):
    return lambda group: setattr(group, "group_id", name)


def same_trajectory_id(group):
    group.trajectories[1].trajectory_id = "0"


# What concerns the prompt refuses the whole group.
PROMPTS = (
    (set_prompt(), pb.REFUSAL_EMPTY_PROMPT, "empty"),
    (set_prompt(1, 3, 3, -1), pb.REFUSAL_ID_OUT_OF_RANGE, "-1 at position 3"),
    (set_prompt(1, 3, 3, ROWS), pb.REFUSAL_ID_OUT_OF_RANGE, r"\[0, 96\)"),
    (set_prompt(1, 3, 3, 3), pb.REFUSAL_PLACEHOLDER_COUNT, "3 image placeholders .* 2 features"),
    (set_prompt(1, 7), pb.REFUSAL_PLACEHOLDER_COUNT, "0 image placeholders"),
    (lambda group: group.prompt.ClearField("images"), pb.REFUSAL_PLACEHOLDER_COUNT, "0 images"),
    (
        lambda group: group.prompt.images.append(image_message(b"more")),
        pb.REFUSAL_PLACEHOLDER_COUNT,
        "4 features",
    ),
    (set_image(b"broken"), pb.REFUSAL_IMAGE_UNREADABLE, "cannot be read"),
    (set_image(b"huge"), pb.REFUSAL_IMAGE_TOO_LARGE, r"limit is 4 \(teacher.max_image_pixels\)$"),
    (set_image(b"narrow"), pb.REFUSAL_IMAGE_TOO_LARGE, "200 times the other$"),
    (set_image(b"x" * 101), pb.REFUSAL_IMAGE_TOO_LARGE, "101 bytes, the limit is 100"),
    (set_hash, pb.REFUSAL_IMAGE_HASH_MISMATCH, "sha256"),
    (
        lambda group: setattr(group.prompt, "token_ids", b"abc"),
        pb.REFUSAL_MALFORMED_ARRAY,
        "the prompt: 3 bytes",
    ),
)
# What concerns a response refuses it alone.
RESPONSES = (
    (set_first("response_ids", b""), pb.REFUSAL_EMPTY_RESPONSE, "empty"),
    (set_first("response_ids", raw(-1)), pb.REFUSAL_ID_OUT_OF_RANGE, "-1 at position 0"),
    (set_first("response_ids", raw(5, ROWS)), pb.REFUSAL_ID_OUT_OF_RANGE, "96 at position 1"),
    (set_first("response_ids", raw(*[5] * 17)), pb.REFUSAL_TOO_LONG, "make 21, the model takes 20"),
    (set_first("response_ids", raw(8, PLACEHOLDER)), pb.REFUSAL_PLACEHOLDER_IN_RESPONSE, "supp"),
    (set_first("response_ids", b"12345"), pb.REFUSAL_MALFORMED_ARRAY, "5 bytes"),
    (set_first("loss_mask", b"\1"), pb.REFUSAL_MALFORMED_ARRAY, "1 values for 2 tokens"),
    (set_first("loss_mask", b"\1\2"), pb.REFUSAL_MALFORMED_ARRAY, "found 2"),
    (set_first("named_ids", raw(1, 2, 3)), pb.REFUSAL_MALFORMED_ARRAY, "n = 2"),
    (set_first("named_ids", raw(1, ROWS)), pb.REFUSAL_ID_OUT_OF_RANGE, "named_ids"),
    (
        set_first("named_ids", raw(*[5] * 18)),
        pb.REFUSAL_OPTION_NOT_SUPPORTED,
        r"9 named_ids a position, .* 8 \(teacher.max_top_k\)",
    ),
)


@pytest.mark.pitfall("G9")
@pytest.mark.pitfall("L9")
@pytest.mark.parametrize(("edit", "refusal", "message"), PROMPTS)
def test_a_bad_prompt_refuses_its_group_alone(edit, refusal, message):
    bad = change(edit)
    bad.group_id = "bad"
    refused, served = admit([bad, good()], rules())
    assert refused.work is None
    assert [one.refusal for one in refused.refused.values()] == [refusal] * 2
    assert [one.trajectory_id for one in refused.refused.values()] == ["0", "1"]
    for one in refused.refused.values():
        assert one.status == pb.TRAJECTORY_STATUS_INVALID_ARGUMENT
        assert_matches(one.message, message)
    assert served.rows == (0, 1) and not served.refused


@pytest.mark.pitfall("G9")
@pytest.mark.pitfall("L9")
@pytest.mark.pitfall("L15")
@pytest.mark.parametrize(("edit", "refusal", "message"), RESPONSES)
def test_a_bad_response_is_refused_alone(edit, refusal, message):
    (admitted,) = admit([change(edit)], rules())
    assert admitted.rows == (1,)
    assert admitted.work is not None
    assert [ids.tolist() for ids in admitted.work.responses] == [[10]]
    assert admitted.refused[0].refusal == refusal
    assert_matches(admitted.refused[0].message, message)


def assert_matches(text, pattern):
    assert re.search(pattern, text), text


def test_the_largest_legal_things_pass():
    group = prompt_group("g", [1, 3, 3, ROWS - 1], [[ROWS - 1] * 16], images=[b"x" * 100])
    (admitted,) = admit([group], rules())
    assert admitted.rows == (0,)


@pytest.mark.pitfall("L15")
def test_injected_placeholders_are_legal_where_the_engine_can_tell_them_apart():
    group = good()
    group.trajectories[0].response_ids = raw(8, PLACEHOLDER)
    group.trajectories[0].loss_mask = b"\1\0"
    (admitted,) = admit([group], rules(shares=True))
    assert admitted.rows == (0, 1)
    (admitted,) = admit([group], rules(shares=False))
    assert admitted.refused[0].status == pb.TRAJECTORY_STATUS_UNIMPLEMENTED


def test_as_many_named_ids_as_top_k_pass():
    (admitted,) = admit([change(set_first("named_ids", raw(*[5] * 16)))], rules())
    assert admitted.rows == (0, 1)
    assert admitted.work.named_ids[0].shape == (2, 8)


def test_groups_beyond_the_pixels_of_a_request_are_refused():
    groups = [change(set_image(b"x" * size)) for size in (60, 51, 50, 1)]
    for index, group in enumerate(groups):
        group.group_id = str(index)
    admitted = admit(groups, rules())
    assert [one.rows for one in admitted] == [(0, 1), (), (0, 1), ()]
    refused = admitted[1].refused[0]
    assert refused.refusal == pb.REFUSAL_IMAGE_TOO_LARGE
    assert "51 pixels make 111" in refused.message
    assert "limit is 110 (teacher.max_request_pixels)" in refused.message
    # Each request anew.
    assert admit(groups[1:2], rules())[0].rows == (0, 1)


def test_pixels_are_counted_before_an_image_is_decoded():
    decoded = []
    one = rules()
    watched = Rules(one.card, lambda data: PIXELS + 1, decoded.append)
    (admitted,) = admit([good()], watched)
    assert admitted.work is None and decoded == []


@pytest.mark.parametrize("field", ("student", "group_id", "trajectory_id"))
def test_long_names_refuse_the_call(field):
    def request(name):
        group = good()
        if field == "trajectory_id":
            group.trajectories[1].trajectory_id = name
        elif field == "group_id":
            group.group_id = name
        student = name if field == "student" else "s"
        return pb.ScoreRequest(student=student, groups=[group])

    check_names(request("x" * 256))
    with pytest.raises(InvalidCall, match=f"{field} 'x+\\.\\.\\.' has 257 bytes") as caught:
        check_names(request("x" * 257))
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidCall, match="258 bytes"):
        check_names(request("ä" * 129))


def test_messages_are_cut():
    group = good()
    group.prompt.token_ids = raw(*[PLACEHOLDER] * 200)
    group.prompt.ClearField("images")
    group.prompt.images.extend([image_message(b"x")] * 110)
    group.group_id = "ä" * 128
    (bad,) = admit([group], rules())
    assert bad.refused[0].refusal == pb.REFUSAL_PLACEHOLDER_COUNT
    assert "200 image placeholders" in bad.refused[0].message
    assert 290 <= len(bad.refused[0].message.encode()) <= 300
    _, twice = admit([change(set_id("ä" * 128)), change(set_id("ä" * 128))], rules())
    assert "ä" * 64 + "..." in twice.refused[0].message
    assert "ä" * 65 not in twice.refused[0].message


@pytest.mark.parametrize("name", ("g", "\U0010ffff" * 64, "ä" * 128))
@pytest.mark.parametrize("refused", (True, False))
def test_a_result_is_no_larger_than_foreseen(name, refused):
    """Twice the same names, so that a refusal's text holds them too."""
    group = change(set_id(name))
    group.trajectories[0].named_ids = raw(*range(4, 20))
    for one in group.trajectories:
        one.trajectory_id = name
    if not refused:
        group.trajectories[1].trajectory_id = name[:-1] + "é"
    options = Options(temperature=0.7, top_k=8, suppressed_ids=tuple(range(2000)))
    admitted = admit([group, group], rules())[int(refused)]
    outcomes = []
    for ids, named in zip(
        *((admitted.work.responses, admitted.work.named_ids) if admitted.work else ((), ())),
        strict=True,
    ):
        table = np.zeros((len(ids), 8))
        values = np.full(len(ids), -1.0, "f4")
        outcomes.append(
            Scores(values, table.astype("i4"), table.astype("f4"), np.zeros(named.shape, "f4"))
        )
    result = group_result(group, admitted, outcomes, "a" * 64, options)
    statuses = {one.status == pb.TRAJECTORY_STATUS_OK for one in result.trajectories}
    assert statuses == {not refused}
    assert result.ByteSize() <= reply_bytes(group, options)


def test_an_engines_long_complaint_is_cut():
    one = trajectory_result("0", Failure("no " * 10_000))
    assert len(one.message) == 300


def test_a_text_model_takes_no_images():
    (admitted,) = admit([good()], rules(images=False))
    assert admitted.refused[0].refusal == pb.REFUSAL_IMAGES_NOT_SUPPORTED


def test_duplicates_are_refused_and_originals_served():
    first, second = admit([good(), good()], rules())
    assert first.rows == (0, 1) and second.work is None
    assert second.refused[0].refusal == pb.REFUSAL_DUPLICATE_ID
    (admitted,) = admit([change(same_trajectory_id)], rules())
    assert admitted.rows == (0,)
    assert admitted.refused[1].refusal == pb.REFUSAL_DUPLICATE_ID


def test_a_teacher_prompt_takes_the_place_of_the_prompt():
    group = good()
    group.teacher_prompt.CopyFrom(common_pb2.Prompt(token_ids=encode_ids([1, 50, 51])))
    (admitted,) = admit([group], rules())
    assert admitted.work.prompt_ids.tolist() == [1, 50, 51]
    assert admitted.work.images == ()


def test_named_ids_keep_their_shape():
    group = change(set_first("named_ids", raw(1, 2, 3, 4, 5, 6)))
    (admitted,) = admit([group], rules())
    assert admitted.work.named_ids[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert admitted.work.named_ids[1].shape == (1, 0)


@pytest.mark.pitfall("L5")
@pytest.mark.parametrize("temperature", (0.0, -1.0, float("nan"), float("inf")))
def test_senseless_temperatures(temperature):
    with pytest.raises(InvalidCall, match="temperature"):
        read_options(pb.ScoreOptions(temperature=temperature), rules().card)


@pytest.mark.parametrize(
    ("data", "message"),
    (
        (raw(3, ROWS), r"id 96; this teacher's ids lie in \[0, 96\)"),
        (raw(-1), "id -1"),
        (raw(*range(ROWS)), "all 96 ids"),
        (b"123", "suppressed_ids: 3 bytes"),
    ),
)
def test_senseless_suppressed_ids(data, message):
    with pytest.raises(InvalidCall, match=message):
        read_options(pb.ScoreOptions(suppressed_ids=data), rules().card)


def test_too_many_suppressed_ids():
    card = rules().card
    card.embedding_rows = 10_000
    with pytest.raises(InvalidCall, match="4097 ids, the limit is 4096"):
        read_options(pb.ScoreOptions(suppressed_ids=raw(*range(4097))), card)


def test_equal_sets_of_suppressed_ids_share_a_batch():
    one, other = (
        read_options(pb.ScoreOptions(suppressed_ids=raw(*ids)), rules().card)
        for ids in ((7, 3), (3, 7, 7))
    )
    assert one == other and hash(one) == hash(other)
    assert one.suppressed_ids == (3, 7)
    most = raw(*range(ROWS - 1))
    assert (
        len(read_options(pb.ScoreOptions(suppressed_ids=most), rules().card).suppressed_ids) == 95
    )
    with pytest.raises(InvalidCall, match="the 1 ids that are not suppressed"):
        read_options(pb.ScoreOptions(suppressed_ids=most, top_k=2), rules().card)


@pytest.mark.pitfall("L4")
def test_options():
    assert read_options(pb.ScoreOptions(), rules().card).temperature == 1.0
    assert read_options(pb.ScoreOptions(temperature=2, top_k=8), rules().card).top_k == 8
    with pytest.raises(InvalidCall, match=r"top_k 9 .* 8 \(teacher\.max_top_k\)"):
        read_options(pb.ScoreOptions(top_k=9), rules().card)
    with pytest.raises(ValueError):
        pb.ScoreOptions(top_k=-1)
