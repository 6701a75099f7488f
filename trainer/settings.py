"""Settings of the trainer: the `trainer:` section of a RUN.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from preceptor.config import RunConfig, Section
from trainer.data_settings import DataSettings
from trainer.estimator_settings import EstimatorSettings, LossSettings


class OptimiserSettings(Section):
    """The optimiser and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or plain gradient descent without momentum."""

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

    keep_best: bool = True
    """Also keep the checkpoint with the best evaluation, and take one when an evaluation is."""

    asynchronous: bool = True
    """Write while training goes on, from a copy in CPU memory. false: wait, and save that copy."""


class EvaluationSettings(Section):
    """Greedy answers graded by trainer.data.reward, and the KL to the teacher on sampled ones."""

    prompts: int = Field(512, ge=1)
    """Evaluation prompts before the first step and after the last, from the file's start."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations in between; 0: none."""

    interim_prompts: int = Field(128, ge=1)
    """Prompts of an evaluation in between. The best checkpoint is the best on these."""


class ScaleSettings(Section):
    """How one student is spread over processes and fitted into memory."""

    ranks: int = Field(1, ge=1)
    """Processes the trainer starts on this machine, each with its shard of weights, gradients and
    optimiser state (FSDP2). Over several machines start it with torchrun, which overrides this."""

    packing: bool = True
    """Several sequences in a row, each prompt once for all its samples. false, or an architecture
    that does not admit it: every sequence whole in a row of its own, padded."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the passes and of published weights. The weights that are trained, gradient sums and
    optimiser state are float32 always: bfloat16 swallows small updates."""

    activation_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass and compute the rest again: a third more
    time, far less memory."""

    freeze_vision_tower: bool = False
    """Leave the image encoder as it is; the projector to the language model is trained."""


class LoraSettings(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) through peft. Only they are trained, saved and
    published."""

    rank: int = Field(0, ge=0)
    """Of the updates; 0: no adapters, all weights are trained."""

    alpha: float = Field(16.0, gt=0)
    """Updates are scaled by alpha / rank."""

    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the modules that get one, such as q_proj; all-linear: every linear layer of the
    language decoder."""


class GuardSettings(Section):
    """What stops a run that collapses, by name. Each limit holds for `patience` steps in a row."""

    patience: int = Field(3, ge=1)
    """Steps in a row beyond a limit before the run stops."""

    repetition: float | None = Field(0.5, gt=0, le=1)
    """Largest mean share of response tokens that repeat the one 1 to 8 places before them; null:
    no limit."""

    clamped: float | None = Field(0.9, gt=0, le=1)
    """Largest share of tokens whose k the clamp cuts; null: no limit."""

    truncated: float | None = Field(None, gt=0, le=1)
    """Largest share of responses cut at max_new_tokens; null: no limit, as short caps can be
    meant."""

    entropy: float | None = Field(None, ge=0)
    """Smallest mean entropy of the student, nats; null: no limit."""


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
    scale: ScaleSettings = ScaleSettings()
    lora: LoraSettings = LoraSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    guards: GuardSettings = GuardSettings()

    steps: int = Field(100, ge=1)
    """Rollout batches the run trains on."""

    minibatches: int = Field(1, ge=1)
    """Optimiser steps a rollout batch is split into, by prompt groups. With more than one the old
    logprobs are of the weights before the first, and the loss's ratio and clip come into play."""

    prompts_per_step: int = Field(32, ge=1)
    """Prompts in a rollout batch."""

    samples_per_prompt: int = Field(4, ge=1)
    """Responses sampled for each prompt."""

    max_new_tokens: int = Field(512, ge=1)
    """Longest response, in tokens."""

    max_staleness: int = Field(1, ge=0)
    """Steps a response's policy may lie behind the one that trains on it. It is also how many
    steps' tasks are issued ahead."""

    temperature: float = Field(1.0, ge=1, le=1)
    """Training samples come from the student's own distribution: the estimator's expectation is
    taken under it. Anything but temperature 1, top-p 1 and no top-k is refused."""

    top_p: float = Field(1.0, ge=1, le=1)
    """See temperature."""

    top_k: int = Field(0, ge=0, le=0)
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

    device: str = "cpu"
    """A torch device; with several ranks on one machine, cuda means one each."""

    threads: int = Field(0, ge=0)
    """Threads torch computes with; 0 leaves its default."""

    trust_remote_code: bool = False
    """Run code that comes with the student's folder."""

    @model_validator(mode="after")
    def _minibatches_have_groups(self) -> TrainerSettings:
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches {self.minibatches} must not exceed prompts_per_step "
                f"{self.prompts_per_step}: a prompt group is never cut"
            )
        return self

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
