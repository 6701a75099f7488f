"""Fingerprints, cards, and who may learn from whom."""

from __future__ import annotations

import pytest

from modeling.card import describe_model
from modeling.compat import IncompatibleTeacher, check_compatible
from modeling.fingerprint import image_processor_fingerprint, tokenizer_fingerprint
from modeling.load import load_model, save_model
from preceptor.codec import encode_ids
from preceptor.v1.teacher_pb2 import TeacherCard
from tests.tiny_models import build_tokenizer, make_llama, make_llava


@pytest.mark.pitfall("L8")
def test_padded_vocabularies_agree_and_swapped_ids_do_not(tmp_path):
    small = describe_model(load_model(make_llama(tmp_path / "100", vocab_size=100)))
    large = describe_model(load_model(make_llama(tmp_path / "128", vocab_size=128)))
    assert (small.embedding_rows, large.embedding_rows) == (100, 128)
    assert small.tokenizer_size == large.tokenizer_size == 96
    check_compatible(small, large)

    build_tokenizer(swap=(40, 41)).save_pretrained(tmp_path / "128")
    swapped = describe_model(load_model(tmp_path / "128"))
    with pytest.raises(IncompatibleTeacher, match=r"different tokenizers.*\[tokenizer\]"):
        check_compatible(small, swapped)
    check_compatible(small, swapped, allow=["tokenizer"])


def test_an_added_token_changes_the_fingerprint():
    tokenizer = build_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    assert before == tokenizer_fingerprint(build_tokenizer())
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != before


@pytest.mark.pitfall("L7")
def test_different_eos_sets_are_refused_unless_allowed_by_name():
    student = TeacherCard(model_id="small", eos_ids=encode_ids([2]))
    teacher = TeacherCard(model_id="large", eos_ids=encode_ids([7]))
    with pytest.raises(IncompatibleTeacher) as caught:
        check_compatible(student, teacher)
    for part in ("small", "large", "[2]", "[7]", "trainer.allow_mismatch: [eos]"):
        assert part in str(caught.value)
    check_compatible(student, teacher, allow=["eos"])
    with pytest.raises(ValueError, match="allow_mismatch"):
        check_compatible(student, teacher, allow=["eoss"])


def test_image_processors_must_agree(tmp_path, load):
    student = describe_model(load("llava"))
    assert list(student.modalities) == ["text", "image"]
    text = describe_model(load("llama"))
    check_compatible(text, student)
    with pytest.raises(IncompatibleTeacher, match="only text"):
        check_compatible(student, text)
    other = load_model(make_llava(tmp_path, seed=4))
    check_compatible(student, describe_model(other))
    other.image_processor.image_mean = [0.1, 0.1, 0.1]
    with pytest.raises(IncompatibleTeacher, match="image_processor"):
        check_compatible(student, describe_model(other))
    assert image_processor_fingerprint(None) == ""


def test_identity_follows_the_weights(tmp_path, folders):
    one = load_model(folders["llama"])
    identity = describe_model(one).identity
    assert identity == describe_model(load_model(folders["llama"])).identity
    assert identity != describe_model(load_model(folders["llama"], dtype="bfloat16")).identity
    one.model.lm_head.weight.data.add_(1e-3)
    save_model(one, tmp_path)
    assert identity != describe_model(load_model(tmp_path)).identity
