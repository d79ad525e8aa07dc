"""PyTorch's DistributedDataParallel: the whole model in each process, gradients averaged."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dsft.plan.record import Plan
from dsft.train.engines.single import autocast, backward, gather, read_moment, update, write_moments
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.optimizer import make_optimizer
from dsft.train.world import World

__all__ = ["accumulating", "backward", "gather", "read_moment", "update", "wrap", "write_moments"]


def wrap(plan: Plan, model: nn.Module, world: World, directory: Path) -> Wrapped:
    model.to(world.device)
    autocast(model, plan, world)
    optimizer, trainable = make_optimizer(model, plan.training), trainable_parameters(model)
    devices = [world.device] if world.device.type == "cuda" else None
    replica = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True)
    return Wrapped(replica, optimizer, trainable)


def accumulating(wrapped: Wrapped, last: bool) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if last else wrapped.model.no_sync()
