from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from preceptor.cli import app
from preceptor.codec import encode_ids
from tests.cli.fake_teacher import IMPOSSIBLE, REFUSED, Teacher, serving


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    one = Teacher()
    with serving(one) as address:
        one.address = address
        yield one


def score(teacher: Teacher, file: Path, lines: list, *options: str):
    """Exit code, rows out, stderr."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    result = CliRunner().invoke(app, ["score", str(file), "--teacher", teacher.address, *options])
    return (
        result.exit_code,
        [json.loads(line) for line in result.stdout.splitlines()],
        result.stderr,
    )


def test_responses_get_their_logprobs_in_order(teacher, tmp_path):
    lines = [
        {"id": "mine", "prompt_ids": [1], "responses": [[3, 4], [5]]},
        "",
        {"prompt_ids": [1, 2], "response_ids": [11]},
    ]
    code, rows, _ = score(teacher, tmp_path / "in.jsonl", lines)
    assert code == 0
    assert rows == [
        {"id": "mine", "responses": [{"logprobs": [-0.3, -0.4]}, {"logprobs": [-0.5]}]},
        {"id": 3, "responses": [{"logprobs": [-1.1]}]},
    ]


def test_one_refused_response_fails_alone_and_sets_the_exit_code(teacher, tmp_path):
    lines = [
        {"prompt_ids": [1], "responses": [[3], [REFUSED]]},
        {"prompt_ids": [1], "response_ids": [4]},
    ]
    code, rows, _ = score(teacher, tmp_path / "in.jsonl", lines)
    assert code == 1
    good, refused = rows[0]["responses"]
    assert good == {"logprobs": [-0.3]}
    assert refused["status"] == "TRAJECTORY_STATUS_INVALID_ARGUMENT"
    assert refused["refusal"] == "REFUSAL_ID_OUT_OF_RANGE"
    assert "600 rows" in refused["message"]
    assert rows[1]["responses"] == [{"logprobs": [-0.4]}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_ids": [1', "no JSON"),
        ([1], "no JSON object"),
        ({"prompt_ids": [1]}, "responses"),
        ({"prompt_ids": [1], "responses": [[1]], "response_ids": [1]}, "either"),
        ({"prompt_ids": [], "response_ids": [1]}, "never empty"),
        ({"prompt_ids": [1], "response_ids": [-1]}, "-1"),
        ({"prompt_ids": [1], "response_ids": [1.5]}, "response_ids"),
        ({"prompt_ids": [True], "response_ids": [1]}, "prompt_ids"),
        ({"prompt_ids": [1], "responses": 3}, "responses"),
        ({"prompt_ids": [1], "response_ids": [1], "images": ["no.png"]}, "no.png"),
        ({"prompt_ids": [1], "response_ids": [1], "images": "no.png"}, "images"),
        ({"prompt_ids": [1], "response_ids": [1], "images": ["a\0b"]}, "cannot read the image"),
        ({"prompt_ids": [1], "response_ids": [1], "imagse": []}, "imagse"),
        ('{"id": NaN, "prompt_ids": [1], "response_ids": [1]}', '"id" is no JSON'),
        ('{"id": [1e999], "prompt_ids": [1], "response_ids": [1]}', '"id" is no JSON'),
        ('{"prompt_ids": [NaN], "response_ids": [1]}', "prompt_ids"),
        ({"prompt_ids": [1], "responses": [4, 5, 2]}, "responses[0]"),
        ({"prompt_ids": [[1, 2]], "response_ids": [1]}, "prompt_ids"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_bad_line_is_named_and_its_neighbours_are_scored(teacher, tmp_path, line, words):
    good = {"prompt_ids": [1], "response_ids": [3]}
    code, rows, stderr = score(teacher, tmp_path / "in.jsonl", [good, line, good])
    assert code == 1
    assert f"in.jsonl:2: {rows[1]['error']}" in stderr
    assert words in rows[1]["error"]
    assert rows[1]["line"] == 2
    assert [row["id"] for row in (rows[0], rows[2])] == [1, 3]


def test_images_are_read_beside_the_file(teacher, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"picture")
    line = {"prompt_ids": [1], "response_ids": [3], "images": ["pictures/a.png"]}
    code, _, _ = score(teacher, tmp_path / "in.jsonl", [line])
    assert code == 0
    assert teacher.requests[0].groups[0].prompt.images[0].data == b"picture"


def test_options_reach_the_teacher(teacher, tmp_path):
    line = {"prompt_ids": [1], "response_ids": [3]}
    output = tmp_path / "out.jsonl"
    options = ["--student", "me", "--temperature", "0.5", "--top-k", "2", "--output", str(output)]
    options += ["--suppress", "7", "--suppress", "3"]
    code, printed, _ = score(teacher, tmp_path / "in.jsonl", [line], *options)
    assert (code, printed) == (0, [])
    (request,) = teacher.requests
    assert (request.student, request.options.temperature, request.options.top_k) == ("me", 0.5, 2)
    assert request.options.suppressed_ids == encode_ids([3, 7])
    (row,) = map(json.loads, output.read_text().splitlines())
    assert row["responses"][0]["top_ids"] == [[0, 1]]
    assert row["responses"][0]["top_logprobs"] == [[0.0, -0.1]]


def test_minus_infinity_is_legal_and_valid_json(teacher, tmp_path):
    line = {"prompt_ids": [1], "response_ids": [IMPOSSIBLE, 1]}
    code, rows, _ = score(teacher, tmp_path / "in.jsonl", [line])
    assert code == 0
    assert rows[0]["responses"] == [{"logprobs": ["-inf", -0.1]}]


def test_a_long_file_goes_out_in_pieces(teacher, tmp_path):
    lines = [{"prompt_ids": [1] * 50, "response_ids": [number % 400]} for number in range(600)]
    code, rows, _ = score(teacher, tmp_path / "in.jsonl", lines)
    assert code == 0
    assert [row["id"] for row in rows] == list(range(1, 601))
    assert [-10 * row["responses"][0]["logprobs"][0] for row in rows[:3]] == [0, 1, 2]
    assert max(len(request.groups) for request in teacher.requests) <= 256


def test_a_teacher_that_is_not_there_is_named(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    options = ["--teacher", "127.0.0.1:1", "--retry-seconds", "0.2"]
    result = CliRunner().invoke(app, ["score", str(tmp_path / "in.jsonl"), *options])
    assert result.exit_code == 2
    assert "127.0.0.1:1" in result.stderr
