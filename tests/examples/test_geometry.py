"""The geometry example: its split, its drawings, its committed models."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.geometry import task
from examples.geometry.data import write_prompts
from examples.geometry.draw import IMAGE_SIZE, draw, png
from examples.geometry.outcome import Outcome
from modeling.card import describe_model
from modeling.compat import check_compatible
from modeling.load import load_model
from modeling.sharing import check_sharing
from trainer.data import read_prompts
from trainer.rewards import numeric

MODELS = Path(__file__).parents[2] / "examples" / "geometry" / "models"


def test_a_fifth_is_held_out_and_every_side_and_question_is_seen():
    every, held = task.combinations(), task.held_out()
    assert len(held) / len(every) == pytest.approx(0.2, abs=0.01)
    assert set(task.seen()) | held == set(every)
    seen = task.seen()
    for question in task.QUESTIONS:
        mine = [one for one in seen if one.question == question]
        assert {one.width for one in mine} == {one.height for one in mine} == set(task.SIDES)
        # Their mirror images are seen, so every result is.
        assert all(one.mirrored in seen for one in held if one.question == question)


def test_training_prompts_are_never_held_out_and_the_seed_decides_them(tmp_path):
    student = load_model(MODELS / "student")
    paths = [
        write_prompts(tmp_path / name, seed=seed, train=80, evaluation=72)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert paths[0][0].read_bytes() == paths[1][0].read_bytes() != paths[2][0].read_bytes()
    train, evaluation = (read_prompts(path, student) for path in paths[0])
    assert {prompt.tag for prompt in train} == {"seen"}
    assert {prompt.tag for prompt in evaluation} == {"seen", "unseen"}
    assert len({prompt.images for prompt in train}) == 80


def test_pictures_vary_and_hold_as_many_cells_as_they_should():
    rng = np.random.default_rng(0)
    pictures = [draw(3, 4, rng) for _ in range(4)]
    assert len({picture.tobytes() for picture in pictures}) == 4
    assert all(picture.size == (IMAGE_SIZE, IMAGE_SIZE) for picture in pictures)
    assert Image.open(io.BytesIO(png(pictures[0]))).tobytes() == pictures[0].tobytes()


@pytest.mark.parametrize(
    ("combination", "answer", "worked"),
    [
        (task.Combination(4, 3, "A"), "12", "w=4 h=3 A=3*4=12"),
        (task.Combination(2, 5, "P"), "14", "w=2 h=5 P=2*(2+5)=14"),
    ],
)
def test_answers(combination, answer, worked):
    assert combination.answer == answer
    text = task.worked_answer(combination.question, combination.width, combination.height)
    assert text == worked
    assert numeric(text, answer) == 1.0


def test_the_models_are_small_share_prompts_and_fit_each_other():
    sizes = [path.stat().st_size for path in MODELS.glob("*/model.safetensors")]
    assert len(sizes) == 2
    assert sum(sizes) < 4_000_000
    teacher, student = (load_model(MODELS / name) for name in ("teacher", "student"))
    assert check_sharing(teacher)
    assert check_sharing(student)
    check_compatible(describe_model(student), describe_model(teacher))
    counts = [sum(p.numel() for p in one.model.parameters()) for one in (student, teacher)]
    assert counts[0] < counts[1]


def outcome(**changes):
    row = {"raw_kl": 0.5, "accuracy": 0.5, "prompts": 600}
    values = {
        "teacher": 0.98,
        "before": row,
        "after": {**row, "raw_kl": 0.1, "accuracy": 0.9},
        "steps": 10,
        "tokens_scored": 1,
        "rollouts": 1,
        "counted_once": True,
        "seconds": 1.0,
    }
    return Outcome(**{**values, **changes})


def test_a_run_that_keeps_the_promises_and_runs_that_do_not():
    assert outcome().broken_promises() == []
    after = outcome().after
    assert outcome(teacher=0.89).broken_promises() == ["teacher accuracy >= 0.9"]
    assert outcome(counted_once=False).broken_promises() == ["every rollout counted once"]
    assert outcome(after={**after, "raw_kl": 0.2}).broken_promises() == ["raw KL falls >= 3 times"]
    weak = outcome(after={**after, "accuracy": 0.6}).broken_promises()
    assert weak == ["student gains >= 0.25", "student reaches >= 0.75 of the teacher"]
