"""DeepSpeed ZeRO 1, 2 and 3. The one place that reaches into DeepSpeed's internals; tests tell when they change."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from dsft.plan.record import Plan
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.optimizer import make_optimizer
from dsft.train.world import World


def wrap(plan: Plan, model: nn.Module, world: World, directory: Path) -> Wrapped:
    """Wraps `model` by deepspeed.json in `directory`."""
    deepspeed = _import_deepspeed()
    trainable = trainable_parameters(model)
    # Under bf16 DeepSpeed casts the weights first, into tensors of their own, and makes its fp32 master copies from the
    # result: the exact values are kept here and put back into the masters.
    exact = {name: p.data for name, p in trainable.items()} if plan.training.precision == "bf16" else {}
    # Before ZeRO-3 flattens the parameters: matrices and vectors are told apart by their shape.
    optimizer = make_optimizer(model, plan.training)
    config = str(directory / "deepspeed.json")
    if plan.strategy.zero_stage == 3:
        _partition(deepspeed, plan, model, world, config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for name, weight in exact.items():
        _set(trainable[name], weight.to(world.device))
    return Wrapped(engine, engine.optimizer, trainable)


def _partition(deepspeed: ModuleType, plan: Plan, model: nn.Module, world: World, config: str) -> None:
    """Weights to the device and into their parts, one by one: `initialize` would put the whole model there first."""
    if plan.training.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(world.device)
    deepspeed.init_distributed()  # takes over torch's process group; reading the configuration needs the world size
    deepspeed.zero.Init(module=model, config_dict_or_path=config)


def _import_deepspeed() -> ModuleType:
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # On a CPU DeepSpeed compiles this operator for minutes, on every machine, without a word. It serves tensor
    # parallel inference only: said to be incompatible, it is left alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def accumulating(wrapped: Wrapped, last: bool) -> contextlib.AbstractContextManager:
    wrapped.model.set_gradient_accumulation_boundary(last)
    return contextlib.nullcontext()


def backward(wrapped: Wrapped, loss: torch.Tensor) -> None:
    wrapped.model.backward(loss)


def update(wrapped: Wrapped, max_grad_norm: float | None) -> float:
    wrapped.model.step()  # clips by gradient_clipping of deepspeed.json, which the compiler took from max_grad_norm
    return float(wrapped.model.get_global_grad_norm())


def gather(wrapped: Wrapped, parameter: nn.Parameter) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter).view(_shape(parameter))


def read_moment(wrapped: Wrapped, parameter: nn.Parameter, key: str) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_optimizer_state

    mapping = getattr(parameter, "_hp_mapping", None)  # ZeRO-1 and 2: this rank's part of the parameter, if it has one
    if mapping is not None and key not in mapping.get_optim_state_keys():
        _map_states(wrapped.optimizer)
    return safe_get_full_optimizer_state(parameter, key).view(_shape(parameter))


def write_moments(wrapped: Wrapped, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
    keys = next(iter(moments.values())).keys()
    zero, inner = wrapped.optimizer, wrapped.optimizer.optimizer  # DeepSpeed's around torch's
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    flats = (
        zero.fp32_partitioned_groups_flat if stage3 else [p for group in inner.param_groups for p in group["params"]]
    )
    for flat in flats:
        inner.state[flat] = {"step": torch.tensor(float(updates)), **{key: torch.zeros_like(flat) for key in keys}}
    if not stage3:
        _map_states(zero)
    for name, parameter in wrapped.trainable.items():
        for key, moment in moments[name].items():
            _set(parameter, moment.to(parameter.device), key)


def _set(parameter: nn.Parameter, whole: torch.Tensor, key: str | None = None) -> None:
    """Puts a whole fp32 weight, or the optimizer state `key` of it, into this rank's part of the masters."""
    if not hasattr(parameter, "ds_id"):  # ZeRO-1 and 2
        parameter.set_full_hp_param(whole, key)
        return
    # ZeRO-3 pads parameters to equal parts, which its own set_full_hp_param forgets: the last rank would read past the end.
    size = parameter.partition_numel()
    padded = torch.nn.functional.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
    part = padded.narrow(0, size * dist.get_rank(), size)
    parameter._z3_optimizer.set_local_hp_param(part, parameter, key)


def _map_states(zero) -> None:
    """ZeRO-1 and 2 map parameters to their optimizer state after the first step, of the first parameter group only."""
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor in the parameter's place
