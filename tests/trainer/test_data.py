"""Prompt files and their rendering."""

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modeling.load import load_model
from tests.tiny_models import BOS, IMAGE, LLAVA_FEATURES, draw_image, make_llama, make_llava
from trainer.__main__ import _read as read_all
from trainer.data import DataError, read_prompts, training_indices
from trainer.rewards import numeric
from trainer.settings import DataSettings

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def text_student(tmp_path_factory):
    return load_model(make_llama(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="session")
def student(tmp_path_factory):
    return load_model(make_llava(tmp_path_factory.mktemp("llava")))


def write_jsonl(folder, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_text_and_images_in_every_form(student, tmp_path):
    image = draw_image(0)
    (tmp_path / "image.png").write_bytes(image)
    encoded = "base64:" + base64.b64encode(image).decode()
    forms = ["image.png", encoded, {"path": "image.png"}]
    rows = [{"prompt": "<image>A?", "images": [form], "answer": 12} for form in forms]
    prompts = read_prompts(write_jsonl(tmp_path, *rows), student)
    for prompt in prompts:
        assert prompt.images == (image,)
        assert prompt.answer == "12"
        assert prompt.ids.dtype == np.int32
        # One <image> stands for as many placeholders as the model makes features.
        assert (prompt.ids == IMAGE).sum() == LLAVA_FEATURES
        assert student.tokenizer.decode(prompt.ids[-2:].tolist()) == "A?"


def test_parquet_with_image_bytes(student, tmp_path):
    rows = [
        {"prompt": "<image>A?", "images": [draw_image(1)], "answer": "3", "tag": "seen"},
        {"prompt": "P?", "images": [], "answer": None, "tag": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    first, second = read_prompts(tmp_path / "p.parquet", student)
    assert (first.answer, first.tag) == ("3", "seen")
    assert (second.answer, second.tag, second.images) == (None, "", ())


@pytest.mark.pitfall("L10")
def test_a_chat_template_is_applied_once_and_bos_never_doubled(text_student, tmp_path):
    text_student.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "hello"}]
    rows = [{"prompt": messages}, {"prompt": "hello"}]
    chat, plain = read_prompts(write_jsonl(tmp_path, *rows), text_student)
    assert text_student.tokenizer.decode(chat.ids.tolist()) == "<bos>user:hello assistant:"
    assert chat.ids.tolist().count(BOS) == 1
    assert plain.ids.tolist()[:2] != [BOS, BOS]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "?"}, "no column `prompt`"),
        ({"prompt": "A?", "images": ["x.png"]}, r"row 2: .*x\.png"),
        ({"prompt": "A?", "images": [{"bytes": None}]}, "must be bytes"),
        ({"prompt": "<image>A?"}, "0 images but 1 <image>"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "<bos><bos>A?"}, "two BOS"),
        ({"prompt": "<image>A?", "images": ["base64:AAAA"]}, "cannot be read"),
    ],
)
def test_a_bad_row_is_named(student, tmp_path, row, reason):
    path = write_jsonl(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(DataError, match=reason):
        read_prompts(path, student)


def test_a_file_of_another_kind_is_refused(student, tmp_path):
    (tmp_path / "p.csv").write_text("prompt\n")
    with pytest.raises(DataError, match=r"\.jsonl or \.parquet"):
        read_prompts(tmp_path / "p.csv", student)


def test_every_epoch_visits_every_prompt_once_in_another_order():
    steps = [training_indices(10, step, 4, seed=0) for step in range(5)]
    flat = [index for step in steps for index in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    # The step is the cursor: asking for step 3 alone gives the same prompts.
    assert training_indices(10, 3, 4, seed=0) == steps[3]
    assert training_indices(10, 3, 4, seed=1) != steps[3]


@pytest.mark.parametrize(
    ("response", "answer", "wanted"),
    [
        ("w=3 h=4 A=3*4=12", "12", 1.0),
        ("A=3*4=12.0", "12", 1.0),
        ("A=3*4=11", "12", 0.0),
        ("12 is not what it is: 13", "12", 0.0),
        ("no number", "12", 0.0),
        ("x=-3", "-3", 1.0),
    ],
)
def test_the_last_number_is_the_answer(response, answer, wanted):
    assert numeric(response, answer) == wanted


@pytest.mark.parametrize("answer", ["B", "nan", "inf", "1,000"])
def test_an_answer_that_cannot_be_graded_stops_at_the_start(text_student, tmp_path, answer):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}]
    data = DataSettings(train=write_jsonl(tmp_path, *rows))
    with pytest.raises(DataError, match=r"row 2: .*no finite number"):
        read_all(data, text_student)
