"""Engines: each module wraps the model and the optimizer, and answers the same few questions.

    wrap(plan, model, world, directory) -> Wrapped      shard or replicate; then `Wrapped.model` is called to train
    accumulating(wrapped, last) -> context              around forward and backward of one pass of an update
    backward(wrapped, loss)                             gradients of `loss`, averaged over ranks at the last pass
    update(wrapped, max_grad_norm) -> float             clip, step, clear; the global gradient norm before clipping
    gather(wrapped, parameter) -> Tensor                the whole fp32 weight on every rank (collective)
    read_moment(wrapped, parameter, key) -> Tensor      the whole optimizer moment on every rank (collective)
    write_moments(wrapped, moments, updates)            puts whole moments back in place

To add one: a module here, a line below, and its twin in dsft/compile/engines.
"""

from __future__ import annotations

import importlib
from types import ModuleType

ENGINES = {
    "single": "dsft.train.engines.single",
    "ddp": "dsft.train.engines.ddp",
    "fsdp": "dsft.train.engines.fsdp",
    "deepspeed": "dsft.train.engines.deepspeed",
}


def engine(name: str) -> ModuleType:
    """The module of that engine, imported when asked for: deepspeed takes seconds."""
    return importlib.import_module(ENGINES[name])
