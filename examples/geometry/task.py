"""What is asked and what is answered: combinations, the held-out fifth, worked answers."""

import random
from dataclasses import dataclass

LARGEST_SIDE = 6
SIDES = range(1, LARGEST_SIDE + 1)
QUESTIONS = ("A", "P")  # area, perimeter
HELD_OUT_SHARE = 0.2
SPLIT_SEED = 20260609


@dataclass(frozen=True, order=True)
class Combination:
    """A rectangle of ``width`` x ``height`` cells and the question asked about it."""

    width: int
    height: int
    question: str

    @property
    def prompt(self) -> str:
        """The prompt's text, with one ``<image>`` where the picture belongs."""
        return f"<image>{self.question}?\n"

    @property
    def answer(self) -> str:
        """The number asked for."""
        return str(result(self.question, self.width, self.height))

    @property
    def mirrored(self) -> "Combination":
        return Combination(self.height, self.width, self.question)


def result(question: str, first: int, second: int) -> int:
    return first * second if question == "A" else 2 * (first + second)


def worked_answer(
    question: str,
    width: int,
    height: int,
    operands: tuple[int, int] | None = None,
    value: int | None = None,
) -> str:
    """The short derivation, such as ``w=3 h=4 A=3*4=12``.

    ``operands`` and ``value`` replace what a careful writer would put there; the teacher is
    trained on a share of such slips, so that it can judge a student's text which has them.
    """
    first, second = operands or sorted((width, height))
    formula = f"{first}*{second}" if question == "A" else f"2*({first}+{second})"
    value = result(question, first, second) if value is None else value
    return f"w={width} h={height} {question}={formula}={value}"


def read_answer(text: str) -> str:
    """The final number of a worked answer, or an empty string."""
    return text.rpartition("=")[2].strip()


def combinations() -> list[Combination]:
    return [Combination(w, h, q) for w in SIDES for h in SIDES for q in QUESTIONS]


def held_out() -> frozenset[Combination]:
    """A fifth of all combinations, never two mirror images (3x4 and 4x3) of one question.

    Every side, every result and every pair of sides is therefore still seen in training, and
    what is tested is whether they are put together.
    """
    wanted = round(HELD_OUT_SHARE * len(combinations()))
    candidates = [c for c in combinations() if c.width != c.height]
    random.Random(SPLIT_SEED).shuffle(candidates)
    chosen: set[Combination] = set()
    for candidate in candidates:
        if len(chosen) < wanted and candidate.mirrored not in chosen:
            chosen.add(candidate)
    return frozenset(chosen)


def seen() -> list[Combination]:
    return [c for c in combinations() if c not in held_out()]
