"""PyTorch's FSDP2 (fully_shard): weights, gradients and optimizer state sharded, over all processes or inside machines."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dsft.plan.record import Plan
from dsft.train.engines.single import backward, gradients, step
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.model import decoder_layers
from dsft.train.optimizer import make_optimizer
from dsft.train.world import World

__all__ = ["accumulating", "backward", "gather", "read_moment", "update", "wrap", "write_moments"]


def wrap(plan: Plan, model: nn.Module, world: World, directory: Path) -> Wrapped:
    policy = MixedPrecisionPolicy()
    if plan.training.precision == "bf16":
        # Gradients are summed in fp32, as DDP does with its fp32 weights.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": _mesh(plan, world),
        "mp_policy": policy,
        "offload_policy": _offload(plan, world),
        "reshard_after_forward": plan.strategy.reshard_after_forward,
    }
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)  # what is left; buffers are on the device by now
    return Wrapped(model, make_optimizer(model, plan.training), trainable_parameters(model))


def _mesh(plan: Plan, world: World) -> DeviceMesh:
    """One dimension: sharded over all ranks. Two, of a hybrid: replicated over machines, sharded over their ranks."""
    if not plan.strategy.hybrid_shard:
        return init_device_mesh(world.device.type, (world.size,))
    per_node = plan.cluster.processes_per_node  # every launcher gives a machine consecutive ranks
    return init_device_mesh(
        world.device.type, (world.size // per_node, per_node), mesh_dim_names=("replicate", "shard")
    )


def _offload(plan: Plan, world: World) -> OffloadPolicy:
    # Page-locked memory makes copies to a GPU fast; without one there is nobody to lock it.
    return CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if plan.strategy.cpu_offload else OffloadPolicy()


def accumulating(wrapped: Wrapped, last: bool) -> contextlib.AbstractContextManager:
    # Every pass is reduced over the ranks that shard: kept whole, gradients would undo what sharding saves. Over the
    # machines of a hybrid only the sum of all passes travels.
    wrapped.model.set_requires_all_reduce(last)
    return contextlib.nullcontext()


def update(wrapped: Wrapped, max_grad_norm: float | None) -> float:
    """A rank's own norm is that of its shards. torch would reduce them where they are, and NCCL knows no host memory."""
    sharded = gradients(wrapped)
    mesh = sharded[0].device_mesh
    squared = torch.nn.utils.get_total_norm([gradient.to_local() for gradient in sharded]).square()
    squared = squared.to(mesh.device_type)
    dist.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))  # of a hybrid each machine has all shards
    return step(wrapped, squared.sqrt(), max_grad_norm)


def gather(wrapped: Wrapped, parameter: nn.Parameter) -> torch.Tensor:
    return _whole(parameter.detach()).float()


def read_moment(wrapped: Wrapped, parameter: nn.Parameter, key: str) -> torch.Tensor:
    return _whole(wrapped.optimizer.state[parameter][key])


def _whole(tensor: DTensor) -> torch.Tensor:
    """The tensor of all ranks, on the device (collective). Parts that are offloaded to the host go there first."""
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    part = tensor.to_local().to(mesh.device_type)
    on_device = DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return on_device.full_tensor()


def write_moments(wrapped: Wrapped, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
    def shard(moment: torch.Tensor, like: DTensor) -> DTensor:
        # Every rank has read the whole tensor: each takes its own part, nothing is sent.
        return distribute_tensor(moment, like.device_mesh, like.placements, src_data_rank=None).to(like.device)

    for name, parameter in wrapped.trainable.items():
        state = {key: shard(moment, parameter) for key, moment in moments[name].items()}
        wrapped.optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **state}
