"""LoRA in place: it changes nothing at first, it alone learns, and saved it is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.adapters import (
    LoraShape,
    add_adapter,
    has_adapter,
    load_adapter,
    merge_adapter,
    save_adapter,
)
from modeling.load import ModelError, WeightsMismatch, load_model, save_model
from modeling.shared_prefix import group_logprobs, plain_logprobs
from tests.modeling.test_shared_prefix import flatten, image_groups, text_groups
from tests.tiny_models import make_llama, make_llava

SHAPE = LoraShape(4, 8.0)
NAMES = ("llama", "gpt2", "llava", "internvl")
ATTENTION = LoraShape(2, 4.0, ("q_proj", "v_proj"))

# Prints the logits of a fixed prompt: by peft itself, on the base model's folder.
FRESH = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
auto = AutoModelForImageTextToText if sys.argv[1] == "llava" else AutoModelForCausalLM
model = PeftModel.from_pretrained(auto.from_pretrained(sys.argv[2]), sys.argv[3]).eval()
with torch.no_grad():
    print(model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].tolist())
"""


def groups_for(name):
    return image_groups() if name in ("llava", "internvl") else text_groups()


def logprobs(loaded, name):
    with torch.no_grad():
        return flatten(group_logprobs(loaded, groups_for(name)))


def logits(loaded):
    with torch.no_grad():
        return loaded.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]


