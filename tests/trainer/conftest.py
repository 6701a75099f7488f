"""A tiny text model for the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))
