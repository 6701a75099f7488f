"""Proof that published weights arrived: the same small probe scored on both sides.

The trainer writes its own logprobs into every version's folder; who loads that version scores the
probe again and compares. Both sides hold the same version, so staleness makes no difference here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from modeling.groups import TokenGroup
from modeling.load import LoadedModel, ModelError
from modeling.shared_prefix import group_logprobs
from modeling.sharing import probe_groups
from preceptor.manifest import CorruptFolder

FILE = "probe.json"
# Largest mean absolute difference in nats that rounding explains, by dtype; 0.5 must be found.
# Measured against float32 on models of 2 layers, and on a trained one of 30 (SmolLM2-135M): another
# layout in float32 1e-6 (the rest is for TF32 convolutions on a GPU), float16 .006 and .012,
# bfloat16 .043 and .090.
TOLERANCE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}


class PolicyDrift(ModelError):
    """This process computes other logprobs with a version's weights than the trainer did."""


@dataclass(frozen=True, eq=False)
class Probe:
    """What the trainer recorded.

    Attributes:
        values: float32 [n] logprobs (nats) of all response tokens of the probe in order.
        ids_sha256: hex, of the probe's ids.
        dtype: the trainer computed in; a key of TOLERANCE.
    """

    values: NDArray[np.float32]
    ids_sha256: str
    dtype: str


@torch.no_grad()
def probe_logprobs(loaded: LoadedModel) -> NDArray[np.float32]:
    """Logprobs of the probe's responses under the current weights, float32 [n], at temperature 1.

    The image placeholder leaves the distribution, as it does where responses are sampled and
    trained on.
    """
    placeholder = loaded.image_placeholder_id
    suppressed = [] if placeholder is None else [placeholder]
    groups = group_logprobs(loaded, probe_groups(loaded), suppressed_ids=suppressed)
    return torch.cat([one for group in groups for one in group]).float().cpu().numpy()


def write_probe(
    folder: Path, values: NDArray[np.float32], dtype: str, groups: Sequence[TokenGroup]
) -> None:
    """Record the trainer's side in a version's folder, before it is published.

    Args:
        folder: exists.
        values: float32 [n], as probe_logprobs gives them, by whatever path.
        dtype: they were computed in; a key of TOLERANCE.
        groups: modeling.sharing.probe_groups of the student.
    """
    record = {"dtype": dtype, "ids_sha256": _ids_sha256(groups), "values": values.tolist()}
    (folder / FILE).write_text(json.dumps(record))


def read_probe(folder: Path) -> Probe | None:
    """What write_probe recorded; None where there is nothing.

    Raises:
        preceptor.manifest.CorruptFolder: it cannot be read.
    """
    try:
        record = json.loads((folder / FILE).read_text())
        values = np.array(record["values"], dtype=np.float32)
        probe = Probe(values, str(record["ids_sha256"]), str(record["dtype"]))
        if probe.dtype not in TOLERANCE:
            raise ValueError(f"dtype {probe.dtype} is unknown")
        return probe
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorruptFolder(f"{folder / FILE} cannot be read: {error}") from error


def check_probe(loaded: LoadedModel, recorded: Probe) -> float:
    """Mean absolute difference, in nats, of this process' logprobs of the probe and the trainer's.

    Args:
        loaded: holds the version's weights.
        recorded: at that version.

    Raises:
        PolicyDrift: the difference is no rounding of the coarser of both dtypes, or the probes
            differ already in their ids.
    """
    if recorded.ids_sha256 != _ids_sha256(probe_groups(loaded)):
        raise PolicyDrift(
            f"the trainer's probe has other ids than that of rollout.model {loaded.model_id}: its "
            "tokenizer or image processor, or the version of preceptor or numpy, is not the "
            "trainer's; set rollout.model to trainer.student"
        )
    difference = float(np.abs(probe_logprobs(loaded) - recorded.values).mean())
    tolerance = max(TOLERANCE[recorded.dtype], TOLERANCE[loaded.dtype])
    # A NaN is no agreement either.
    if difference <= tolerance:
        return difference
    raise PolicyDrift(
        f"with the same published weights the rollout worker ({loaded.model_id}, {loaded.dtype}, "
        f"{loaded.device}) and the trainer ({recorded.dtype}) give the probe's tokens logprobs "
        f"that differ by {difference:.3g} nat on average; rounding explains {tolerance:g}. The "
        "weights did not arrive as they are, or both sides compute differently: set rollout.model "
        "to trainer.student and use the same versions of torch and transformers"
    )


def _ids_sha256(groups: Sequence[TokenGroup]) -> str:
    sequences = [ids.tolist() for one in groups for ids in (one.prompt_ids, *one.responses)]
    return hashlib.sha256(json.dumps(sequences).encode()).hexdigest()
