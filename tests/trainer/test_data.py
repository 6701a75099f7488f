"""Prompt files and their rendering."""

import base64
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, List, Value
from tokenizers.processors import TemplateProcessing

from modeling.load import load_model
from tests.tiny_models import BOS, IMAGE, LLAVA_FEATURES, draw_image, make_llama, make_llava
from trainer.data import (
    DataError,
    Prompt,
    check_answers,
    fitting,
    read_prompts,
    training_indices,
)
from trainer.data_settings import DataSettings
from trainer.rewards import load_reward

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# As LLaVA's: content that is no list of parts is left out without a word.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}[<image>]"
    "{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# As Qwen-VL's: takes both forms, and writes marks of its own around an image of the parts form.
EITHER_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[<image>]{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def loaded_text_student(tmp_path_factory):
    return load_model(make_llama(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="session")
def loaded_student(tmp_path_factory):
    return load_model(make_llava(tmp_path_factory.mktemp("llava")))


@pytest.fixture
def text_student(loaded_text_student, monkeypatch):
    monkeypatch.setattr(loaded_text_student.tokenizer, "chat_template", None)
    return loaded_text_student


@pytest.fixture
def student(loaded_student, monkeypatch):
    monkeypatch.setattr(loaded_student.tokenizer, "chat_template", None)
    return loaded_student


def shown(student, ids):
    """What a prompt says, with one <image> for the features of one."""
    text = student.tokenizer.decode(np.asarray(ids).tolist())
    return text.replace("<image>" * LLAVA_FEATURES, "<image>")


def user(content):
    return [{"role": "user", "content": content}]


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
def test_a_chat_template_is_applied_once_and_bos_never_doubled(tmp_path):
    student = load_model(make_llama(tmp_path / "model"))
    student.tokenizer.chat_template = TEMPLATE
    # As many do: the tokenizer adds a BOS, and so does the template.
    student.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    rows = [{"prompt": user("hello")}, {"prompt": "hello", "teacher_prompt": user("hello")}]
    chat, plain = read_prompts(write_jsonl(tmp_path, *rows), student)
    for ids in (chat.ids, plain.teacher_ids):
        assert student.tokenizer.decode(ids.tolist()) == "<bos>user:hello assistant:"
        assert ids.tolist().count(BOS) == 1
    assert student.tokenizer.decode(plain.ids.tolist()) == "<bos>hello"
    with pytest.raises(DataError, match="two BOS"):
        read_prompts(write_jsonl(tmp_path, {"prompt": "<bos>hello"}), student)


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
        ({"prompt": "<image>A?", "images": "x.png"}, "images are a list, not str"),
        ({"prompt": None}, "text or chat messages, not NoneType"),
        ({"prompt": user("A?")}, "the tokenizer of .* has no chat template; give text"),
        ({"prompt": "A?", "teacher": 3}, "teacher is a name, not 3"),
        ({"prompt": "A?", "teacher_prompt": ""}, "teacher_prompt: the prompt is empty"),
        ({"prompt": "A?", "teacher_prompt": "<image>"}, "teacher_prompt: 0 images but 1 <image>"),
        ({"prompt": "A?", "answer": [1, 2]}, r"answer is one text or .*, not \[1, 2\]"),
        ({"prompt": "A?", "answer": True}, "not True"),
        ({"prompt": "A?", "answer": float("nan")}, "not nan"),
        ({"prompt": "A?", "reward_model": {"ground_truth": {"a": 1}}}, "reward_model.ground_truth"),
        ({"prompt": "A?", "reward_model": "rule"}, "reward_model is a mapping, not str"),
        (
            {"prompt": "A?", "answer": 3, "reward_model": {"ground_truth": "4"}},
            "answer '3' and reward_model.ground_truth '4' contradict each other",
        ),
    ],
)
def test_a_bad_row_is_named(student, tmp_path, row, reason):
    path = write_jsonl(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(DataError, match=reason):
        read_prompts(path, student)


def test_bad_messages_are_named(student, tmp_path):
    student.tokenizer.chat_template = EITHER_TEMPLATE
    part = {"type": "image", "image": "x.png"}
    for prompt, reason in [
        (["hello"], "has role and content, this is 'hello'"),
        ([{"content": "hello"}], "has role and content"),
        ([{"role": "user"}], "text or a list of parts, not NoneType"),
        (user([{"type": "video"}]), r"a part is .*; this is \{'type': 'video'\}"),
        (user([part]), "the column `images`"),
        (user(["hello"]), "a part is"),
        ([], "the prompt is empty"),
        ({"role": "user", "content": "hello"}, "not dict"),
        (user("<image>"), "0 images but 1 <image>"),
    ]:
        with pytest.raises(DataError, match=f"row 1: .*{reason}"):
            read_prompts(write_jsonl(tmp_path, {"prompt": prompt}), student)


def test_a_template_that_refuses_is_named(text_student, tmp_path):
    text_student.tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        + TEMPLATE
    )
    rows = [{"prompt": user("a")}, {"prompt": user("a") * 2}]
    with pytest.raises(DataError, match=r"row 2: the chat template refuses .*one message only"):
        read_prompts(write_jsonl(tmp_path, *rows), text_student)


