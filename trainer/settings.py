"""Settings of the trainer: the `trainer:` section of a RUN.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from preceptor.config import RunConfig, Section
from trainer.losses import Aggregation


class DataSettings(Section):
    """Prompts, one a row: JSONL or parquet with the columns prompt, images, answer and tag."""

    train: Path
    """Training prompts. Answers are used for logging a reward, never for learning."""

    evaluation: Path | None = None
    """Evaluation prompts; they need answers. None: no evaluation."""


class EstimatorSettings(Section):
    """GNDPO: how the teacher's marks become advantages (trainer/advantages.py)."""

    clip: float = Field(5.0, gt=0)
    """k is clamped to [-clip, +clip] nats before it is whitened."""

    small_batch: Literal["error", "safe"] = "error"
    """A batch with fewer than two valid tokens, or no spread: stop, or give it zero advantages."""


class LossSettings(Section):
    """The token-level GSPO surrogate (trainer/losses.py)."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The sequence's ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(0.2, gt=0)
    """And above at 1 + clip_high."""

    aggregation: Aggregation = "sequence-mean"
    """Mean over sequences of the mean over their tokens, or mean over all tokens."""


class OptimiserSettings(Section):
    """AdamW with a learning-rate schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up; linear and cosine end at final_fraction of the peak."""

    warmup_steps: int = Field(0, ge=0)
    """Steps in which the rate rises linearly to its peak."""

    final_fraction: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a fraction of the peak."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moment estimates."""

    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""

    max_gradient_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""

    max_skipped_steps: int = Field(3, ge=1)
    """The run stops when this many steps in a row have a non-finite gradient."""


class CheckpointSettings(Section):
    """What a run resumes from."""

    every_steps: int = Field(50, ge=1)
    """Steps between checkpoints; the last step is always saved."""

    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep."""


class EvaluationSettings(Section):
    """Greedy answers graded by a verifiable reward, and the KL to the teacher on sampled ones."""

    reward: Literal["numeric"] = "numeric"
    """How answers are graded: "numeric" compares the last number of the response."""

    prompts: int = Field(512, ge=1)
    """Evaluation prompts before the first step and after the last, from the file's start."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations in between; 0: none."""

    interim_prompts: int = Field(128, ge=1)
    """Prompts of an evaluation in between."""


class TrainerSettings(Section):
    """One student, one teacher, one run."""

    student: Path
    """Folder of the student's initial weights, in Hugging Face layout."""

    teacher: str = "127.0.0.1:50051"
    """Address of the teacher service. `preceptor up` sets it."""

    student_name: str = "student"
    """Who the teacher shall count this student as."""

    data: DataSettings
    estimator: EstimatorSettings = EstimatorSettings()
    loss: LossSettings = LossSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    steps: int = Field(100, ge=1)
    """Optimiser steps of the whole run."""

    prompts_per_step: int = Field(32, ge=1)
    """Prompts in a rollout batch."""

    samples_per_prompt: int = Field(4, ge=1)
    """Responses sampled for each prompt."""

    max_new_tokens: int = Field(512, ge=1)
    """Longest response, in tokens."""

    max_staleness: int = Field(1, ge=0)
    """Steps a response's policy may lie behind the one that trains on it. It is also how many
    steps' tasks are issued ahead."""

    temperature: Literal[1] = 1
    """Training samples come from the student's own distribution: the estimator's expectation is
    taken under it. Anything but temperature 1, top-p 1 and no top-k is refused."""

    top_p: Literal[1] = 1
    """See temperature."""

    top_k: Literal[0] = 0
    """See temperature."""

    micro_batch_tokens: int = Field(65536, ge=1)
    """Prompt and response tokens of one forward and backward pass, padding not counted; a prompt
    group is never cut. It bounds memory and changes nothing else."""

    score_batch_groups: int = Field(32, ge=1)
    """Prompt groups sent to the teacher in one call."""

    teacher_timeout_seconds: float = Field(120.0, gt=0)
    """Deadline of a call to the teacher, and how long it may stay away before the run stops."""

    task_timeout_seconds: float = Field(600.0, gt=0)
    """A prompt task without its rollout group after this long is issued again, under its id. The
    last resort: a dead worker's tasks move when its lease ends, and lost ones are noticed sooner.
    Set it well above the time a batch of rollouts takes."""

    keep_policies: int = Field(3, ge=2)
    """Published policy versions to keep."""

    allow_mismatch: list[Literal["tokenizer", "eos", "image_processor"]] = Field([])
    """Differences between student and teacher that are accepted, by name."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are trained. bfloat16 swallows small updates."""

    device: str = "cpu"
    """A torch device."""

    threads: int = Field(0, ge=0)
    """Threads torch computes with; 0 leaves its default."""

    trust_remote_code: bool = False
    """Run code that comes with the student's folder."""

    @model_validator(mode="after")
    def _warm_up_ends(self) -> TrainerSettings:
        if self.optimiser.warmup_steps >= self.steps:
            raise ValueError(
                f"optimiser.warmup_steps {self.optimiser.warmup_steps} must be below steps "
                f"{self.steps}"
            )
        return self


class TrainerConfig(RunConfig):
    """A RUN.yaml as the trainer reads it."""

    trainer: TrainerSettings  # type: ignore[assignment]
