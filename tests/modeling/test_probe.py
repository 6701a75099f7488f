"""The probe finds weights that did not arrive, and takes neither rounding nor age for that."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from modeling.load import load_model, load_weights, save_model
from modeling.packed import packed_scores
from modeling.padded import padded_scores
from modeling.probe import (
    TOLERANCE,
    PolicyDrift,
    check_probe,
    probe_logprobs,
    read_probe,
    write_probe,
)
from modeling.sharing import probe_groups
from preceptor.manifest import CorruptFolder
from tests.tiny_models import IMAGE, make_llama

ALL = ("llama", "gpt2", "mistral", "gemma2", "llava", "internvl")
VISION = ("llava", "internvl")


def record(loaded, folder, dtype="float32", shift=0.0):
    folder.mkdir(exist_ok=True)
    write_probe(folder, probe_logprobs(loaded) + np.float32(shift), dtype, probe_groups(loaded))
    return read_probe(folder)


def soften(loaded, nats):
    """Scale all logits so that the probe's logprobs move by `nats` on average."""
    weight = loaded.model.get_output_embeddings().weight
    original, before = weight.detach().clone(), probe_logprobs(loaded)
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        with torch.no_grad():
            weight.copy_(original * middle)
        moved = np.abs(probe_logprobs(loaded) - before).mean()
        low, high = (middle, high) if moved > nats else (low, middle)
    assert moved == pytest.approx(nats, abs=0.01)


@pytest.mark.parametrize("name", ALL)
def test_the_same_weights_agree_whatever_the_layout(load, tmp_path, name):
    loaded = load(name)
    recorded = record(loaded, tmp_path)
    assert recorded.values.dtype == np.float32 and recorded.values.shape == (12,)
    assert (recorded.values <= 0).all() and recorded.dtype == "float32"
    assert check_probe(load(name), recorded) == 0.0
    suppressed = [IMAGE] if name in VISION else []
    with torch.no_grad():
        for path in (padded_scores, packed_scores) if name != "mistral" else (padded_scores,):
            theirs = path(loaded, probe_groups(loaded), suppressed_ids=suppressed).logprobs_T
            write_probe(tmp_path, theirs.numpy(), "float32", probe_groups(loaded))
            assert check_probe(loaded, read_probe(tmp_path)) < 1e-5


def test_images_are_part_of_it(load):
    loaded = load("llava")
    before = probe_logprobs(loaded)
    with torch.no_grad():
        for parameter in loaded.model.get_encoder(modality="image").parameters():
            parameter.mul_(1.5)
    assert np.abs(probe_logprobs(loaded) - before).mean() > TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("name", ("llama", "gpt2", "gemma2", "llava", "internvl"))
def test_rounding_is_no_drift(load, folders, tmp_path, name, dtype):
    half = load_model(folders[name], dtype=dtype)
    difference = check_probe(half, record(load(name), tmp_path))
    assert 1e-4 < difference < TOLERANCE[dtype] / 4
    # And the other way round: the trainer computes in less than the worker.
    assert check_probe(load(name), record(half, tmp_path, dtype)) == pytest.approx(difference)


@pytest.mark.pitfall("L14")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ("llama", "internvl"))
def test_half_a_nat_raises_the_alarm(load, folders, tmp_path, name, dtype):
    worker = load_model(folders[name], dtype=dtype)
    recorded = record(load(name), tmp_path)
    soften(worker, 0.5)
    with pytest.raises(PolicyDrift) as caught:
        check_probe(worker, recorded)
    said = str(caught.value)
    for word in (str(folders[name]), dtype, "(float32)", f"explains {TOLERANCE[dtype]:g}"):
        assert word in said
    [difference] = re.findall(r"differ by ([0-9.]+) nat", said)
    # The worker's own rounding comes on top.
    assert float(difference) == pytest.approx(0.5, abs=0.1)


@pytest.mark.pitfall("L14")
def test_a_stale_version_is_compared_with_itself(load, tmp_path):
    versions = []
    for seed in (0, 1):
        trainer = load_model(make_llama(tmp_path / f"{seed}", seed))
        save_model(trainer, tmp_path / f"policy-{seed}")
        versions.append(record(trainer, tmp_path / f"policy-{seed}"))
    # The trainer is at version 1; a worker that still holds 0 agrees with 0's record.
    worker = load("llama")
    load_weights(worker.model, tmp_path / "policy-0")
    assert check_probe(worker, versions[0]) == 0.0
    # The same worker, if it believed to hold version 1.
    with pytest.raises(PolicyDrift):
        check_probe(worker, versions[1])


def test_what_is_no_number_is_no_agreement(load, tmp_path):
    loaded = load("llama")
    recorded = record(loaded, tmp_path, shift=np.nan)
    with pytest.raises(PolicyDrift, match="nan"):
        check_probe(loaded, recorded)


def test_other_ids_are_said_to_be_that(load, tmp_path):
    recorded = record(load("llama"), tmp_path)
    with pytest.raises(PolicyDrift, match=r"other ids.*set rollout\.model to trainer\.student"):
        check_probe(load("llava"), recorded)


def test_no_probe_and_a_broken_one(tmp_path):
    assert read_probe(tmp_path) is None
    fields = '{"values": %s, "ids_sha256": "", "dtype": "%s"}'
    for content in ("{", "{}", "[]", fields % ('"x"', "float32"), fields % ("[1]", "float8")):
        (tmp_path / "probe.json").write_text(content)
        with pytest.raises(CorruptFolder, match=r"probe\.json cannot be read"):
            read_probe(tmp_path)