def test_a_template_that_drops_what_it_is_given_is_refused(text_student, tmp_path):
    text_student.tokenizer.chat_template = "{{ bos_token }}assistant:"
    with pytest.raises(DataError, match="writes neither text nor parts"):
        read_prompts(write_jsonl(tmp_path, {"prompt": user("a")}), text_student)


@pytest.mark.parametrize(
    "content",
    [
        "<image>what",
        [{"type": "image"}, {"type": "text", "text": "what"}],
        # Parquet and `datasets` give all parts the same keys.
        [{"type": "image", "text": None}, {"type": "text", "text": "what"}],
    ],
)
@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (TEMPLATE, "<bos>system:be good user:<image>what assistant:"),
        (PARTS_TEMPLATE, "<bos>system:be good user:[<image>]what assistant:"),
        (EITHER_TEMPLATE, "<bos>system:be good user:[<image>]what assistant:"),
    ],
)
def test_images_in_messages_whatever_form_the_template_takes(
    student, tmp_path, template, wanted, content
):
    student.tokenizer.chat_template = template
    messages = [{"role": "system", "content": "be good"}, *user(content)]
    (tmp_path / "image.png").write_bytes(draw_image(0))
    rows = [{"prompt": messages, "images": ["image.png"]}]
    [prompt] = read_prompts(write_jsonl(tmp_path, *rows), student)
    assert shown(student, prompt.ids) == wanted
    assert (prompt.ids == IMAGE).sum() == LLAVA_FEATURES
    assert prompt.ids.tolist().count(BOS) == 1


VERL_ROWS = [
    {
        "data_source": "owner/geometry",
        "prompt": user("<image>A?"),
        "images": [{"bytes": draw_image(0), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "extra_info": {"split": "train", "index": 0},
    },
    {
        "data_source": "owner/text",
        "prompt": user("B?"),
        "images": [],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3/4"},
        "extra_info": {"split": "train", "index": 1},
    },
]


def check_verl_prompts(student, prompts):
    first, second = prompts
    assert (first.answer, first.tag, first.images) == ("12", "owner/geometry", (draw_image(0),))
    assert (second.answer, second.tag, second.images) == ("3/4", "owner/text", ())
    assert shown(student, first.ids) == "<bos>user:<image>A? assistant:"
    assert shown(student, second.ids) == "<bos>user:B? assistant:"
    assert first.teacher_ids is second.teacher_ids is None
    assert first.teacher == second.teacher == ""


def test_verls_parquet_is_read_as_it_is(student, tmp_path):
    student.tokenizer.chat_template = TEMPLATE
    pq.write_table(pa.Table.from_pylist(VERL_ROWS), tmp_path / "train.parquet")
    check_verl_prompts(student, read_prompts(tmp_path / "train.parquet", student))


def test_a_saved_data_set_with_verls_columns_is_read_as_it_is(student, tmp_path):
    student.tokenizer.chat_template = TEMPLATE
    datasets.disable_progress_bars()
    message = {"role": Value("string"), "content": Value("string")}
    features = Features(
        {
            "data_source": Value("string"),
            "prompt": List(message),
            "images": List(datasets.Image()),
            "ability": Value("string"),
            "reward_model": {"style": Value("string"), "ground_truth": Value("string")},
            "extra_info": {"split": Value("string"), "index": Value("int64")},
        }
    )
    Dataset.from_list(VERL_ROWS, features=features).save_to_disk(tmp_path / "saved")
    check_verl_prompts(student, read_prompts(tmp_path / "saved", student))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": 3.0}, "3"),
        ({"answer": 0.25}, "0.25"),
        ({"answer": ["B"]}, "B"),
        ({"answer": None, "reward_model": {"ground_truth": 7}}, "7"),
        ({"reward_model": {"ground_truth": [7.0]}}, "7"),
        ({"answer": 7, "reward_model": {"ground_truth": " 7"}}, "7"),
        ({"answer": "a b"}, "a b"),
        ({"reward_model": None}, None),
        ({"reward_model": {"style": "model"}}, None),
    ],
)
def test_answers_in_every_form(text_student, tmp_path, row, answer):
    [prompt] = read_prompts(write_jsonl(tmp_path, {"prompt": "a", **row}), text_student)
    assert prompt.answer == answer


