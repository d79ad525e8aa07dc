"""One process, the model as it is. The reference that every other engine is tested against."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dsft.plan.record import Plan
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.optimizer import make_optimizer
from dsft.train.world import World


def wrap(plan: Plan, model: nn.Module, world: World, directory: Path) -> Wrapped:
    model.to(world.device)
    return Wrapped(autocast(model, plan, world), make_optimizer(model, plan.training), trainable_parameters(model))


def autocast(model: nn.Module, plan: Plan, world: World) -> nn.Module:
    """bf16: the forward pass computes in bf16 on fp32 trained weights, which the optimizer therefore keeps in fp32."""
    if plan.training.precision == "bf16":
        model.forward = torch.autocast(world.device.type, dtype=torch.bfloat16)(model.forward)
    return model


def accumulating(wrapped: Wrapped, last: bool) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def backward(wrapped: Wrapped, loss: torch.Tensor) -> None:
    loss.backward()


def update(wrapped: Wrapped, max_grad_norm: float | None) -> float:
    gradients = [p.grad for p in wrapped.trainable.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):  # under FSDP a rank's own norm is that of its shards only
        norm = whole(norm)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(wrapped.trainable.values(), max_grad_norm, norm)
    wrapped.optimizer.step()
    wrapped.optimizer.zero_grad()
    return float(norm)


def whole(tensor: DTensor) -> torch.Tensor:
    """The tensor of all ranks, on the device (collective). Parts that are offloaded to the host go there first."""
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    part = tensor.to_local().to(mesh.device_type)
    on_device = DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return on_device.full_tensor()


def gather(wrapped: Wrapped, parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().float()


def read_moment(wrapped: Wrapped, parameter: nn.Parameter, key: str) -> torch.Tensor:
    return wrapped.optimizer.state[parameter][key]


def write_moments(wrapped: Wrapped, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
    for name, parameter in wrapped.trainable.items():
        state = {key: moment.to(parameter.device) for key, moment in moments[name].items()}
        wrapped.optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **state}
