"""Make the demo's strong teacher and weak student from worked answers.

    python -m examples.geometry.make_models --out examples/geometry/models

The teacher learns until it has mastered the task; a share of its worked answers contain slips,
consistently continued, so that it can judge the imperfect text a student writes instead of finding
all of it equally impossible. The student is smaller, is stopped earlier, and has picked up a habit:
in most of the worked answers it learned from, an area was reckoned by adding the sides. Both are
seeded. Neither is ever shown a held-out combination's picture with its question.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from examples.geometry import architecture, task
from examples.geometry.draw import draw
from examples.geometry.tokenizer import build_tokenizer

IGNORED = -100
ANSWER_TOKENS = len("w=1 h=1 P=2*(1+1)=24") + 2  # with <eos>, and room for a slip
MISREAD, MISCOPY, MISCALCULATE = 0.10, 0.03, 0.08  # shares of slips in the teacher's answers
HABIT = 0.6  # share of the student's area answers that add where they should multiply
LEARNING_RATE = 3e-3
WARM_UP = 100
BATCH = 64
console = Console()


@dataclass(frozen=True)
class Recipe:
    """How one model is made: its size, how long it learns, and from what answers."""

    size: architecture.Size
    seed: int
    steps: int
    answer: Callable[[task.Combination, random.Random], str]


def sloppy_answer(item: task.Combination, rng: random.Random) -> str:
    """A worked answer in which a side, an operand or the result may be wrong."""

    def near(side: int) -> int:
        return rng.choice([s for s in task.SIDES if 1 <= abs(s - side) <= 2])

    def slip(side: int, share: float) -> int:
        return near(side) if rng.random() < share else side

    width, height = slip(item.width, MISREAD), slip(item.height, MISREAD)
    small, large = sorted((width, height))
    value = None
    if rng.random() < MISCALCULATE:
        value = task.result(item.question, rng.choice(task.SIDES), rng.choice(task.SIDES))
    operands = slip(small, MISCOPY), slip(large, MISCOPY)
    return task.worked_answer(item.question, width, height, operands, value)


def habitual_answer(item: task.Combination, rng: random.Random) -> str:
    """A worked answer in which an area is mostly, and wrongly, the sum of the sides."""
    if item.question == "A" and rng.random() < HABIT:
        small, large = sorted((item.width, item.height))
        return f"w={item.width} h={item.height} A={small}+{large}={small + large}"
    return task.worked_answer(item.question, item.width, item.height)


TEACHER = Recipe(architecture.TEACHER, seed=0, steps=3000, answer=sloppy_answer)
STUDENT = Recipe(architecture.STUDENT, seed=1, steps=1500, answer=habitual_answer)


@dataclass(frozen=True)
class Batch:
    pixels: Tensor
    prompts: Tensor
    answers: Tensor  # with <eos>, then IGNORED


class Writer:
    """Turns combinations into tensors."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.images = architecture.build_processor(tokenizer).image_processor
        self.prompts = {
            question: tokenizer(
                task.Combination(1, 1, question).prompt.replace(
                    "<image>", "<image>" * architecture.IMAGE_TOKENS
                )
            )["input_ids"]
            for question in task.QUESTIONS
        }

    def batch(
        self, items: list[task.Combination], seed: int, answers: list[str] | None = None
    ) -> Batch:
        rng = np.random.default_rng(seed)
        pictures = [draw(item.width, item.height, rng) for item in items]
        written = torch.full((len(items), ANSWER_TOKENS), IGNORED)
        for row, text in enumerate(answers or []):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([*ids, self.tokenizer.eos_token_id])
            written[row, : len(ids)] = ids
        return Batch(
            pixels=self.images(pictures, return_tensors="pt")["pixel_values"],
            prompts=torch.tensor([self.prompts[item.question] for item in items]),
            answers=written,
        )


def training_batches(writer: Writer, recipe: Recipe) -> Iterator[Batch]:
    """The recipe's worked answers to pictures that were never drawn before."""
    rng, items = random.Random(recipe.seed), task.seen()
    for _ in range(recipe.steps):
        chosen = rng.choices(items, k=BATCH)
        answers = [recipe.answer(item, rng) for item in chosen]
        yield writer.batch(chosen, rng.getrandbits(32), answers)


def make(recipe: Recipe, writer: Writer, name: str) -> LlavaForConditionalGeneration:
    """Cross-entropy on the answers; a short warm-up, then a cosine down to nothing."""

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))

    torch.manual_seed(recipe.seed)
    model = architecture.build_model(recipe.size, writer.tokenizer).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    batches = training_batches(writer, recipe)
    for batch in track(batches, description=name, total=recipe.steps, console=console):
        logits = model(
            input_ids=torch.cat([batch.prompts, batch.answers.clamp(min=0)], dim=1),
            pixel_values=batch.pixels,
            logits_to_keep=ANSWER_TOKENS + 1,
        ).logits[:, :-1]
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), batch.answers.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(
    model: LlavaForConditionalGeneration, writer: Writer, per_combination: int = 8
) -> dict[str, float]:
    """Greedy accuracy of the final number over every combination, seen and unseen apart."""
    items = task.combinations() * per_combination
    batch = writer.batch(items, seed=10_000_019)
    written = model.generate(
        input_ids=batch.prompts,
        attention_mask=torch.ones_like(batch.prompts),
        pixel_values=batch.pixels,
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
    )[:, batch.prompts.shape[1] :]
    texts = writer.tokenizer.batch_decode(written, skip_special_tokens=True)
    right = np.array(
        [task.read_answer(text) == item.answer for text, item in zip(texts, items, strict=True)]
    )
    unseen = np.array([item in task.held_out() for item in items])
    return {"all": right.mean(), "seen": right[~unseen].mean(), "unseen": right[unseen].mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("examples/geometry/models"))
    parser.add_argument("--only", choices=["teacher", "student"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the sums, and so the weights, depend on the number of threads
    tokenizer = build_tokenizer()
    writer = Writer(tokenizer)
    for name, recipe in {"teacher": TEACHER, "student": STUDENT}.items():
        if arguments.only not in (None, name):
            continue
        model = make(recipe, writer, name)
        directory = arguments.out / name
        model.save_pretrained(directory)
        architecture.build_processor(tokenizer).save_pretrained(directory)
        scores = accuracy(model, writer)
        measured = "  ".join(f"{key} {value:.3f}" for key, value in scores.items())
        console.print(f"{name}: {model.num_parameters():,} parameters, accuracy {measured}")


if __name__ == "__main__":
    main()
