"""Verifiable rewards: right, wrong, and text that would break a grader."""

import os
import signal
import sys
import threading

import pytest

from trainer.rewards import RewardError, exact, load_reward, numeric
from trainer.rewards.boxed import FORMAT, last_boxed
from trainer.rewards.math_grader import MathGrader

RIGHT, WRONG = 1.0, 0.0


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
    assert load_reward("numeric").score(response, answer) == wanted


@pytest.mark.parametrize(
    ("response", "wanted"), [(" blue\n", 1.0), ("blue.", 0.0), ("Blue", 0.0), ("", 0.0)]
)
def test_exact_ignores_only_white_space_around(response, wanted):
    assert exact(response, "blue ") == wanted
    assert load_reward("exact").score(response, "blue ") == wanted


@pytest.mark.parametrize(
    ("response", "answer", "wanted"),
    [
        ("so it is $0.5$", "1/2", RIGHT),
        (r"so it is \boxed{\frac{1}{2}}", "0.5", RIGHT),
        # Answers need no marks of LaTeX to be read as mathematics.
        (r"\boxed{1+x}", "x+1", RIGHT),
        (r"\boxed{1+x}", "$x+1$", RIGHT),
        (r"\boxed{B}", "B", RIGHT),
        (r"\boxed{12}", "12 cm", RIGHT),
        ("so it is $0.6$", "1/2", WRONG),
        (r"\boxed{1-x}", "x+1", WRONG),
        ("", "3", WRONG),
        ("nothing", "3", WRONG),
    ],
)
def test_math_verify_compares_mathematics(response, answer, wanted):
    assert load_reward("math_verify").score(response, answer) == wanted


@pytest.mark.parametrize(
    "response",
    [
        "\ud800 no unicode",
        "\\boxed{\x00",
        "\\boxed{" + "{" * 2000,
        "$" * 5000,
        "\\frac{1}{0}",
        "\\boxed{" + "9" * 5000 + "}",
        "a\nb\r\u2028c\u0085",
    ],
)
def test_no_model_text_breaks_the_grader(response):
    reward = load_reward("math_verify")
    assert reward.score(response, "3") == WRONG
    assert reward.score("3", "3") == RIGHT


def test_grading_ends_in_any_thread_what_would_never_end_and_goes_on(caplog):
    before = signal.getsignal(signal.SIGALRM)
    rewards: list[float] = []
    grader = MathGrader()

    def grade():
        rewards.append(grader.score(r"\boxed{9^{9^{9^{9}}}}", "3"))
        rewards.append(grader.score(r"\boxed{3}", "3"))

    # math-verify's own limit works in the main thread only.
    thread = threading.Thread(target=grade)
    thread.start()
    thread.join(timeout=60)
    assert rewards == [WRONG, RIGHT]
    assert "counted as wrong" in caplog.text
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_grader_that_was_killed_is_started_again():
    grader = MathGrader()
    assert grader.score("3", "3") == RIGHT
    worker = grader._worker
    assert worker is not None
    # The launcher's SIGTERM is for the trainer, which grades on while it stops.
    os.kill(worker.pid, signal.SIGTERM)
    assert grader.score("3", "3") == RIGHT
    assert grader._worker is worker
    worker.kill()
    worker.wait()
    assert grader.score("3", "3") == RIGHT


def test_the_worker_ends_with_its_trainer():
    grader = MathGrader()
    grader.score("3", "3")
    worker = grader._worker
    assert worker is not None and worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(timeout=30) == 0


THOUGHTS = "<think>so</think> "


