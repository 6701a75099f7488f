"""Make the demo's strong teacher and weak student from worked answers.

    python -m examples.geometry.make_models --out examples/geometry/models

The teacher learns whole worked answers until it has mastered them. The student is smaller: it
first learns to see (only the two sides it reads count), then begins to learn to reckon and is
stopped early. Both are seeded. Neither is ever shown a held-out combination's picture with its
question. Some of the worked answers contain slips, consistently continued, so that the teacher
can judge the imperfect text a student writes instead of finding it all equally impossible.
"""

import argparse
import math
import random
from collections.abc import Iterator
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
SIDES_READ = len("w=1 h=1")
ANSWER_TOKENS = len("w=1 h=1 P=2*(1+1)=24") + 2  # with <eos>, and room for a slip
MISREAD, MISCOPY, MISCALCULATE = 0.10, 0.03, 0.08  # shares of slips in the worked answers
console = Console()


@dataclass(frozen=True)
class Recipe:
    """How one model is made."""

    size: architecture.Size
    seed: int
    sight_steps: int  # only the sides count
    steps: int  # everything counts
    sight_rate: float = 3e-3
    rate: float = 3e-3
    batch: int = 64


TEACHER = Recipe(architecture.TEACHER, seed=0, sight_steps=0, steps=2600)
STUDENT = Recipe(architecture.STUDENT, seed=1, sight_steps=1600, steps=300, rate=1e-3)


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


def training_batches(writer: Writer, size: int, seed: int) -> Iterator[Batch]:
    rng, items = random.Random(seed), task.seen()
    while True:
        chosen = rng.choices(items, k=size)
        yield writer.batch(
            chosen, rng.getrandbits(32), [sloppy_answer(item, rng) for item in chosen]
        )


def fit(
    model: LlavaForConditionalGeneration,
    batches: Iterator[Batch],
    steps: int,
    rate: float,
    label: str,
    sight_only: bool = False,
) -> None:
    """Cross-entropy on the answers; a short warm-up, then a cosine down to nothing."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * s / steps))),
    )
    model.train()
    for _ in track(range(steps), description=label, console=console):
        batch = next(batches)
        ids = torch.cat([batch.prompts, batch.answers.clamp(min=0)], dim=1)
        logits = model(
            input_ids=ids, pixel_values=batch.pixels, logits_to_keep=ANSWER_TOKENS + 1
        ).logits[:, :-1]
        targets = batch.answers.clone()
        if sight_only:
            targets[:, SIDES_READ:] = IGNORED
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def make(recipe: Recipe, writer: Writer, name: str) -> LlavaForConditionalGeneration:
    torch.manual_seed(recipe.seed)
    model = architecture.build_model(recipe.size, writer.tokenizer)
    batches = training_batches(writer, recipe.batch, recipe.seed)
    if recipe.sight_steps:
        fit(model, batches, recipe.sight_steps, recipe.sight_rate, f"{name}: sight", True)
    fit(model, batches, recipe.steps, recipe.rate, f"{name}: worked answers")
    return model


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
