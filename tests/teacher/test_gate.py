"""Each bad thing is refused alone, by name, with the numbers a caller needs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from modeling.images import ImageError, ImageTooLarge
from preceptor.codec import encode_ids, image_message, prompt_group
from preceptor.v1 import common_pb2
from preceptor.v1 import teacher_pb2 as pb
from services.teacher.gate import InvalidOptions, Rules, admit, read_options

PLACEHOLDER, ROWS, LONGEST = 3, 96, 20


def rules(images=True, shares=True):
    def count(data: bytes) -> int:
        if data == b"huge":
            raise ImageTooLarge("the image has 9 pixels, the limit is 4")
        if data == b"broken":
            raise ImageError("the image cannot be read")
        return 2

    card = pb.TeacherCard(
        model_id="tiny",
        embedding_rows=ROWS,
        max_sequence_tokens=LONGEST,
        modalities=["text", "image"] if images else ["text"],
        image_placeholder_id=PLACEHOLDER if images else None,
        limits=pb.Limits(max_top_k=8, max_image_bytes=100),
        shares_prompts=shares,
    )
    return Rules(card, count)


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
    (set_image(b"huge"), pb.REFUSAL_IMAGE_TOO_LARGE, "max_image_pixels"),
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
    with pytest.raises(InvalidOptions, match="temperature"):
        read_options(pb.ScoreOptions(temperature=temperature), rules().card)


@pytest.mark.pitfall("L4")
def test_options():
    assert read_options(pb.ScoreOptions(), rules().card).temperature == 1.0
    assert read_options(pb.ScoreOptions(temperature=2, top_k=8), rules().card).top_k == 8
    with pytest.raises(InvalidOptions, match=r"top_k 9 .* 8 \(teacher\.max_top_k\)"):
        read_options(pb.ScoreOptions(top_k=9), rules().card)
    with pytest.raises(ValueError):
        pb.ScoreOptions(top_k=-1)