@pytest.mark.parametrize(
    ("response", "answer", "wanted"),
    [
        (THOUGHTS + r"It is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (THOUGHTS + r"It is \boxed{2}", "0.5", 0.1),
        (r"It is \boxed{\frac{1}{2}}", "0.5", 0.9),
        # The last box counts.
        (THOUGHTS + r"\boxed{2} no, \boxed{3}", "3", 1.0),
        (THOUGHTS + r"\boxed{3} no, \boxed{2}", "3", 0.1),
        # The box stands in the thoughts: the answer is right, the form is not.
        (r"<think>\boxed{3}</think> three", "3", 0.9),
        (r"\boxed{3", "3", 0.0),
        ("3", "3", 0.0),
        ("", "3", 0.0),
        # Equal as text, whatever math-verify makes of it.
        (THOUGHTS + r"\boxed{a (b)}", "a (b)", 1.0),
    ],
)
def test_boxed_weighs_accuracy_and_format(response, answer, wanted):
    assert load_reward("boxed").score(response, answer) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b}{c{d}}} e}", "a{b}{c{d}}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{3} \boxed{4", None),
        (r"\boxed{3\}", None),
        ("3", None),
    ],
)
def test_a_box_ends_where_its_braces_balance(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("\n<think>a\nb</think>\n\\boxed{3}\n", True),
        ("<think></think>\\boxed{}", True),
        ("<think>a</think>\\boxed{3", False),
        ("<think>a \\boxed{3}", False),
        ("a</think>\\boxed{3}", False),
        ("so <think>a</think>\\boxed{3}", False),
        ("\\boxed{3} <think>a</think>", False),
    ],
)
def test_the_form_is_thoughts_and_then_a_box(response, wanted):
    assert (FORMAT.match(response) is not None) == wanted


@pytest.mark.timeout(30)
def test_the_form_is_found_without_backtracking():
    # 10,000 marks of each kind and no end: for ever, if every pair of them were tried.
    assert FORMAT.match("<think>" + "</think>\\boxed{" * 10_000) is None


def test_a_reward_of_ones_own_is_imported(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "import numpy\n"
        "def length(response, answer): return len(response) / int(answer)\n"
        "def numpys(response, answer): return numpy.float32(0.5)\n"
        "def broken(response, answer): return {'nan': float('nan'), 'none': None}[answer]\n"
        "constant = 3\n"
    )
    (tmp_path / "own_mistake.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("own_rewards:length")
    assert reward.name == "own_rewards:length"
    reward.check("anything")
    assert reward.score("abc", "6") == 0.5
    half = load_reward("own_rewards:numpys").score("", "")
    assert half == 0.5 and type(half) is float
    for answer in ("nan", "none"):
        with pytest.raises(RewardError, match=r"'own_rewards:broken' returned .*no finite number"):
            load_reward("own_rewards:broken").score("", answer)
    with pytest.raises(RewardError, match=r"'own_rewards:constant' is int"):
        load_reward("own_rewards:constant")
    for path in (
        "own_rewards:absent",
        "own_absent:f",
        "own_mistake:f",
        ":f",
        "own_rewards:",
        ".:f",
    ):
        with pytest.raises(RewardError, match="does not import"):
            load_reward(path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("numerical", "did you mean numeric"),
        ("math-verify", "did you mean math_verify"),
        ("", "There are exact, numeric, math_verify, boxed"),
        ("os.path", "package.module:function"),
    ],
)
def test_an_unknown_reward_is_refused_with_the_nearest(name, hint):
    with pytest.raises(RewardError, match=hint):
        load_reward(name)


@pytest.mark.parametrize(
    ("name", "good", "bad", "reason"),
    [
        ("numeric", "1.5", "B", "'B' is no finite number"),
        ("numeric", "-3", "nan", "no finite number"),
        ("numeric", "3", "inf", "no finite number"),
        ("numeric", "3", "1,000", "no finite number"),
        ("exact", "B", " \n", "blank"),
        ("math_verify", r"\frac{1}{2}", "", "cannot read the answer"),
        ("boxed", "x+1", "$$", "cannot read the answer"),
    ],
)
def test_an_answer_that_cannot_be_graded_by_is_refused(name, good, bad, reason):
    reward = load_reward(name)
    reward.check(good)
    with pytest.raises(RewardError, match=reason):
        reward.check(bad)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match=r"pip install 'preceptor\[math\]'"):
        MathGrader()
