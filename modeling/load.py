"""Hugging Face models: loaded with all that scoring needs to know, saved, weights swapped in place.

Only safetensors are read: a pickled checkpoint could run code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from modeling.head import Head, find_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# What transformers raises on files that are missing, damaged, or want a package that is not there.
READ_ERRORS = (
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
LINE_CHARACTERS = 400
# Reported for architectures that state no limit.
NO_LIMIT = 2**31 - 1


class ModelError(ValueError):
    """A model that cannot be loaded."""


class WeightsMismatch(ModelError):
    """Weights that do not belong to this model. What was loaded before is untouched."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its tokenizer and the facts scoring depends on.

    Attributes:
        model: in evaluation mode, on its device. It stays in that mode when it is trained: dropout
            would make old and new logprobs differ.
        head: last hidden state -> float32 logits.
        image_processor: the PIL one; None for a text-only model.
        folder: where its files are.
        model_id, revision: as asked for; a hub revision is resolved to its commit.
        dtype: of the weights: "float32", "bfloat16" or "float16".
        eos_ids: every id that ends a response, sorted.
        image_placeholder_id: stands for one image feature; None for a text-only model.
        embedding_rows: ids are valid below this.
        max_sequence_tokens: longest prompt + response.
        feature_counts: (width, height) in pixels -> features; filled by modeling.images.
    """

    model: PreTrainedModel
    head: Head
    tokenizer: PreTrainedTokenizerBase
    image_processor: BaseImageProcessor | None
    folder: Path
    model_id: str
    revision: str
    dtype: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    image_placeholder_id: int | None
    embedding_rows: int
    max_sequence_tokens: int
    feature_counts: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.model.device

    @cached_property
    def forward_arguments(self) -> frozenset[str]:
        """Names the model's body accepts, e.g. which of an image processor's outputs."""
        return frozenset(inspect.signature(self.model.base_model.forward).parameters)


def load_model(
    path: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load any causal language model or image-text model.

    Args:
        path: a folder in Hugging Face layout, or a hub id (offline with HF_HUB_OFFLINE=1).
        revision: branch, tag or commit of a hub id.
        dtype: a key of DTYPES.
        device: a torch device.
        trust_remote_code: run code that comes with the model. Off unless the operator names it.

    Raises:
        ModelError: unknown dtype, no such folder, a hub that does not have it; config, safetensors,
            tokenizer or image processor missing or unreadable.
        modeling.head.UnsupportedModel: its logits cannot be reproduced.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    folder, commit = _fetch(path, revision, trust_remote_code)
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no safetensors; pickled weights are not loaded")
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    with _reading(folder, "config"):
        config = AutoConfig.from_pretrained(folder, **common)
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    with _reading(folder, "weights"):
        model = auto.from_pretrained(
            folder, config=config, dtype=DTYPES[dtype], use_safetensors=True, **common
        )
    model.eval().to(device)
    with _reading(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **common)
    placeholder = _placeholder_id(config) if multimodal else None
    return LoadedModel(
        model=model,
        head=find_head(model, [token for token in range(1, 10) if token != placeholder]),
        tokenizer=tokenizer,
        image_processor=_image_processor(folder, common) if placeholder is not None else None,
        folder=folder,
        model_id=str(path),
        revision=commit,
        dtype=dtype,
        eos_ids=_eos_ids(model, tokenizer),
        bos_id=_special_id("bos_token_id", model, tokenizer),
        pad_id=_special_id("pad_token_id", model, tokenizer),
        image_placeholder_id=placeholder,
        embedding_rows=cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings,
        max_sequence_tokens=_max_sequence_tokens(config),
    )


def save_model(
    loaded: LoadedModel,
    folder: Path,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    original_names: bool = False,
) -> None:
    """Write weights, config, tokenizer and processor in Hugging Face layout.

    Tied weights are written once and tied again on loading.

    Args:
        loaded: the model.
        folder: made if missing.
        tensors: its whole state dict, where the model itself holds shards; None: the model's own.
        original_names: name weights as the architecture's published checkpoints do, which is what
            other programs know. Else by the live model's names, which load_weights wants.
    """
    loaded.model.save_pretrained(
        folder,
        state_dict=None if tensors is None else dict(tensors),
        save_original_format=original_names,
    )
    loaded.tokenizer.save_pretrained(folder)
    if loaded.image_processor is not None:
        loaded.image_processor.save_pretrained(folder)


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Replace a model's weights in place by those of a folder written by save_model.

    Everything is read and compared before the first weight changes, so on an error the model is
    what it was. Values are cast to the model's dtype; shared storage stays shared.

    Raises:
        WeightsMismatch: unreadable files, or names or shapes that are not the model's.
    """
    tensors = _read_safetensors(folder)
    own = model.state_dict()
    missing, unexpected = _name_differences(own, tensors)
    if missing or unexpected:
        raise WeightsMismatch(
            f"{folder} does not fit {type(model).__name__}: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]} ({len(missing)} and {len(unexpected)} in all)"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise WeightsMismatch(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, the model "
                f"{tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _name_differences(
    own: dict[str, Tensor], tensors: dict[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Names the folder lacks and names it has too many. Of tensors in one storage one suffices."""
    given = {own[name].data_ptr() for name in tensors if name in own}
    missing = [name for name, value in own.items() if value.data_ptr() not in given]
    return sorted(missing), sorted(set(tensors) - set(own))


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsMismatch(f"{folder} holds no safetensors")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise WeightsMismatch(f"{path} cannot be read: {error}") from error
    return tensors


def _fetch(path: str | Path, revision: str | None, with_code: bool) -> tuple[Path, str]:
    """The folder with the model's files and the revision they are of."""
    if Path(path).is_dir():
        return Path(path), revision or ""
    name = str(path)
    # A hub id is OWNER/NAME; a few old ones are a NAME alone.
    if isinstance(path, Path) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: there is no such folder")
    patterns = [*HUB_FILES, "*.py"] if with_code else HUB_FILES
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name}: there is no such folder, and the Hugging Face hub does not give it: "
            f"{_one_line(error)}"
        ) from error
    return folder, folder.name


@contextmanager
def _reading(folder: Path, part: str) -> Iterator[None]:
    """READ_ERRORS as a ModelError of one line."""
    try:
        yield
    except READ_ERRORS as error:
        raise ModelError(f"{folder}: its {part} cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}..."


def _image_processor(folder: Path, common: dict[str, Any]) -> BaseImageProcessor:
    # Never the whole processor: some (InternVL's) want torchvision for their video part.
    settings = "image processor settings (preprocessor_config.json or processor_config.json)"
    with _reading(folder, settings):
        return AutoImageProcessor.from_pretrained(folder, backend="pil", **common)


def _placeholder_id(config: PreTrainedConfig) -> int | None:
    for name in ("image_token_id", "image_token_index"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    return None


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The generation config's ids (transformers fills it from the config where there is no file)
    and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = model.config.get_text_config(decoder=True).eos_token_id
    ids = set(configured if isinstance(configured, Iterable) else [configured])
    ids.add(tokenizer.eos_token_id)
    return tuple(sorted(int(one) for one in ids if one is not None))


def _special_id(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    for source in (tokenizer, model.generation_config, model.config):
        value = getattr(source, name, None)
        if value is not None:
            return int(value)
    return None


def _max_sequence_tokens(config: PreTrainedConfig) -> int:
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(text, name, None)
        if value:
            return int(value)
    return NO_LIMIT
