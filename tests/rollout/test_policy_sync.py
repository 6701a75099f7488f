"""What a worker loads is what was published: whole weights or an adapter, proven by the probe."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from modeling.adapters import LoraShape, add_adapter, load_adapter, save_adapter
from modeling.groups import TokenGroup
from modeling.load import load_model, load_weights, save_model
from modeling.probe import PolicyDrift, probe_logprobs, write_probe
from modeling.shared_prefix import plain_logprobs
from modeling.sharing import probe_groups
from preceptor.policy import PolicyStore, Version
from services.rollout import held_policy
from services.rollout.engines.torch import generate
from services.rollout.held_policy import HeldPolicy, WrongModel
from tests.rollout.test_torch_sampler import SETTINGS, requests_for
from tests.tiny_models import make_llama

ADAPTED = ("llama", "llava", "internvl")


@pytest.fixture
def store(tmp_path):
    return PolicyStore(tmp_path / "policies")


def publish(store, version, loaded, values=None):
    """What the trainer does: weights or the adapter, and its own view of the probe."""

    def write(folder):
        if hasattr(loaded.model, "peft_config"):
            save_adapter(loaded, folder)
        else:
            save_model(loaded, folder)
        theirs = probe_logprobs(loaded) if values is None else values
        write_probe(folder, theirs, "float32", probe_groups(loaded))

    store.publish(version, write)


def learn(loaded, seed):
    """Give the adapter some weights, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.mark.pitfall("G12")
@pytest.mark.parametrize("name", ADAPTED)
def test_a_worker_follows_an_adapter(store, load, name, caplog):
    caplog.set_level(logging.INFO)
    trainer, loaded = load(name), load(name)
    policy = HeldPolicy(loaded, store)
    add_adapter(trainer, LoraShape(2, 4.0), seed=0)
    requests = requests_for(name, 4)
    for step in range(3):
        publish(store, Version(0, step), trainer)
        policy.refresh()
        assert policy.version == Version(0, step)
        assert f"0-{step:06d} loaded in" in caplog.text and "nat from the trainer's" in caplog.text
        # What it now writes has the logprobs that the trainer computes.
        results = generate(loaded, requests, SETTINGS)
        groups = [
            TokenGroup(one.prompt_ids, tuple(sample.ids for sample in samples), one.images)
            for one, samples in zip(requests, results, strict=True)
        ]
        with torch.no_grad():
            wanted = plain_logprobs(trainer, groups, suppressed_ids=SETTINGS.suppressed_ids)
        for samples, theirs in zip(results, wanted, strict=True):
            for sample, values in zip(samples, theirs, strict=True):
                assert np.allclose(sample.logprobs, values.numpy(), atol=1e-4)
        learn(trainer, step)
    assert np.abs(probe_logprobs(trainer) - probe_logprobs(loaded)).mean() > 0.01


@pytest.mark.parametrize("adapter_first", (True, False))
def test_weights_and_adapters_do_not_follow_each_other(store, load, adapter_first):
    whole, adapted = load("llama"), load("llama")
    add_adapter(adapted, LoraShape(2, 4.0), seed=0)
    first, second = (adapted, whole) if adapter_first else (whole, adapted)
    policy = HeldPolicy(load("llama"), store)
    publish(store, Version(0, 0), first)
    policy.refresh()
    publish(store, Version(1, 1), second)
    with pytest.raises(WrongModel) as caught:
        policy.refresh()
    for word in (str(store.path(Version(1, 1))), "whole weights", "an adapter", "lora.rank"):
        assert word in str(caught.value)
    assert policy.version == Version(0, 0)


def test_an_adapter_of_another_model_is_a_configuration_error(store, load, tmp_path):
    other = load_model(make_llama(tmp_path / "other", intermediate_size=64))
    add_adapter(other, LoraShape(2, 4.0), seed=0)
    publish(store, Version(0, 0), other)
    policy = HeldPolicy(load("llama"), store)
    with pytest.raises(WrongModel, match=r"set rollout\.model to trainer\.student"):
        policy.refresh()
    assert policy.version is None


@pytest.mark.pitfall("L14")
def test_an_adapter_on_another_base_raises_the_alarm(store, load, tmp_path):
    # The adapter fits; only the probe can tell.
    trainer = load("llama")
    add_adapter(trainer, LoraShape(2, 4.0), seed=0)
    publish(store, Version(0, 0), trainer)
    policy = HeldPolicy(load_model(make_llama(tmp_path / "other", seed=1)), store)
    with pytest.raises(PolicyDrift, match=r"set rollout\.model to trainer\.student"):
        policy.refresh()


@pytest.mark.pitfall("L14")
@pytest.mark.parametrize("adapted", (False, True))
def test_weights_that_arrive_bent_raise_the_alarm(store, load, monkeypatch, caplog, adapted):
    trainer, loaded = load("llama"), load("llama")
    if adapted:
        add_adapter(trainer, LoraShape(2, 4.0), seed=0)
    publish(store, Version(0, 0), trainer)
    policy = HeldPolicy(loaded, store)
    policy.refresh()
    publish(store, Version(0, 1), trainer)

    def bend():
        with torch.no_grad():
            loaded.model.get_output_embeddings().weight.mul_(0.9)

    def load_bent_weights(model, folder):
        load_weights(model, folder)
        bend()

    def load_bent_adapter(loaded, folder):
        load_adapter(loaded, folder)
        bend()

    monkeypatch.setattr(held_policy, "load_weights", load_bent_weights)
    monkeypatch.setattr(held_policy, "load_adapter", load_bent_adapter)
    with pytest.raises(PolicyDrift):
        policy.refresh()
    # It must write nothing, the version before included: those weights are gone.
    assert policy.version is None and not policy.covers(Version(0, 0))
    assert "policy 0-000001: with the same published weights" in caplog.text


@pytest.mark.pitfall("T2")
def test_updates_that_are_ignored_raise_the_alarm_at_the_first_sync(
    store, load, tmp_path, monkeypatch
):
    monkeypatch.setattr(held_policy, "load_weights", lambda model, folder: None)
    policy = HeldPolicy(load("llama"), store)
    publish(store, Version(0, 0), load("llama"))
    policy.refresh()
    publish(store, Version(0, 1), load_model(make_llama(tmp_path / "next", seed=1)))
    with pytest.raises(PolicyDrift):
        policy.refresh()


@pytest.mark.pitfall("L14")
def test_staleness_is_no_drift(store, load, tmp_path):
    # The trainer is steps ahead of what the pointer shows this worker, and so is its student.
    publish(store, Version(0, 0), load("llama"))
    policy = HeldPolicy(load("llama"), store)
    newer = load_model(make_llama(tmp_path / "newer", seed=1))
    pointer = store.folder / "latest.json"
    shown = pointer.read_text()
    publish(store, Version(0, 5), newer)
    pointer.write_text(shown)
    policy.refresh()
    assert policy.version == Version(0, 0)


def test_versions_without_a_probe_are_held_and_said_once(store, load, caplog):
    policy = HeldPolicy(load("llama"), store)
    for step in range(3):
        store.publish(Version(0, step), lambda folder: save_model(load("llama"), folder))
        policy.refresh()
        assert policy.version == Version(0, step)
    assert caplog.text.count("has no probe") == 1


def test_a_broken_probe_is_a_broken_version(store, load, caplog):
    def write(folder):
        save_model(load("llama"), folder)
        (folder / "probe.json").write_text("{")

    store.publish(Version(0, 0), write)
    policy = HeldPolicy(load("llama"), store)
    policy.refresh()
    assert policy.version is None and "0-000000 cannot be loaded" in caplog.text
