"""Memory of a training process that is no device's: its libraries, and on a CPU the moments besides an update.

On a CPU there is no caching allocator and no context. dsft.train has the C library give freed tensors back
(dsft.train.world, `return_freed_memory`), so what is resident is what is alive, and the libraries. Resident is meant as
VmHWM of /proc/PID/status has it: a page that two processes share counts for both. benchmarks/memory_here.py compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsft.plan.facts import ModelFacts
from dsft.plan.units import FP32, MIB
from dsft.plan.workload import Workload

# A rank that trains next to nothing (`python benchmarks/memory_here.py tiny`): interpreter, torch, transformers, peft,
# tokenizer, and what an update loads of them. With torch 2.13 for the CPU, on Linux.
LIBRARIES = 480 * MIB
DEEPSPEED = 75 * MIB  # more, where DeepSpeed is set up
# DDP sends the weights of rank 0 to all in parts of this size, flat, beside the weights and on arrival (torch/nn/parallel/
# distributed.py, `broadcast_bucket_size`).
BROADCAST = 250 * MIB


def libraries(work: Workload) -> int:
    return LIBRARIES + (DEEPSPEED if work.engine == "deepspeed" else 0)


def loaded(facts: ModelFacts, work: Workload) -> int:
    """The model as it is loaded, whole and before an engine has it: fp32 where it is trained."""
    base = facts.parameters * (FP32 if work.full else work.frozen_bytes)
    return base if work.full else base + work.trained * FP32


def checkpoint_bytes(work: Workload) -> int:
    """A checkpoint: trained weights and the optimizer's moments, fp32."""
    return work.trained * FP32 * (3 if work.optimizer == "adamw" else 1)


def collected(work: Workload, whole: int) -> int:
    """Of `whole` bytes that are written, what the main rank makes for it: weights and moments that lie whole in its memory
    are written from there, sharded ones are collected first."""
    return whole if work.engine in ("fsdp", "deepspeed") else 0


def cpu_moments(facts: ModelFacts, work: Workload, lasting: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The parts at the moments before and after updates. `lasting`: the parts that are there from the first to the last.

    Loading: weights that are stored in another dtype are copies, beside pages of the file; else they are those pages.
    Starting: the engine has made its own of the weights, and the loaded ones are not yet gone.
    The result, if it is a whole model, is read back as a second model.
    """
    whole = loaded(facts, work)
    before = {
        name: size for name, size in lasting.items() if name != "optimizer"
    }  # its state comes with the first update
    checkpoint = checkpoint_bytes(work) if work.checkpoints else 0
    result = work.trained * FP32
    return {
        "load": {"weights": whole, "file": _mapped(facts, work)},
        "start": {**before, "loaded": _handed_over(work, whole)},
        "checkpoint": {**lasting, "collected": collected(work, checkpoint)},
        "result": {**lasting, "collected": collected(work, result), "read back": result if work.full else 0},
    }


def _mapped(facts: ModelFacts, work: Workload) -> int:
    wanted = "float32" if work.full or work.frozen_bytes == FP32 else "bfloat16"
    return 0 if facts.dtype == wanted else facts.stored_bytes or 0


def _handed_over(work: Workload, whole: int) -> float:
    """What is there beside the engine's own weights when it starts."""
    if work.engine == "ddp":
        return 2 * min(BROADCAST, whole)
    return whole if work.engine in ("fsdp", "deepspeed") else 0
