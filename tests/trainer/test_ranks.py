"""The same batch gives the same statistics, loss, gradients and weights on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import make_llama, make_llava
from tests.trainer import rank_scenarios
from tests.trainer.rank_processes import run_to_end
from tests.trainer.rank_scenarios import LEARNING_RATE, SCENARIOS
from trainer.world import World

pytestmark = pytest.mark.slow
RANKS = (2, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"llama": make_llama(folder / "llama"), "llava": make_llava(folder / "llava")}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict[int, Path]:
    """By number of ranks, the folder with every scenario's outcome."""
    folder = tmp_path_factory.mktemp("ranks")
    given = [f"{name}={path}" for name, path in models.items()]
    for ranks in RANKS:
        place = folder / str(ranks)
        run_to_end(["tests.trainer.rank_scenarios", str(place / "out"), *given], ranks, place)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, scenario in SCENARIOS.items():
        rank_scenarios.run(scenario, models, World(0, 1), folder / "1" / "out" / name)
    torch.set_num_threads(threads)
    return {ranks: folder / str(ranks) / "out" for ranks in (1, *RANKS)}


def outcome(folder, name):
    tensors = load_file(folder / name / "tensors")
    return json.loads((folder / name / "metrics.json").read_text()), tensors


def largest_difference(one, other, kind):
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max()) for name in one if name.startswith(kind)
    )


@pytest.mark.pitfall("A2")
@pytest.mark.pitfall("A3")
@pytest.mark.parametrize("ranks", (1, *RANKS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_agree_with_one_process(results, name, ranks):
    scenario = SCENARIOS[name]
    wanted_metrics, wanted = outcome(results[1], scenario.same_as or name)
    metrics, tensors = outcome(results[ranks], name)
    for step, values in enumerate(wanted_metrics):
        assert metrics[step].keys() == values.keys()
        # Later steps start from weights that may differ as far as is allowed below.
        tolerance = 1e-6 if step == 0 else 1e-4
        for key, value in values.items():
            assert metrics[step][key] == pytest.approx(value, rel=tolerance, abs=tolerance), key
    scale = max(1.0, *(float(one.abs().max()) for one in wanted.values()))
    assert largest_difference(wanted, tensors, "gradients") < 1e-6 * scale
    adam = scenario.settings.get("optimiser", {}).get("name") != "sgd"
    tolerance = 0.05 * LEARNING_RATE if adam else 1e-6 * scale
    assert largest_difference(wanted, tensors, "weights") < tolerance


def test_the_scenarios_move_the_weights(results, models):
    """What is compared above is not nothing."""
    for name in SCENARIOS:
        _, tensors = outcome(results[1], name)
        gradients = [one for key, one in tensors.items() if key.startswith("gradients/")]
        assert max(float(one.abs().max()) for one in gradients) > 1e-4, name
