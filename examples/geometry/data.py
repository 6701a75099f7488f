"""Write the demo's prompt files.

    python -m examples.geometry.data --out DIR --seed 0 --train 4096 --eval 576

``train.parquet`` holds seen combinations only; ``eval.parquet`` goes round all of them. Columns:
``prompt`` (text with one ``<image>`` per picture), ``images`` (PNG bytes), ``answer`` (the number;
graded in evaluation, never trained on) and ``tag`` (``seen`` or ``unseen``).
"""

import argparse
import random
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.geometry import task
from examples.geometry.draw import draw, png

SCHEMA = pa.schema(
    {
        "prompt": pa.string(),
        "images": pa.list_(pa.binary()),
        "answer": pa.string(),
        "tag": pa.string(),
    }
)


def table(items: list[task.Combination], rng: np.random.Generator) -> pa.Table:
    rows = [
        {
            "prompt": item.prompt,
            "images": [png(draw(item.width, item.height, rng))],
            "answer": item.answer,
            "tag": "unseen" if item in task.held_out() else "seen",
        }
        for item in items
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def training_items(count: int, seed: int) -> list[task.Combination]:
    return random.Random(seed).choices(task.seen(), k=count)


def evaluation_items(count: int) -> list[task.Combination]:
    """Each combination as often as any other, as far as ``count`` allows."""
    order = task.combinations()
    random.Random(task.SPLIT_SEED).shuffle(order)
    return list(islice(cycle(order), count))


def write_prompts(out: Path, *, seed: int, train: int, evaluation: int) -> tuple[Path, Path]:
    """Draw both prompt files; returns the paths of training and evaluation prompts."""
    out.mkdir(parents=True, exist_ok=True)
    # Two streams of pictures from one seed: more training prompts leave evaluation as it was.
    for_training, for_evaluation = np.random.default_rng(seed).spawn(2)
    paths = out / "train.parquet", out / "eval.parquet"
    pq.write_table(table(training_items(train, seed), for_training), paths[0])
    pq.write_table(table(evaluation_items(evaluation), for_evaluation), paths[1])
    return paths


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4096)
    parser.add_argument("--eval", type=int, default=576)
    arguments = parser.parse_args()
    paths = write_prompts(
        arguments.out, seed=arguments.seed, train=arguments.train, evaluation=arguments.eval
    )
    print(*paths, sep="\n")


if __name__ == "__main__":
    main()
