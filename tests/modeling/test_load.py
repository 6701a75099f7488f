"""Loading, saving, and swapping weights in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.load import ModelError, WeightsMismatch, load_model, load_weights, save_model
from tests.tiny_models import EOS, IMAGE, make_gpt2, make_llama, make_llava

# Prints, per folder: are input and output embeddings one storage; logits of a fixed prompt.
FRESH = """
import sys, torch
from modeling.load import load_model
for folder in sys.argv[1:]:
    model = load_model(folder).model
    same = model.get_input_embeddings().weight.data_ptr() == model.lm_head.weight.data_ptr()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    print(same, logits.double().sum().item(), logits[0, -1, 11].item())
"""


@pytest.mark.pitfall("T4")
def test_tied_weights_survive_a_fresh_process(load, tmp_path):
    wanted = {}
    for name in ("gpt2", "llava", "internvl"):
        loaded = load(name)
        with torch.no_grad():
            # What training does: a change through the shared storage.
            loaded.model.get_input_embeddings().weight.mul_(1.5)
            wanted[name] = loaded.model(torch.tensor([[5, 6, 7]])).logits
        save_model(loaded, tmp_path / name)
    process = subprocess.run(
        [sys.executable, "-c", FRESH, *(str(tmp_path / name) for name in wanted)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    for line, logits in zip(process.stdout.splitlines(), wanted.values(), strict=True):
        same, total, one = line.split()
        assert same == "True"
        assert float(total) == pytest.approx(logits.double().sum().item(), rel=1e-5)
        assert float(one) == pytest.approx(logits[0, -1, 11].item(), rel=1e-5)


@pytest.mark.parametrize("maker", (make_llama, make_gpt2, make_llava))
def test_weights_are_swapped_in_place(maker, tmp_path):
    first, second = load_model(maker(tmp_path / "1", seed=1)), load_model(maker(tmp_path / "2", 2))
    save_model(second, tmp_path / "saved")
    pointers = {name: value.data_ptr() for name, value in first.model.state_dict().items()}
    load_weights(first.model, tmp_path / "saved")
    wanted = second.model.state_dict()
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
        assert value.data_ptr() == pointers[name]


@pytest.mark.parametrize("fault", ("missing", "unexpected", "shape", "cut", "empty"))
def test_weights_that_do_not_fit_change_nothing(load, tmp_path, fault):
    loaded = load("llama")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    save_model(loaded, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: value + 1 for name, value in load_file(path).items()}
    name = sorted(tensors)[-1]
    if fault == "missing":
        del tensors[name]
    elif fault == "unexpected":
        tensors["model.surprise"] = torch.zeros(2)
    elif fault == "shape":
        tensors[name] = torch.zeros(3)
    save_file(tensors, path)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "empty":
        path.unlink()
    with pytest.raises(WeightsMismatch, match=str(tmp_path)):
        load_weights(loaded.model, tmp_path)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_every_id_that_ends_a_response_is_known(tmp_path):
    folder = make_llama(tmp_path, eos_token_id=[7, 9])
    loaded = load_model(folder)
    assert loaded.eos_ids == (EOS, 7, 9)
    assert (loaded.bos_id, loaded.pad_id, loaded.image_placeholder_id) == (1, 0, None)
    assert (loaded.embedding_rows, loaded.max_sequence_tokens) == (96, 128)


def test_a_vision_model_knows_its_placeholder(load):
    loaded = load("internvl")
    assert loaded.image_placeholder_id == IMAGE
    assert type(loaded.image_processor).__name__ == "GotOcr2ImageProcessorPil"


@pytest.mark.parametrize(
    ("name", "words"),
    (
        ("/nope", "there is no such folder"),
        ("./nope", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        (Path("nope"), "there is no such folder"),
        ("no hub id!", "hub does not give it"),
    ),
)
def test_a_model_that_is_not_there(name, words):
    with pytest.raises(ModelError, match=words) as caught:
        load_model(name)
    assert str(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", (OSError("not\nthere"), ConnectionError("offline"), ValueError()))
def test_whatever_the_hub_raises_is_one_line(monkeypatch, error):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr("modeling.load.snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match="owner/name") as caught:
        load_model("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "part"),
    (
        ("config.json", None, "config"),
        ("config.json", "{", "config"),
        ("config.json", "{}", "config"),
        ("model.safetensors", "damaged", "weights"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", "{", "tokenizer"),
        ("preprocessor_config.json", None, "image processor"),
    ),
)
def test_a_folder_that_lacks_something_is_named(tmp_path, file, content, part):
    folder = make_llava(tmp_path)
    if file == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink()
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=f"{folder}: its {part}") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_pickled_weights_and_unknown_dtypes_are_refused(tmp_path, folders):
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="float64"):
        load_model(folders["llama"], dtype="float64")
