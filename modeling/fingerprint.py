"""SHA-256 (hex) names of the things two models must agree on.

All are over canonical JSON or file bytes, so that they are equal on every machine and in every
process.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

# Say where the settings were saved or by what they are run, not what they do to an image.
IRRELEVANT = {"processor_class", "_processor_class", "backend", "return_tensors", "device"}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Over the id -> token map, added tokens included. Embedding rows play no part."""
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return digest(tokens)


def image_processor_fingerprint(processor: BaseImageProcessor | None) -> str:
    """Over the settings; the PIL and torchvision variants of a processor agree. None: empty."""
    if processor is None:
        return ""
    settings = {
        key: value
        for key, value in processor.to_dict().items()
        if key not in IRRELEVANT and value is not None
    }
    kind = str(settings.get("image_processor_type", type(processor).__name__))
    settings["image_processor_type"] = kind.removesuffix("Pil").removesuffix("Fast")
    return digest(settings)


def config_fingerprint(config: PreTrainedConfig) -> str:
    """Over the model's configuration: rotary base, norm epsilon and the like change every score."""
    settings = config.to_dict()
    return digest(_without(settings, ("_name_or_path", "transformers_version", "dtype")))


def _without(value: Any, names: tuple[str, ...]) -> Any:
    """The same tree without these keys: they say where a model is from and how it was loaded."""
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return value


def weights_hash(folder: Path) -> str:
    """Over names and SHA-256 of the folder's safetensors files, in order of their names.

    Of the files and not of the tensors in memory: any engine can compute it before it loads.
    """
    hashes = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            hashes.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return digest(hashes)


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
