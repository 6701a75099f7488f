"""The student that learns: its weights, its optimiser and its own logprobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modeling.adapters import LoraShape, add_adapter
from modeling.groups import TokenGroup
from modeling.load import DTYPES, LoadedModel, ModelError
from modeling.logprobs import TokenScores
from modeling.packed import packed_scores
from modeling.padded import padded_scores
from modeling.sharing import agrees_with_plain, probe_groups
from trainer.settings import LoraSettings, OptimiserSettings, ScaleSettings
from trainer.sharding import checkpoint_activations, shard
from trainer.world import World

ALONE = World(0, 1)


class Student:
    """Weights, optimiser and learning-rate schedule of one student, whole or sharded over ranks.

    The model stays in evaluation mode: dropout would make old and new logprobs differ by noise that
    the ratio takes for a change of policy. Weights are float32 masters whatever they compute in.

    Every method that is marked collective is called by all ranks together.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        optimiser: OptimiserSettings,
        steps: int,
        *,
        scale: ScaleSettings | None = None,
        lora: LoraSettings | None = None,
        world: World = ALONE,
        seed: int = 0,
    ) -> None:
        """
        Args:
            loaded: the model in float32; its weights are trained in place.
            optimiser, scale, lora: settings.
            steps: of the whole run, for the schedule.
            world: who takes part.
            seed: of the adapter's initial weights.

        Raises:
            modeling.load.ModelError: an adapter, a frozen tower or a packing it does not admit.
        """
        scale = scale or ScaleSettings()
        self.loaded = loaded
        self.compute_dtype = scale.compute_dtype
        self._settings = optimiser
        self._steps = steps
        # A placeholder in an answer would claim an image that is not there. It leaves the
        # student's distribution: behaviour, old and new logprobs alike.
        placeholder = loaded.image_placeholder_id
        self.suppressed_ids = [] if placeholder is None else [placeholder]
        self.probe = probe_groups(loaded)
        path = _path(loaded, scale.packing)
        self.adapted = lora is not None and lora.rank > 0
        _choose_trainable(loaded, scale.freeze_vision_tower)
        if lora is not None and self.adapted:
            add_adapter(loaded, LoraShape(lora.rank, lora.alpha, lora.targets), seed)
        if scale.activation_checkpointing:
            checkpoint_activations(loaded.model)
        self._scorer = _Scorer(loaded, path, self.suppressed_ids, self.probe[:1], not world.alone)
        if world.mesh is not None:
            shard(self._scorer, loaded.model, world.mesh, DTYPES[scale.compute_dtype])
        self.parameters = {
            name: one for name, one in loaded.model.named_parameters() if one.requires_grad
        }
        self._optimiser = _optimiser(list(self.parameters.values()), optimiser)

    def scores(self, groups: Sequence[TokenGroup], *, entropy: bool = False) -> TokenScores:
        """Logprobs (float32, nats) of all response tokens in order. Collective.

        With gradients unless torch.no_grad() is on. Temperature 1, without suppressed ids. A rank
        without groups takes part all the same and gets nothing.
        """
        return TokenScores(*self._scorer(groups, entropy))

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self._optimiser.zero_grad(set_to_none=True)

    def apply_gradients(self, step: int) -> tuple[float, bool]:
        """One clipped optimiser step at the schedule's rate. Collective.

        Returns:
            The gradient's global norm before clipping, and whether it was finite: the same on every
            rank. If it was not, weights and optimiser are as before.
        """
        gradients = list(self.parameters.values())
        norm = whole(torch.nn.utils.clip_grad_norm_(gradients, self._settings.max_gradient_norm))
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

    def gathered(self) -> dict[str, Tensor]:
        """The model's state dict, or the adapter's weights where there is one, unsharded on the
        CPU in the type the student computes in. Collective.
        """
        if self.adapted:
            named: Mapping[str, Tensor] = self.parameters
        else:
            named = self.loaded.model.state_dict(keep_vars=True)
        dtype = DTYPES[self.compute_dtype]
        tensors: dict[str, Tensor] = {}
        done: dict[int, Tensor] = {}
        for name, value in named.items():
            # Tied weights are one tensor here too, so that they are written once.
            if id(value) not in done:
                full = whole(value.detach()).cpu()
                done[id(value)] = full.to(dtype) if full.is_floating_point() else full
            tensors[name] = done[id(value)]
        return tensors

    def state(self) -> dict[str, Tensor]:
        """All tensors a checkpoint holds, by name; loading writes into them."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"weights/{name}"] = parameter.detach()
            for field, value in self._optimiser.state[parameter].items():
                tensors[f"optimiser/{name}/{field}"] = value
        return tensors

    @property
    def state_bytes(self) -> int:
        """What `state` holds, on all ranks together."""
        return sum(one.numel() * one.element_size() for one in self.state().values())


class _Scorer(nn.Module):
    """What is called, and sharded, as a whole: groups in, scores of their response tokens out."""

    def __init__(
        self,
        loaded: LoadedModel,
        path: Callable[..., TokenScores],
        suppressed_ids: Sequence[int],
        filler: Sequence[TokenGroup],
        together: bool,
    ) -> None:
        super().__init__()
        self.model = loaded.model
        self._loaded = loaded
        self._path = path
        self._suppressed_ids = suppressed_ids
        self._filler = list(filler)
        # Ranks that gather weights and sum gradients must use the same parts of the model in each
        # pass: one without groups, or without images, would be waited for.
        self._together = together

    def forward(self, groups: Sequence[TokenGroup], entropy: bool) -> tuple[Tensor, ...]:
        """The fields of TokenScores: what shards finds tensors in tuples, not in dataclasses."""
        count = sum(len(response) for group in groups for response in group.responses)
        images = any(group.images for group in groups)
        lacks_images = self._together and bool(self._filler[0].images) and not images
        if not groups or lacks_images:
            groups = [*groups, *self._filler]
        scores = self._path(
            self._loaded, groups, suppressed_ids=self._suppressed_ids, entropy=entropy
        )
        # Copies: what is called puts hooks on its outputs, and a view would share them.
        return tuple(one[:count].clone() for one in vars(scores).values())


def whole(value: Tensor) -> Tensor:
    """A sharded tensor gathered (collective), any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _path(loaded: LoadedModel, packing: bool) -> Callable[..., TokenScores]:
    """How passes are laid out, compared with the plain forward on a probe first."""
    if packing and agrees_with_plain(loaded, packed_scores):
        return packed_scores
    if not agrees_with_plain(loaded, padded_scores):
        raise ModelError(
            f"{loaded.model_id}: padded sequences give other logprobs than single ones, so batches "
            "cannot be trained on"
        )
    return padded_scores


def _choose_trainable(loaded: LoadedModel, freeze_vision_tower: bool) -> None:
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(True)
    if freeze_vision_tower:
        tower = loaded.model.get_encoder(modality="image")
        if loaded.image_placeholder_id is None or tower is loaded.model:
            raise ModelError(
                f"{loaded.model_id} has no vision tower; set scale.freeze_vision_tower to false"
            )
        tower.requires_grad_(False)


def _optimiser(
    parameters: list[nn.Parameter], settings: OptimiserSettings
) -> torch.optim.Optimizer:
    if settings.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
    optimiser = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    # Made now, not at the first step: a checkpoint is loaded into what is there.
    for parameter in parameters:
        optimiser.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimiser
