"""Running teachers and the models they serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.teacher.teacher_process import Service, run_service
from tests.tiny_models import make_llama, make_llava


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session")
def teacher(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A text teacher with the default settings but a small batch."""
    folder = tmp_path_factory.mktemp("teacher")
    with run_service(llama_folder, folder, "--teacher.max_batch_tokens", "600") as service:
        yield service


@pytest.fixture(scope="session")
def vision_teacher(
    llava_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A teacher that sees images."""
    folder = tmp_path_factory.mktemp("vision")
    limits = ["--teacher.max_image_pixels", "10000", "--teacher.max_image_bytes", "40000"]
    limits += ["--teacher.max_request_pixels", "20000"]
    with run_service(llava_folder, folder, *limits) as service:
        yield service
