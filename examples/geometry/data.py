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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4096)
    parser.add_argument("--eval", type=int, default=576)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Two streams of pictures from one seed: more training prompts leave evaluation as it was.
    training, evaluation = np.random.default_rng(arguments.seed).spawn(2)
    files = {
        "train": table(training_items(arguments.train, arguments.seed), training),
        "eval": table(evaluation_items(arguments.eval), evaluation),
    }
    for name, content in files.items():
        pq.write_table(content, arguments.out / f"{name}.parquet")
        print(f"{arguments.out / name}.parquet: {content.num_rows} prompts")


if __name__ == "__main__":
    main()
