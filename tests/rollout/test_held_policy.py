"""A worker keeps what it has until it has something whole and newer."""

from __future__ import annotations

import pytest
import torch

from modeling.load import WeightsMismatch, load_model, load_weights, save_model
from preceptor.policy import PolicyStore, Version
from services.rollout import held_policy
from services.rollout.held_policy import HeldPolicy, WrongModel
from tests.tiny_models import make_llama


@pytest.fixture
def store(tmp_path, load, monkeypatch):
    """Holds 0-000000, the tiny Llama's own weights."""
    monkeypatch.setattr(held_policy, "RETRY_SECONDS", 0.0)
    store = PolicyStore(tmp_path / "policies")
    store.publish(Version(0, 0), lambda folder: save_model(load("llama"), folder))
    return store


@pytest.fixture
def policy(store, load):
    return HeldPolicy(load("llama"), store)


def weights(policy):
    return policy._loaded.model.get_input_embeddings().weight.detach().clone()


def publish_llama(store, version, tmp_path, seed, **changes):
    other = load_model(make_llama(tmp_path / f"other-{seed}", seed=seed, **changes))
    return store.publish(version, lambda folder: save_model(other, folder))


def test_initial_weights_write_nothing(policy):
    assert policy.version is None and not policy.covers(Version(0, 0))
    policy.refresh()
    assert policy.version == Version(0, 0) and policy.covers(Version(0, 0))


def test_refreshing_loads_the_newest_and_only_that(policy, store, tmp_path):
    policy.refresh()
    before = weights(policy)
    policy.refresh()
    assert policy.version == Version(0, 0) and torch.equal(weights(policy), before)
    publish_llama(store, Version(0, 1), tmp_path, seed=1)
    policy.refresh()
    assert policy.version == Version(0, 1) and not torch.equal(weights(policy), before)
    assert policy.covers(Version(0, 0)) and not policy.covers(Version(0, 2))


def test_a_new_incarnation_is_newer_than_any_step_before(policy, store, tmp_path):
    publish_llama(store, Version(0, 9), tmp_path, seed=1)
    policy.refresh()
    assert policy.version == Version(0, 9) and not policy.covers(Version(1, 3))
    publish_llama(store, Version(1, 3), tmp_path, seed=2)
    policy.refresh()
    assert policy.version == Version(1, 3)


def test_before_the_first_publication_there_is_nothing_to_hold(tmp_path, load):
    policy = HeldPolicy(load("llama"), PolicyStore(tmp_path / "nothing here"))
    policy.refresh()
    assert policy.version is None


@pytest.mark.pitfall("T1")
def test_a_cut_version_leaves_the_held_one_until_it_is_whole(policy, store, tmp_path, caplog):
    policy.refresh()
    before = weights(policy)
    folder = publish_llama(store, Version(0, 1), tmp_path, seed=1)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    for _ in range(3):
        policy.refresh()
    assert policy.version == Version(0, 0) and torch.equal(weights(policy), before)
    assert caplog.text.count("0-000001 cannot be loaded, 0-000000 is kept") == 1
    file.write_bytes(whole)
    policy.refresh()
    assert policy.version == Version(0, 1)


def test_a_damaged_version_is_not_hashed_again_at_once_and_its_successor_is(
    policy, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(held_policy, "RETRY_SECONDS", 3600.0)
    folder = publish_llama(store, Version(0, 1), tmp_path, seed=1)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    policy.refresh()
    (folder / "model.safetensors").write_bytes(whole)
    policy.refresh()
    assert policy.version is None
    publish_llama(store, Version(0, 2), tmp_path, seed=2)
    policy.refresh()
    assert policy.version == Version(0, 2)


def test_weights_of_another_model_are_a_configuration_error(policy, store, tmp_path):
    policy.refresh()
    before = weights(policy)
    folder = publish_llama(store, Version(0, 1), tmp_path, seed=1, intermediate_size=64)
    with pytest.raises(WrongModel) as caught:
        policy.refresh()
    said = str(caught.value)
    # Both sides, and what to change.
    for word in (policy._loaded.model_id, str(folder), "has shape", "set rollout.model"):
        assert word in said
    assert policy.version == Version(0, 0) and torch.equal(weights(policy), before)


def test_a_version_pruned_while_it_is_read_is_none_of_that(
    policy, store, tmp_path, monkeypatch, caplog
):
    publish_llama(store, Version(0, 1), tmp_path, seed=1)

    def prune_first(model, folder):
        for file in folder.glob("*.safetensors"):
            file.unlink()
        with pytest.raises(WeightsMismatch):
            load_weights(model, folder)
        load_weights(model, folder)

    monkeypatch.setattr(held_policy, "load_weights", prune_first)
    policy.refresh()
    assert policy.version is None and "0-000001 cannot be loaded" in caplog.text
