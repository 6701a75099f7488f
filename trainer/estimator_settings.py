"""Settings of estimator and loss: `trainer.estimator` and `trainer.loss` of a RUN.yaml.

Which of them have an effect depends on `name` and others. One without an effect is refused where
somebody set it, and left out where settings are written, so that a written file loads again.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from preceptor.config import Section


class EstimatorSettings(Section):
    """How marks and rewards become advantages (trainer/estimators). A name alone will do:
    `estimator: grpo`."""

    name: Literal["gndpo", "opd", "opd_raw", "grpo"] = "gndpo"
    """gndpo: clamped teacher - old differences (k), whitened over the whole batch. opd: clamped
    only. opd_raw: as they are; tokens the teacher finds impossible are left out and counted. grpo:
    verifiable rewards, normalised in each prompt group; the teacher's marks are only logged."""

    clip: float | None = Field(5.0, gt=0)
    """k is clamped to [-clip, +clip] nats before anything else. null: no clamp; tokens the teacher
    finds impossible are then left out and counted."""

    center: bool = True
    """Subtract the mean of k."""

    scale: bool = True
    """Divide by sigma, the standard deviation of k."""

    std_floor: float = Field(0.0, ge=0)
    """Smallest sigma to divide by, nats: a student close to its teacher has little but noise."""

    post_clip: float | None = Field(None, gt=0)
    """Whitened advantages are clamped to [-post_clip, +post_clip]. null: they are not."""

    statistics: Literal["batch", "ema", "per_teacher"] = "batch"
    """Whose mean and sigma: the batch's; those of all batches so far, older ones lighter; or, for
    tokens of each teacher, that teacher's in the batch."""

    ema_decay: float = Field(0.9, gt=0, lt=1)
    """Weight of a batch one step old, with statistics: ema."""

    small_batch: Literal["error", "safe"] = "error"
    """A batch with fewer than two valid tokens, or no spread: stop, or give it zero advantages."""

    outcome_weight: float = Field(0.0, ge=0)
    """Adds this much of the outcome's advantage (as grpo's) to the distillation's; 0: none."""

    normalise: Literal["each", "sum"] = "each"
    """Advantages of distillation and outcome are each normalised, then summed; or the sum of
    clamped k and outcome_weight times reward minus its group's mean is whitened."""

    outcome_std: bool = True
    """Divide rewards by their group's standard deviation. false: Dr. GRPO."""

    @property
    def needs_teacher(self) -> bool:
        """Whether every token needs a teacher's mark."""
        return self.name != "grpo"

    @property
    def needs_rewards(self) -> bool:
        """Whether every response needs a verifiable reward."""
        return self.name == "grpo" or self.outcome_weight > 0

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == "opd" and self.clip is None:
            raise ValueError(
                "estimator.clip null contradicts estimator.name opd, which is the clamp alone; set "
                "estimator.name opd_raw"
            )
        _refuse(self, "estimator", self._without_effect())
        return self

    @model_serializer(mode="wrap")
    def _in_force(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(handler(self), self._without_effect())

    def _without_effect(self) -> dict[str, str]:
        """Fields that change nothing as the others stand -> why, and what to change."""
        why: dict[str, str] = {}
        if self.name in ("opd_raw", "grpo"):
            why["clip"] = f"with estimator.name {self.name} (it belongs to gndpo and opd)"
        if self.name == "grpo":
            why["outcome_weight"] = (
                "with estimator.name grpo, which learns from the outcome alone; set estimator.name "
                "gndpo"
            )
        elif self.outcome_weight == 0:
            why["outcome_std"] = "with estimator.outcome_weight 0; set estimator.outcome_weight"
            why["normalise"] = why["outcome_std"]
        elif self.name == "gndpo" and self.normalise == "sum":
            why["outcome_std"] = "with estimator.normalise sum; set estimator.normalise each"
        if self.name != "gndpo":
            why |= dict.fromkeys(
                (
                    "center",
                    "scale",
                    "std_floor",
                    "post_clip",
                    "statistics",
                    "ema_decay",
                    "small_batch",
                    "normalise",
                ),
                f"with estimator.name {self.name} (it belongs to gndpo)",
            )
            return why
        if not self.scale:
            why |= dict.fromkeys(
                ("std_floor", "small_batch"),
                "with estimator.scale false; set estimator.scale true",
            )
            if not self.center:
                why["statistics"] = (
                    "with estimator.center and estimator.scale false; set one of them true"
                )
        if self.statistics != "ema":
            why["ema_decay"] = (
                f"with estimator.statistics {self.statistics}; set estimator.statistics ema"
            )
        return why


class LossSettings(Section):
    """How advantages become a loss (trainer/surrogates.py). A name alone will do: `loss: ppo`."""

    name: Literal["gspo", "ppo", "importance"] = "gspo"
    """gspo: one clipped ratio a sequence, gradients token by token. ppo: a clipped ratio a token.
    importance: a ratio a token, not clipped."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(0.2, gt=0)
    """And above at 1 + clip_high."""

    aggregation: Literal["sequence-mean", "token-mean", "fixed-length"] = "sequence-mean"
    """Mean over sequences of the mean over their tokens; mean over all tokens; or mean over
    sequences of the sum over their tokens divided by fixed_length (Dr. GRPO), so that long answers
    weigh no less a token."""

    fixed_length: int | None = Field(None, ge=1)
    """Tokens, for aggregation: fixed-length; null: max_new_tokens."""

    correction: Literal["none", "truncate", "mask"] = "none"
    """Weight tokens by how much likelier the trainer finds them than the worker that sampled them
    did. truncate (TIS): at most correction_high. mask (MIS, IcePop): those below correction_low or
    above correction_high count nothing."""

    correction_low: float = Field(0.5, gt=0, lt=1)
    """Smallest ratio of old and behaviour probability, for correction: mask."""

    correction_high: float = Field(2.0, ge=1)
    """Largest ratio, for correction: truncate and mask."""

    top_k_weight: float = Field(0.0, ge=0)
    """Adds this much of the reverse KL to the teacher on top_k ids; 0: none."""

    top_k: int = Field(0, ge=0)
    """Ids, the student's likeliest at each token, whose logprobs the teacher is asked for; 0: none.
    All other ids together count as one more."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.top_k == 0) != (self.top_k_weight == 0):
            raise ValueError(
                f"loss.top_k {self.top_k} and loss.top_k_weight {self.top_k_weight:g}: set both, "
                "or neither"
            )
        _refuse(self, "loss", self._without_effect())
        return self

    @model_serializer(mode="wrap")
    def _in_force(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(handler(self), self._without_effect())

    def _without_effect(self) -> dict[str, str]:
        """Fields that change nothing as the others stand -> why, and what to change."""
        why: dict[str, str] = {}
        if self.name == "importance":
            unclipped = "with loss.name importance; set loss.name ppo"
            why |= {"clip_low": unclipped, "clip_high": unclipped}
        if self.aggregation != "fixed-length":
            why["fixed_length"] = (
                f"with loss.aggregation {self.aggregation}; set loss.aggregation fixed-length"
            )
        if self.correction != "mask":
            why["correction_low"] = (
                f"with loss.correction {self.correction}; set loss.correction mask"
            )
        if self.correction == "none":
            why["correction_high"] = "with loss.correction none; set loss.correction truncate"
        return why


def _refuse(settings: Section, section: str, idle: dict[str, str]) -> None:
    for name in sorted(settings.model_fields_set & idle.keys()):
        raise ValueError(f"{section}.{name} has no effect {idle[name]}, or remove {section}.{name}")


def _without(values: dict[str, Any], idle: dict[str, str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in idle}
