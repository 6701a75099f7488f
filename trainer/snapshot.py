"""A student's tensors to and from the disk by torch's distributed checkpoint, beside training.

Each rank writes its shards; reading puts them together on any number of ranks. The caller makes the
folder appear whole (preceptor/manifest.py) and verifies it before it is read: torch keeps its index
in a pickle.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainer.world import World

RANDOM_STATE = "random_state"

# A lone process is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read some of a folder's tensors into those given, in place, by this process alone."""
    dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)


class Snapshot:
    """One write at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._writing: Future | None = None

    def start(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors to CPU memory and begin to write them; they may change right after.

        Collective. Waits for the write before.
        """
        self.wait()
        response = dcp.async_save(
            {**tensors, RANDOM_STATE: torch.get_rng_state()},
            checkpoint_id=str(folder),
            process_group=self._world.saving,
            no_dist=self._world.alone,
        )
        self._writing = response if isinstance(response, Future) else response.upload_completion

    def wait(self) -> None:
        """Until the write is done; at once where there is none.

        Raises:
            Exception: what kept this or another rank from writing.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Read into the tensors, in place. Collective."""
        random_state = torch.get_rng_state()
        dcp.load(
            {**tensors, RANDOM_STATE: random_state},
            checkpoint_id=str(folder),
            process_group=self._world.saving,
            no_dist=self._world.alone,
        )
        torch.set_rng_state(random_state)
