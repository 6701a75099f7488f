"""FSDP2: a student's weights, gradients and optimiser state spread over the ranks.

The unit of sharding is a decoder layer; everything else (embeddings, head, vision tower) belongs to
the root and is gathered for the whole pass. So a pass makes the same collectives whatever the
batch, as long as every part of the model takes part in it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the language decoder, in order."""
    names = set(model._no_split_modules or ())
    decoder = model.get_decoder()
    found = [module for module in decoder.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(f"{type(model).__name__} does not say which of its modules are layers")
    return found


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only the layers' inputs; what lies between is computed again in the backward pass.

    Done on `forward` itself, inside the hooks that gather a sharded layer's weights, so that they
    are there when it is computed again. transformers' own switch needs training mode, and dropout
    with it.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Shard `root`, whose forward pass uses all of `model`, in place.

    Args:
        root: what is called.
        model: inside it.
        mesh: the ranks, in one dimension.
        compute: passes run in this type; weights, gradients and their sums stay float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
