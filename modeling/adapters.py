"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, in place.

The model keeps its class and its names; only its linear layers are wrapped. So the shared prefix,
the head and sampling work on it as on any other. peft is optional and imported when it is needed.

Adapted are linear layers of the language decoder: the output head (often tied to the embedding) and
the vision tower stay as they are, which is also what inference engines can serve.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from modeling.load import LoadedModel, ModelError, WeightsMismatch

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# peft's: the name of a model's adapter, and what a PeftModel wraps around the model's own names.
NAME = "default"
PREFIX = "base_model.model."
# What does not change what an adapter computes, or follows from the layers it adapts.
IDLE_OPTIONS = {
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "revision",
    "task_type",
}


@dataclass(frozen=True)
class LoraShape:
    """What an adapter looks like.

    Attributes:
        rank: of the updates, 1 at least.
        alpha: updates are scaled by alpha / rank.
        targets: names, or last parts of names, of linear layers of the language decoder, such as
            q_proj; all-linear: every one.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"


def add_adapter(loaded: LoadedModel, shape: LoraShape, seed: int) -> None:
    """Give the model a new adapter, in place, and freeze everything else.

    The adapter's weights are float32 and want gradients. They change nothing yet: of both factors A
    is drawn from `seed`, the same on every process and device, and B is zero.

    Raises:
        ModelError: peft is missing, the model has an adapter, or a target names no layer.
    """
    if _adapted(loaded.model):
        raise ModelError(f"{loaded.model_id} has an adapter; a model holds one")
    layers = _targeted(loaded, shape.targets)
    # peft draws on the CPU whatever the model's device. Nobody else's random numbers change.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        _inject(loaded, shape, layers)


def save_adapter(
    loaded: LoadedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapter as peft does, for load_adapter and peft.PeftModel.from_pretrained.

    Args:
        loaded: the model.
        folder: made if missing.
        tensors: the adapter's whole weights by the model's parameter names, where the model itself
            holds shards; None: the model's own.

    Raises:
        ModelError: the model has no adapter, or the tensors are not all of it.
    """
    own = _parameters(loaded.model)
    if not own:
        raise ModelError(f"{loaded.model_id} has no adapter to save")
    if tensors is None:
        tensors = own
    if tensors.keys() != own.keys():
        odd = sorted(tensors.keys() ^ own.keys())
        raise ModelError(
            f"{loaded.model_id}: an adapter of {len(own)} tensors cannot be saved from "
            f"{len(tensors)}; missing or unexpected: {odd[:3]} ({len(odd)} in all)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = {_file_name(name): one.detach().cpu().contiguous() for name, one in tensors.items()}
    save_file(files, folder / WEIGHTS, metadata={"format": "pt"})
    _held_config(loaded.model).save_pretrained(str(folder))


def load_adapter(loaded: LoadedModel, folder: Path) -> None:
    """Hold a saved adapter, frozen: the first is added to the model, later ones replace its values.

    Everything is read and compared before the first weight changes, so on an error the model is
    what it was.

    Raises:
        WeightsMismatch: unreadable files, layers or shapes that are not the model's, another rank
            or alpha than the adapter held, or options of peft's beyond LoraShape.
        ModelError: peft is missing.
    """
    shape = _read_shape(folder)
    tensors = _read_tensors(folder)
    held = _parameters(loaded.model)
    layers: dict[str, nn.Module] = {}
    if held:
        own = _held_config(loaded.model)
        if (own.r, own.lora_alpha) != (shape.rank, shape.alpha):
            raise WeightsMismatch(
                f"{folder}: an adapter of rank {shape.rank} and alpha {shape.alpha:g}; the model's "
                f"has {own.r} and {own.lora_alpha:g}"
            )
        wanted = {_file_name(name): tuple(one.shape) for name, one in held.items()}
    else:
        try:
            layers = _targeted(loaded, shape.targets)
        except ModelError as error:
            raise WeightsMismatch(f"{folder} does not fit: {error}") from error
        wanted = _shapes(layers, shape.rank)
    _compare(folder, {name: tuple(one.shape) for name, one in tensors.items()}, wanted)
    if not held:
        with torch.random.fork_rng(devices=[]):
            _inject(loaded, shape, layers)
        held = _parameters(loaded.model)
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.requires_grad_(False).copy_(tensors[_file_name(name)])


def merge_adapter(loaded: LoadedModel) -> None:
    """Fold the adapter into the weights it adapts and remove it: a plain model, as loaded.

    Raises:
        ModelError: the model has no adapter.
    """
    model = loaded.model
    if not _adapted(model):
        raise ModelError(f"{loaded.model_id} has no adapter to merge")
    layer_class = _peft().tuners.lora.LoraLayer
    wrapped = {name: one for name, one in model.named_modules() if isinstance(one, layer_class)}
    for name, layer in wrapped.items():
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    # peft's and transformers' notes of it: save_pretrained would write an adapter.
    del model.peft_config
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)


