"""A teacher's identity covers all that a score depends on."""

import json
import shutil

import pytest

from modeling.card import describe_model
from modeling.load import load_model
from tests.tiny_models import make_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("card"))


def identity(folder):
    return describe_model(load_model(folder)).identity


def test_a_copy_elsewhere_is_the_same_teacher(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert identity(copy) == identity(folder)


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"max_position_embeddings": 64}])
def test_another_configuration_is_another_teacher(folder, tmp_path, change):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    assert identity(copy) != identity(folder)


def test_other_weights_are_another_teacher(folder, tmp_path):
    assert identity(make_llama(tmp_path, seed=1)) != identity(folder)
