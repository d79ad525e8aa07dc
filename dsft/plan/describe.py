"""A plan's parts in a person's words."""

from __future__ import annotations

from dsft.plan.record import Batch, Strategy
from dsft.plan.units import GIB, MIB

# At which the memory of a process can be highest.
MOMENTS = {
    "forward": "at the end of a forward pass",
    "loss": "when the loss is computed",
    "backward": "in a backward pass",
    "bucket": "when the first bucket of gradients is summed",
    "reduction": "when the last gradients are summed",
    "update": "in the optimizer's update",
    "load": "when the model is loaded",
    "start": "when the engine starts",
    "checkpoint": "when a checkpoint is written",
    "result": "when the result is written",
}


def strategy_name(strategy: Strategy) -> str:
    """As in "deepspeed ZeRO-3, weights and optimizer in host memory"."""
    name = f"deepspeed ZeRO-{strategy.zero_stage}" if strategy.engine == "deepspeed" else strategy.engine
    if strategy.hybrid_shard:
        name += " hybrid"
    if strategy.reshard_after_forward is False:
        name += ", weights kept gathered"
    weights = strategy.cpu_offload or strategy.offload_param == "cpu"
    optimizer = strategy.cpu_offload or strategy.offload_optimizer == "cpu"
    if weights or optimizer:
        name += f", {' and '.join(['weights'] * bool(weights) + ['optimizer'] * bool(optimizer))} in host memory"
    return name


def batch_line(batch: Batch) -> str:
    """As in "64 rows = 4 per device x 2 accumulation x 8 processes"."""
    return (
        f"{count(batch.global_batch_size, 'row', 'rows')} = {batch.per_device} per device x "
        f"{batch.accumulation} accumulation x {count(batch.world_size, 'process', 'processes')}"
    )


def count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def shown_size(size: float) -> str:
    """Bytes, as in "123 MiB", "12.3 GiB" or "123 GiB"."""
    if size < GIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / GIB:.1f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"
