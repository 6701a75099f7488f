"""The student that learns: its weights, its optimiser and its own logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling.groups import TokenGroup
from modeling.load import LoadedModel, load_weights, save_model
from modeling.shared_prefix import group_logprobs, plain_logprobs
from modeling.sharing import check_sharing
from trainer.settings import OptimiserSettings

OPTIMISER_FILE = "optimiser.safetensors"


class Student:
    """Weights, AdamW and learning-rate schedule of one student.

    The model stays in evaluation mode: dropout would make old and new logprobs differ by noise that
    the ratio takes for a change of policy.
    """

    def __init__(self, loaded: LoadedModel, settings: OptimiserSettings, steps: int) -> None:
        """
        Args:
            loaded: the model; its weights are trained in place.
            settings: of the optimiser.
            steps: of the whole run, for the schedule.
        """
        self.loaded = loaded
        self._settings = settings
        self._steps = steps
        self._logprobs = group_logprobs if check_sharing(loaded) else plain_logprobs
        # A placeholder in an answer would claim an image that is not there. It leaves the
        # student's distribution: behaviour, old and new logprobs alike.
        placeholder = loaded.image_placeholder_id
        self.suppressed_ids = [] if placeholder is None else [placeholder]
        self.parameters = dict(loaded.model.named_parameters())
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self._optimiser = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def logprobs(self, groups: Sequence[TokenGroup]) -> list[Tensor]:
        """Logprobs of every response of every group in order, each float32 [tokens], nats.

        With gradients unless torch.no_grad() is on. Temperature 1, without suppressed ids.
        """
        grouped = self._logprobs(self.loaded, groups, suppressed_ids=self.suppressed_ids)
        return [one for group in grouped for one in group]

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self._optimiser.zero_grad(set_to_none=True)

    def apply_gradients(self, step: int) -> tuple[float, bool]:
        """One clipped AdamW step at the schedule's rate.

        Returns:
            The gradient's global norm before clipping, and whether it was finite. If it was not,
            weights and optimiser are as before.
        """
        gradients = list(self.parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(gradients, self._settings.max_gradient_norm)
        finite = bool(norm.isfinite())
        if finite:
            for group in self._optimiser.param_groups:
                group["lr"] = self.learning_rate(step)
            self._optimiser.step()
        return float(norm), finite

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, counted from 0: a pure function, so there is no state."""
        settings = self._settings
        peak, warmup = settings.learning_rate, settings.warmup_steps
        if step < warmup:
            return peak * (step + 1) / warmup
        if settings.schedule == "constant":
            return peak
        done = (step - warmup) / max(1, self._steps - warmup)
        left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return peak * (settings.final_fraction + (1 - settings.final_fraction) * left)

    def save_weights(self, folder: Path) -> None:
        """Write the model in Hugging Face layout."""
        save_model(self.loaded, folder)

    def save_optimiser(self, folder: Path) -> None:
        """Write AdamW's state as safetensors, by parameter name."""
        tensors = {}
        for name, parameter in self.parameters.items():
            for key, value in self._optimiser.state[parameter].items():
                tensors[f"{name}/{key}"] = value.contiguous()
        save_file(tensors, folder / OPTIMISER_FILE)

    def load(self, weights: Path, optimiser: Path) -> None:
        """Restore both from the folders they were saved to, whose hashes the caller verified.

        Raises:
            modeling.load.WeightsMismatch: they are another model's.
        """
        load_weights(self.loaded.model, weights)
        state: dict[str, dict[str, Any]] = {}
        for key, value in load_file(optimiser / OPTIMISER_FILE).items():
            name, _, field = key.rpartition("/")
            state.setdefault(name, {})[field] = value
        for name, parameter in self.parameters.items():
            if name in state:
                self._optimiser.state[parameter] = state[name]
