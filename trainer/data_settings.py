"""Settings of the data: the `trainer.data` section of a RUN.yaml."""

from __future__ import annotations

from typing import Literal

from preceptor.config import Section


class DataSettings(Section):
    """Prompts, one a row; trainer/data.py lists the columns.

    A source is a .jsonl or .parquet file; a folder that `datasets` wrote with save_to_disk or reads
    with load_dataset, as PATH or PATH#SPLIT; or a dataset of the Hugging Face hub, as
    hf:OWNER/NAME[@REVISION][#SPLIT].
    """

    train: str
    """Source of the training prompts. Answers are graded for the log; only an estimator that takes
    outcome rewards learns from them."""

    evaluation: str | None = None
    """Source of the evaluation prompts; they need answers. null: no evaluation."""

    overlong: Literal["error", "drop"] = "error"
    """Prompts that leave no room for max_new_tokens: stop, or leave them out and say how many."""

    reward: str = "numeric"
    """How answers are graded: exact, numeric, math_verify, boxed, or package.module:function, which
    is called with the response's text and the answer. See trainer/rewards."""