def test_a_tag_goes_before_the_data_source(text_student, tmp_path):
    rows = [{"prompt": "a", "tag": "x", "data_source": "y"}, {"prompt": "a", "data_source": "y"}]
    prompts = read_prompts(write_jsonl(tmp_path, *rows), text_student)
    assert [prompt.tag for prompt in prompts] == ["x", "y"]


def test_the_teacher_may_see_another_prompt(student, tmp_path):
    student.tokenizer.chat_template = TEMPLATE
    image = draw_image(0)
    (tmp_path / "image.png").write_bytes(image)
    both = {"prompt": "<image>A?", "images": ["image.png"]}
    rows = [
        {**both, "teacher_prompt": user("12<image>"), "teacher": "large"},
        {**both, "teacher_prompt": "text 12"},
        {**both, "teacher_prompt": None, "teacher": None},
    ]
    shows, hides, same = read_prompts(write_jsonl(tmp_path, *rows), student)
    assert shown(student, shows.teacher_ids) == "<bos>user:12<image> assistant:"
    assert shows.teacher_ids.dtype == np.int32
    assert (shows.teacher_images, shows.teacher) == ((image,), "large")
    assert shown(student, hides.teacher_ids) == "text 12"
    assert (hides.images, hides.teacher_images) == ((image,), ())
    assert (same.teacher_ids, same.teacher_images, same.teacher) == (None, (), "")
    assert all(shown(student, prompt.ids) == "<image>A?" for prompt in (shows, hides, same))


def test_the_teacher_sees_all_images_or_none(student, tmp_path):
    (tmp_path / "image.png").write_bytes(draw_image(0))
    row = {
        "prompt": "<image><image>",
        "images": ["image.png"] * 2,
        "teacher_prompt": "<image>",
    }
    with pytest.raises(DataError, match="teacher_prompt: 2 images but 1 <image>"):
        read_prompts(write_jsonl(tmp_path, row), student)


def of_length(tokens, teacher=None):
    ids = None if teacher is None else np.zeros(teacher, np.int32)
    return Prompt(np.zeros(tokens, np.int32), (), None, "", teacher_ids=ids)


def test_overlong_prompts_stop_or_are_dropped_and_counted():
    # 8 + 4 is the limit; a teacher's prompt needs room too.
    prompts = [of_length(8), of_length(9), of_length(2, teacher=8), of_length(2, teacher=9)]
    kept, dropped = fitting("train", prompts, 4, 12, "drop")
    assert [id(one) for one in kept] == [id(prompts[0]), id(prompts[2])]
    assert dropped == 2
    with pytest.raises(
        DataError, match=r"train, row 2: a prompt of 9 tokens .*max_new_tokens 4 .*12 tokens"
    ):
        fitting("train", prompts, 4, 12, "error")
    with pytest.raises(DataError, match=r"row 2: a teacher prompt of 9 tokens .*overlong to drop"):
        fitting("train", [prompts[0], prompts[3]], 4, 12, "error")
    assert fitting("train", [prompts[0], prompts[2]], 4, 12, "error")[1] == 0
    assert fitting("evaluation", [], 4, 12, "drop") == ([], 0)
    with pytest.raises(DataError, match="train: all 2 prompts are too long"):
        fitting("train", [prompts[1], prompts[3]], 4, 12, "drop")


def test_settings_name_their_choices():
    assert DataSettings(train="hf:owner/name").model_dump() == {
        "train": "hf:owner/name",
        "evaluation": None,
        "overlong": "error",
        "reward": "numeric",
    }
    with pytest.raises(ValueError, match="'error' or 'drop'"):
        DataSettings(train="p.jsonl", overlong="cut")


def test_every_epoch_visits_every_prompt_once_in_another_order():
    steps = [training_indices(10, step, 4, seed=0) for step in range(5)]
    flat = [index for step in steps for index in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    # The step is the cursor: asking for step 3 alone gives the same prompts.
    assert training_indices(10, 3, 4, seed=0) == steps[3]
    assert training_indices(10, 3, 4, seed=1) != steps[3]


@pytest.mark.parametrize("answer", ["B", "nan", "inf", "1,000"])
def test_an_answer_that_cannot_be_graded_stops_at_the_start(text_student, tmp_path, answer):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}]
    prompts = read_prompts(write_jsonl(tmp_path, *rows), text_student)
    with pytest.raises(DataError, match=r"p\.jsonl, row 2: .*no finite number"):
        check_answers("p.jsonl", prompts, load_reward("numeric"))
    check_answers("p.jsonl", prompts, load_reward("exact"))


def test_only_evaluation_needs_answers(text_student, tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}]
    prompts = read_prompts(write_jsonl(tmp_path, *rows), text_student)
    check_answers("train", prompts, load_reward("numeric"))
    with pytest.raises(DataError, match="evaluation, row 2: no answer to grade by"):
        check_answers("evaluation", prompts, load_reward("numeric"), required=True)
