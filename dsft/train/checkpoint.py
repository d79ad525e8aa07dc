"""Checkpoints: the state of a run after an update, by parameter name, whole and independent of the engine.

    checkpoints/update-00000100/
      parameters.safetensors     the trained weights, fp32
      moments.safetensors        "<parameter>.<moment>", fp32
      rng-<rank>.safetensors     torch's random state of each rank
      state.json                 the update, world size

Data position and schedule are functions of the update. A checkpoint is written under a temporary name and renamed when
it is whole, so one that carries the final name is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dsft.errors import Where, failed
from dsft.plan.record import Plan
from dsft.train import folders
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.optimizer import MOMENTS
from dsft.train.world import World, on_main

PREFIX = "update-"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its folder, and the update it was written after."""

    path: Path
    update: int


def newest(output_dir: Path) -> Saved | None:
    """The newest complete checkpoint of a run, or None."""
    return next(reversed(_complete(output_dir / "checkpoints")), None)


def _complete(folder: Path) -> list[Saved]:
    """The checkpoints in `folder`, oldest first. Folders of other names are the user's own."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    saved = [Saved(path, int(path.name.removeprefix(PREFIX))) for path in found if (path / "state.json").is_file()]
    return sorted(saved, key=lambda checkpoint: checkpoint.update)


def save(plan: Plan, engine: ModuleType, wrapped: Wrapped, world: World, update: int) -> Path:
    """Writes the checkpoint of `update` (collective) and removes what `keep` no longer covers."""
    final = Path(plan.checkpoint.output_dir) / "checkpoints" / f"{PREFIX}{update:08d}"
    temporary = on_main(world, folders.begin, final)
    parameters = collect(wrapped, world, engine.gather)
    moments = {}
    for key in MOMENTS[plan.training.optim]:
        gathered = collect(wrapped, world, partial(engine.read_moment, key=key))
        moments |= {f"{name}.{key}": moment for name, moment in gathered.items()}
    save_file(_random_state(world), temporary / f"rng-{world.rank:05d}.safetensors")
    on_main(world, _write_whole, temporary, parameters, moments, {"update": update, "world_size": world.size})
    on_main(world, _publish, temporary, final, plan.checkpoint.keep)  # by now every rank's random state is there
    return final


def _write_whole(folder: Path, parameters: dict, moments: dict, state: dict) -> None:
    save_file(parameters, folder / "parameters.safetensors")
    save_file(moments, folder / "moments.safetensors")
    (folder / "state.json").write_text(json.dumps(state) + "\n")


def _publish(temporary: Path, final: Path, keep: int) -> None:
    folders.finish(temporary, final)
    for old in _complete(final.parent)[:-keep]:
        shutil.rmtree(old.path)


def collect(wrapped: Wrapped, world: World, whole: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """`whole(wrapped, parameter)` of each trained parameter by name, on the main rank's CPU; other ranks take part, keep nothing.

    One parameter at a time: no more than one is ever whole on the device. What lies whole on the CPU already is not
    copied, so the tensors hold until the next update.
    """
    collected = {}
    for name, parameter in wrapped.trainable.items():
        tensor = whole(wrapped, parameter)
        if world.is_main:
            collected[name] = tensor.to("cpu").contiguous()
    return collected


def load_parameters(saved: Saved, model: nn.Module) -> None:
    """Puts a checkpoint's weights into the plain model, before an engine wraps it."""
    trainable = trainable_parameters(model)
    stored = _load(saved.path / "parameters.safetensors")
    if stored.keys() != trainable.keys():
        raise failed("checkpoint-mismatch", f"{saved.path} holds other parameters than the plan trains")
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(stored[name])


def load_optimizer(saved: Saved, plan: Plan, engine: ModuleType, wrapped: Wrapped) -> None:
    """Puts a checkpoint's moments into the wrapped optimizer."""
    keys = MOMENTS[plan.training.optim]
    if keys:
        stored = _load(saved.path / "moments.safetensors")
        moments = {name: {key: stored[f"{name}.{key}"] for key in keys} for name in wrapped.trainable}
        engine.write_moments(wrapped, moments, saved.update)


def load_random_state(saved: Saved, world: World) -> bool:
    """Restores this rank's random state; False where the checkpoint has none for it (a larger world)."""
    path = saved.path / f"rng-{world.rank:05d}.safetensors"
    if not path.is_file():
        return False
    state = _load(path)
    torch.set_rng_state(state["cpu"])
    if world.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
    return True


def _random_state(world: World) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise failed(
            "checkpoint-damaged",
            f"cannot read {path}: {error}",
            where=Where(str(path)),
            help="remove this checkpoint's folder to go on from the one before it",
        ) from error
