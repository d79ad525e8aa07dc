"""What a job has needed of memory, to be held against what was planned."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

from dsft.plan.record import Estimate
from dsft.train.world import World


def peak_memory(world: World) -> int:
    """Bytes that the largest process has held at once: on a GPU what PyTorch took of it, else resident memory."""
    if world.device.type == "cuda":
        own = torch.cuda.max_memory_reserved(world.device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    largest = torch.tensor(own, device=world.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def planned(estimate: Estimate) -> int:
    """The same by the plan: without CUDA's context and NCCL's buffers, which are not PyTorch's."""
    return estimate.device_bytes - estimate.memory.get("context", 0)
