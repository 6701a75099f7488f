"""The processes that train one student together: ranks of torch.distributed, or one alone.

Rank 0 owns the run. A rank joins every collective, whatever its share of a batch, or all would wait
for ever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# CPU tensors go through gloo whatever the device: counts, bytes and asynchronous checkpoints.
BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
# Where ranks that trainer/ranks.py started find each other; torchrun's use its own variables.
STORE_VARIABLE = "TRAINER_RANKS_STORE"
# Ranks wait for rank 0's next order while it waits for rollouts. A dead rank 0 is noticed sooner:
# its connections close.
ORDER_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """Who takes part.

    Attributes:
        rank, size: of this process and how many there are.
        mesh: all ranks in one dimension; None where no process group is needed.
        orders: group for rank 0's orders, with their patience; None when alone.
        saving: group for checkpoints, which run beside the training's collectives.
    """

    rank: int
    size: int
    mesh: DeviceMesh | None = None
    orders: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None

    @property
    def alone(self) -> bool:
        """Whether there is one process only."""
        return self.size == 1

    def gather(self, values_K: Tensor) -> Tensor:
        """Every rank's float64 [K] as [ranks, K]; K is the same everywhere."""
        if self.alone:
            return values_K[None]
        rows_RK = values_K.new_empty(self.size * len(values_K))
        dist.all_gather_single(rows_RK, values_K.contiguous())
        return rows_RK.view(self.size, -1)

    def sum(self, values_K: Tensor) -> Tensor:
        """Element-wise sum over the ranks."""
        return self.gather(values_K).sum(0)

    def max(self, values_K: Tensor) -> Tensor:
        """Element-wise largest over the ranks."""
        return self.gather(values_K).amax(0)

    def send_all(self, messages: Sequence[bytes]) -> None:
        """Rank 0: one message to each rank; messages[0] is its own and stays."""
        lengths_R = torch.tensor([len(one) for one in messages], dtype=torch.int64)
        dist.broadcast(lengths_R, 0, group=self.orders)
        for rank in range(1, self.size):
            data = torch.frombuffer(bytearray(messages[rank]) or bytearray(1), dtype=torch.uint8)
            dist.send(data, rank, group=self.orders)

    def receive(self) -> bytes:
        """Other ranks: the message of rank 0's next send_all."""
        lengths_R = torch.zeros(self.size, dtype=torch.int64)
        dist.broadcast(lengths_R, 0, group=self.orders)
        length = int(lengths_R[self.rank])
        data = torch.empty(max(length, 1), dtype=torch.uint8)
        dist.recv(data, 0, group=self.orders)
        return data[:length].numpy().tobytes()


def join(device: str, sharded: bool) -> World:
    """Take part in what torchrun or trainer/ranks.py started; a world of one without them.

    Args:
        device: of the weights, such as cpu or cuda.
        sharded: a lone process needs a process group too, for its weights are sharded all the same.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and not sharded:
        return World(0, 1)
    kind = torch.device(device).type
    store: dist.Store
    if size == 1:
        dist.init_process_group(BACKENDS[kind], store=dist.HashStore(), rank=0, world_size=1)
    elif STORE_VARIABLE in os.environ:
        store = dist.FileStore(os.environ[STORE_VARIABLE], size)
        rank = int(os.environ["RANK"])
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=size)
    else:
        store, rank, size = next(dist.rendezvous("env://"))
        # Restarted ranks get the store of those before, with the addresses of the dead in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=size)
    mesh = init_device_mesh(kind, (size,))
    if size == 1:
        return World(0, 1, mesh)
    orders = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
    saving = dist.new_group(backend="gloo")
    return World(dist.get_rank(), size, mesh, orders, saving)


def own_device(device: str) -> str:
    """This rank's device: of several GPUs on a machine, each rank has the one of its number."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


def leave() -> None:
    """Close the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
