"""One process, the model as it is. The reference that every other engine is tested against."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

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
    return step(wrapped, torch.nn.utils.get_total_norm(gradients(wrapped)), max_grad_norm)


def gradients(wrapped: Wrapped) -> list[torch.Tensor]:
    return [p.grad for p in wrapped.trainable.values() if p.grad is not None]


def step(wrapped: Wrapped, norm: torch.Tensor, max_grad_norm: float | None) -> float:
    """Clips by the global `norm` of the gradients, steps, clears; returns the norm."""
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(wrapped.trainable.values(), max_grad_norm, norm)
    wrapped.optimizer.step()
    wrapped.optimizer.zero_grad()
    return float(norm)


def gather(wrapped: Wrapped, parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().float()


def read_moment(wrapped: Wrapped, parameter: nn.Parameter, key: str) -> torch.Tensor:
    return wrapped.optimizer.state[parameter][key]


def write_moments(wrapped: Wrapped, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
    for name, parameter in wrapped.trainable.items():
        state = {key: moment.to(parameter.device) for key, moment in moments[name].items()}
        wrapped.optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **state}
