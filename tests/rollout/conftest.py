"""One folder per tiny model, made once; a real Redis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modeling.load import LoadedModel, load_model
from tests import tiny_models
from tests.redis_fixtures import redis_client, redis_url

__all__ = ["redis_client", "redis_url"]

MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_models.make_llama,
    "gpt2": tiny_models.make_gpt2,
    "mistral": tiny_models.make_mistral,
    "gemma2": tiny_models.make_gemma2,
    "llava": tiny_models.make_llava,
    "internvl": tiny_models.make_internvl,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture
def load(folders: dict[str, Path]) -> Callable[[str], LoadedModel]:
    """Load a tiny model by name; each call makes a fresh one."""
    return lambda name: load_model(folders[name])
