"""PyTorch's FSDP2 (fully_shard): weights, gradients and optimizer state sharded over all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dsft.plan.record import Plan
from dsft.train.engines.single import backward, update
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.model import decoder_layers
from dsft.train.optimizer import make_optimizer
from dsft.train.world import World

__all__ = ["accumulating", "backward", "gather", "read_moment", "update", "wrap", "write_moments"]


def wrap(plan: Plan, model: nn.Module, world: World, directory: Path) -> Wrapped:
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy()
    if plan.training.precision == "bf16":
        # Gradients are summed in fp32, as DDP does with its fp32 weights.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": plan.strategy.reshard_after_forward}
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to(world.device)  # buffers; the shards are there already
    return Wrapped(model, make_optimizer(model, plan.training), trainable_parameters(model))


def accumulating(wrapped: Wrapped, last: bool) -> contextlib.AbstractContextManager:
    wrapped.model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def gather(wrapped: Wrapped, parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().full_tensor().float()


def read_moment(wrapped: Wrapped, parameter: nn.Parameter, key: str) -> torch.Tensor:
    return wrapped.optimizer.state[parameter][key].full_tensor()


def write_moments(wrapped: Wrapped, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
    def shard(whole: torch.Tensor, like: DTensor) -> DTensor:
        # Every rank has read the whole tensor: each takes its own part, nothing is sent.
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    for name, parameter in wrapped.trainable.items():
        state = {key: shard(moment, parameter) for key, moment in moments[name].items()}
        wrapped.optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **state}