def has_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a whole model."""
    return (folder / CONFIG).is_file()


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise ModelError("LoRA adapters need peft: pip install 'preceptor[lora]'") from error
    return peft


def _adapted(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _held_config(model: PreTrainedModel) -> Any:
    """peft's LoraConfig of the model's adapter."""
    return cast(Any, model.peft_config)[NAME]


def _parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The adapter's weights by their names in the model."""
    ends = (f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight")
    return {name: one for name, one in model.named_parameters() if name.endswith(ends)}


def _file_name(name: str) -> str:
    """A parameter's name in the file: with the wrapper's prefix, without the adapter's name."""
    return f"{PREFIX}{name.replace(f'.{NAME}.', '.')}"


def _targeted(
    loaded: LoadedModel, targets: tuple[str, ...] | Literal["all-linear"]
) -> dict[str, nn.Module]:
    """The layers to adapt, by their names in the model."""
    decoder = loaded.model.get_decoder()
    if loaded.image_placeholder_id is not None and decoder in (loaded.model, decoder.base_model):
        tower = loaded.model.get_encoder(modality="image")
        if tower is decoder or any(one is tower for one in decoder.modules()):
            raise ModelError(f"{loaded.model_id} does not say which part is its language decoder")
    inside = set(decoder.modules()) - {loaded.head.projection}
    linear: dict[str, nn.Module] = {
        name: module
        for name, module in loaded.model.named_modules()
        if module in inside and isinstance(module, nn.Linear | Conv1D)
    }
    if targets == "all-linear":
        return linear
    found: dict[str, nn.Module] = {}
    for target in targets:
        named = {name: one for name, one in linear.items() if f".{name}".endswith(f".{target}")}
        if not named:
            last = sorted({name.rpartition(".")[2] for name in linear})
            near = difflib.get_close_matches(target, [*last, *linear]) or last
            raise ModelError(
                f"{loaded.model_id}: no linear layer of the language decoder is named {target!r}; "
                f"nearest are {', '.join(near)}"
            )
        found |= named
    return found


def _inject(loaded: LoadedModel, shape: LoraShape, layers: dict[str, nn.Module]) -> None:
    # Whole names: last parts alone would also match layers of the vision tower.
    config = _lora_config(shape, set(layers))
    config.fan_in_fan_out = any(isinstance(one, Conv1D) for one in layers.values())
    model = loaded.model
    model.add_adapter(config, NAME)
    config.base_model_name_or_path = loaded.model_id
    config.revision = loaded.revision or None
    # peft makes them in the type of the layers they adapt.
    for parameter in _parameters(model).values():
        parameter.data = parameter.data.float()
    model.eval()


def _lora_config(shape: LoraShape, targets: set[str]) -> Any:
    return _peft().LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _read_shape(folder: Path) -> LoraShape:
    """What adapter_config.json says, if that is plain LoRA on named layers."""
    peft = _peft()
    try:
        config = peft.LoraConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise WeightsMismatch(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, peft.LoraConfig) or not isinstance(config.target_modules, set):
        raise WeightsMismatch(f"{folder / CONFIG} is not of a LoRA adapter on named layers")
    shape = LoraShape(config.r, config.lora_alpha, tuple(sorted(config.target_modules)))
    plain = _lora_config(shape, config.target_modules).to_dict()
    odd = {
        option: value
        for option, value in config.to_dict().items()
        if option not in IDLE_OPTIONS and value != plain[option]
    }
    if odd:
        raise WeightsMismatch(f"{folder / CONFIG}: only plain LoRA is held, this one has {odd}")
    return shape


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise WeightsMismatch(f"{folder / WEIGHTS} cannot be read: {error}") from error


def _shapes(layers: dict[str, nn.Module], rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the file of an adapter on these layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in layers.items():
        rows, columns = cast(Tensor, layer.weight).shape
        if isinstance(layer, Conv1D):
            rows, columns = columns, rows
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (rank, columns)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (rows, rank)
    return shapes


def _compare(
    folder: Path, given: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    missing, unexpected = sorted(wanted.keys() - given), sorted(given.keys() - wanted)
    if missing or unexpected:
        raise WeightsMismatch(
            f"{folder} does not fit: missing {missing[:3]}, unexpected {unexpected[:3]} "
            f"({len(missing)} and {len(unexpected)} in all)"
        )
    for name, shape in given.items():
        if shape != wanted[name]:
            raise WeightsMismatch(
                f"{folder}: {name} has shape {shape}, the model wants {wanted[name]}"
            )
