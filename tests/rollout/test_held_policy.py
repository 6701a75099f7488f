"""A worker keeps what it has until it has something whole and newer."""

from __future__ import annotations

import threading

import pytest
import torch

from modeling.load import load_model, save_model
from preceptor.policy import PolicyStore, Version
from services.rollout import held_policy
from services.rollout.held_policy import HeldPolicy
from tests.tiny_models import make_llama


@pytest.fixture
def store(tmp_path, load, monkeypatch):
    """Holds 0-000000, the tiny Llama's own weights."""
    monkeypatch.setattr(held_policy, "RETRY_SECONDS", 0.05)
    store = PolicyStore(tmp_path / "policies")
    store.publish(Version(0, 0), lambda folder: save_model(load("llama"), folder))
    return store


@pytest.fixture
def policy(store, load):
    return HeldPolicy(load("llama"), store, threading.Event())


def weights(policy):
    return policy._loaded.model.get_input_embeddings().weight.detach().clone()


def publish_llama(store, version, tmp_path, seed, **changes):
    other = load_model(make_llama(tmp_path / f"other-{seed}", seed=seed, **changes))
    return store.publish(version, lambda folder: save_model(other, folder))


def test_initial_weights_write_nothing(policy):
    assert policy.version is None and not policy.covers(Version(0, 0))
    assert policy.wait_for(Version(0, 0), 0.0)
    assert policy.version == Version(0, 0)


def test_newer_is_loaded_only_when_asked_for(policy, store, tmp_path):
    policy.wait_for(Version(0, 0), 0.0)
    before = weights(policy)
    publish_llama(store, Version(0, 1), tmp_path, seed=1)
    assert policy.wait_for(Version(0, 0), 0.0)
    assert policy.version == Version(0, 0) and torch.equal(weights(policy), before)
    assert policy.wait_for(Version(0, 1), 0.0)
    assert policy.version == Version(0, 1) and not torch.equal(weights(policy), before)


def test_a_new_incarnation_is_newer_than_any_step_before(policy, store, tmp_path):
    publish_llama(store, Version(0, 9), tmp_path, seed=1)
    assert policy.wait_for(Version(0, 9), 0.0)
    assert not policy.covers(Version(1, 3))
    publish_llama(store, Version(1, 3), tmp_path, seed=2)
    assert policy.wait_for(Version(1, 2), 0.0)
    assert policy.version == Version(1, 3)


def test_a_version_that_does_not_appear(policy):
    assert not policy.wait_for(Version(0, 1), 0.2)
    assert policy.version == Version(0, 0)
    policy._stop.set()
    assert not policy.wait_for(Version(0, 1), 60.0)


@pytest.mark.pitfall("T1")
def test_a_cut_version_leaves_the_held_one_until_it_is_whole(policy, store, tmp_path, caplog):
    policy.wait_for(Version(0, 0), 0.0)
    before = weights(policy)
    folder = publish_llama(store, Version(0, 1), tmp_path, seed=1)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert not policy.wait_for(Version(0, 1), 0.1)
    assert policy.version == Version(0, 0) and torch.equal(weights(policy), before)
    assert caplog.text.count("0-000001 cannot be loaded, 0-000000 is kept") == 1
    healed = threading.Timer(0.2, file.write_bytes, [whole])
    healed.start()
    assert policy.wait_for(Version(0, 1), 10.0)
    assert policy.version == Version(0, 1)


def test_weights_of_another_shape_leave_the_held_ones(policy, store, tmp_path, caplog):
    policy.wait_for(Version(0, 0), 0.0)
    before = weights(policy)
    publish_llama(store, Version(0, 1), tmp_path, seed=1, intermediate_size=64)
    assert not policy.wait_for(Version(0, 1), 0.1)
    assert policy.version == Version(0, 0) and torch.equal(weights(policy), before)
    assert "has shape" in caplog.text