def train(loaded, name, steps=3):
    """A few updates that raise the groups' logprobs; returns what was trained."""
    trained = [one for one in loaded.model.parameters() if one.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        (-flatten(group_logprobs(loaded, groups_for(name))).mean()).backward()
        optimiser.step()
    return trained


def adapter_tensors(loaded):
    return {key: one for key, one in loaded.model.named_parameters() if "lora_" in key}


@pytest.mark.parametrize("name", NAMES)
def test_a_new_adapter_changes_nothing_and_only_it_learns(load, name):
    loaded = load(name)
    before = logprobs(loaded, name)
    kind, head = type(loaded.model), loaded.head.projection
    base = {key: one.clone() for key, one in loaded.model.state_dict().items()}
    add_adapter(loaded, SHAPE, seed=0)
    assert torch.equal(logprobs(loaded, name), before)
    assert type(loaded.model) is kind and loaded.model.get_output_embeddings() is head
    assert not any(one.training for one in loaded.model.modules())

    flatten(group_logprobs(loaded, groups_for(name))).sum().backward()
    adapter = adapter_tensors(loaded)
    for key, parameter in loaded.model.named_parameters():
        assert (parameter.grad is not None) == (key in adapter), key
        assert parameter.requires_grad == (key in adapter), key
    assert all(one.dtype == torch.float32 for one in adapter.values())
    assert not any("vision" in key or "head" in key or "projector" in key for key in adapter)
    # B has gradients from the first step on; A's are zero as long as B is.
    assert all(one.grad.abs().max() > 0 for key, one in adapter.items() if "lora_B" in key)

    train(loaded, name)
    assert (logprobs(loaded, name) - before).abs().max() > 1e-2
    frozen = {key.replace(".base_layer", ""): one for key, one in loaded.model.named_parameters()}
    assert all(torch.equal(frozen[key], base[key]) for key in frozen if key in base)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_shared_equal_plain(load, name):
    loaded = load(name)
    add_adapter(loaded, SHAPE, seed=0)
    train(loaded, name)
    found = []
    for score in (group_logprobs, plain_logprobs):
        loaded.model.zero_grad()
        values = flatten(score(loaded, groups_for(name)))
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        found.append({key: one.grad.clone() for key, one in adapter_tensors(loaded).items()})
    for key, one in found[0].items():
        assert torch.allclose(one, found[1][key], atol=1e-4), key


@pytest.mark.parametrize("name", NAMES)
def test_saved_loaded_and_merged_are_the_same(load, tmp_path, name):
    trained = load(name)
    add_adapter(trained, SHAPE, seed=0)
    train(trained, name)
    wanted, wanted_logits = logprobs(trained, name), logits(trained)
    save_adapter(trained, tmp_path / "adapter")
    assert has_adapter(tmp_path / "adapter")

    fresh = load(name)
    load_adapter(fresh, tmp_path / "adapter")
    assert (logprobs(fresh, name) - wanted).abs().max() < 1e-6
    assert not any(one.requires_grad for one in fresh.model.parameters())

    merge_adapter(trained)
    assert (logits(trained) - wanted_logits).abs().max() < 1e-5
    assert (logprobs(trained, name) - wanted).abs().max() < 1e-5
    assert trained.model.state_dict().keys() == load(name).model.state_dict().keys()
    save_model(trained, tmp_path / "merged")
    assert not has_adapter(tmp_path / "merged")
    assert (logprobs(load_model(tmp_path / "merged"), name) - wanted).abs().max() < 1e-5
    # It may get another one.
    add_adapter(trained, SHAPE, seed=1)


@pytest.mark.parametrize(("name", "layers"), (("llama", 2), ("llava", 3)))
def test_peft_loads_it_in_a_fresh_process(tmp_path, name, layers):
    # With 3 layers there are so many names that peft shortens them.
    folder = (
        make_llama(tmp_path / name, num_hidden_layers=layers)
        if name == "llama"
        else make_llava(tmp_path / name, num_hidden_layers=layers)
    )
    loaded = load_model(folder)
    add_adapter(loaded, SHAPE, seed=0)
    train(loaded, name)
    save_adapter(loaded, tmp_path / "adapter")
    process = subprocess.run(
        [sys.executable, "-c", FRESH, name, str(folder), str(tmp_path / "adapter")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert torch.allclose(torch.tensor(json.loads(process.stdout)), logits(loaded), atol=1e-5)
    other = load_model(folder)
    load_adapter(other, tmp_path / "adapter")
    assert torch.allclose(logits(other), logits(loaded), atol=1e-6)


def test_the_seed_alone_says_what_it_starts_from(load):
    torch.manual_seed(1)
    one, same, other = load("llama"), load("llama"), load("llama")
    add_adapter(one, SHAPE, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    add_adapter(same, SHAPE, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    add_adapter(other, SHAPE, seed=6)
    ours, theirs, others = map(adapter_tensors, (one, same, other))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not all(torch.equal(ours[key], others[key]) for key in ours)


def test_targets_are_layers_of_the_decoder(load):
    loaded = load("llava")
    add_adapter(loaded, ATTENTION, seed=0)
    layers = {key.partition(".lora_")[0] for key in adapter_tensors(loaded)}
    assert layers == {
        f"model.language_model.layers.{index}.self_attn.{name}"
        for index in (0, 1)
        for name in ATTENTION.targets
    }


@pytest.mark.parametrize("target", ("qproj", "lm_head", "vision_tower.q_proj", "roj", ""))
def test_a_target_that_names_nothing_is_refused(load, target):
    loaded = load("llava")
    with pytest.raises(ModelError, match=r"q_proj") as caught:
        add_adapter(loaded, LoraShape(2, 4.0, ("v_proj", target)), seed=0)
    assert repr(target) in str(caught.value) and "nearest" in str(caught.value)
    assert not adapter_tensors(loaded)


def test_a_model_holds_one_adapter(load, tmp_path):
    loaded = load("llama")
    for refused in (merge_adapter, lambda one: save_adapter(one, tmp_path)):
        with pytest.raises(ModelError, match="no adapter"):
            refused(loaded)
    add_adapter(loaded, SHAPE, seed=0)
    with pytest.raises(ModelError, match="holds one"):
        add_adapter(loaded, SHAPE, seed=0)


def test_without_peft_the_extra_is_named(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'preceptor\[lora\]'"):
        add_adapter(load("llama"), SHAPE, seed=0)


def test_gathered_weights_are_saved_and_replace_what_is_held(load, tmp_path):
    loaded, worker = load("llama"), load("llama")
    add_adapter(loaded, SHAPE, seed=0)
    save_adapter(loaded, tmp_path / "first")
    load_adapter(worker, tmp_path / "first")
    pointers = {key: one.data_ptr() for key, one in adapter_tensors(worker).items()}
    tensors = {
        key: torch.full_like(one, 0.01, dtype=torch.bfloat16)
        for key, one in adapter_tensors(loaded).items()
    }
    save_adapter(loaded, tmp_path / "second", tensors)
    load_adapter(worker, tmp_path / "second")
    for key, one in adapter_tensors(worker).items():
        assert one.dtype == torch.float32 and one.data_ptr() == pointers[key]
        assert torch.equal(one, tensors[key].float())
    del tensors[next(iter(tensors))]
    with pytest.raises(ModelError, match="28 tensors cannot be saved from 27"):
        save_adapter(loaded, tmp_path / "third", tensors)
    assert not (tmp_path / "third").exists()


FAULTS = {
    "missing": "missing",
    "unexpected": "unexpected",
    "shape": "has shape",
    "cut": "cannot be read",
    "no weights": "cannot be read",
    "no config": "cannot be read",
    "dora": "use_dora",
    "pattern": "named layers",
    "other layers": "nope|does not fit",
    "rank": "rank 3|has shape",
}


@pytest.mark.parametrize("held", (False, True))
@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_does_not_fit_changes_nothing(load, tmp_path, held, fault):
    loaded, donor = load("llama"), load("llama")
    add_adapter(donor, SHAPE, seed=0)
    save_adapter(donor, tmp_path)
    if held:
        load_adapter(loaded, tmp_path)
    before = {key: one.clone() for key, one in loaded.model.state_dict().items()}

    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors = {key: one + 1 for key, one in load_file(weights).items()}
    settings = json.loads(config.read_text())
    name = sorted(tensors)[-1]
    match fault:
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors["base_model.model.surprise"] = torch.zeros(2)
        case "shape":
            tensors[name] = torch.zeros(3)
        case "dora":
            settings["use_dora"] = True
        case "pattern":
            settings["target_modules"] = ".*proj"
        case "other layers":
            settings["target_modules"] = ["nope"]
            tensors = {key.replace("q_proj", "nope"): one for key, one in tensors.items()}
        case "rank":
            settings["r"] = 3
    save_file(tensors, weights)
    config.write_text(json.dumps(settings))
    if fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif fault == "no weights":
        weights.unlink()
    elif fault == "no config":
        config.unlink()
    with pytest.raises(WeightsMismatch, match=FAULTS[fault]) as caught:
        load_adapter(loaded, tmp_path)
    assert str(tmp_path) in str(caught.value)
    after = loaded.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_another_alpha_is_another_adapter(load, tmp_path):
    loaded, donor = load("llama"), load("llama")
    add_adapter(donor, SHAPE, seed=0)
    save_adapter(donor, tmp_path)
    load_adapter(loaded, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 16.0}))
    with pytest.raises(WeightsMismatch, match=r"alpha 16.*has 4 and 8"):
        load_adapter(loaded, tmp_path)


def test_a_bfloat16_base_keeps_a_float32_adapter(folders, tmp_path):
    whole, half = load_model(folders["llama"]), load_model(folders["llama"], dtype="bfloat16")
    add_adapter(whole, SHAPE, seed=0)
    train(whole, "llama")
    save_adapter(whole, tmp_path)
    load_adapter(half, tmp_path)
    assert {one.dtype for one in adapter_tensors(half).values()} == {torch.float32}
    assert (logprobs(half, "llama") - logprobs(whole, "llama")).abs().mean() < 0.25
