"""The ways to do a job: a strategy, gradient checkpointing on or off, and a division of the global batch.

They differ in cost and not in result. Those that a recipe leaves open are what dsft chooses from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from dsft.plan import record
from dsft.plan.batch import divisions
from dsft.recipe.record import Recipe, Unusable


@dataclass(frozen=True)
class Way:
    strategy: record.Strategy
    gradient_checkpointing: bool
    batch: record.Batch


@dataclass(frozen=True)
class Said:
    """What a recipe says of the way; None where it leaves that open."""

    strategy: record.Strategy | None = None
    gradient_checkpointing: bool | None = None
    per_device: int | None = None
    accumulation: int | None = None


def said_way(recipe: Recipe) -> Said:
    checkpointing = recipe.get("model", "gradient_checkpointing")
    return Said(
        _said_strategy(recipe) if recipe.get("strategy", "type") != "auto" else None,
        None if checkpointing == "auto" else checkpointing,
        recipe.get("training", "per_device_train_batch_size"),
        recipe.get("training", "gradient_accumulation_steps"),
    )


def open_ways(said: Said, cluster: record.Cluster, global_batch_size: int) -> Iterator[Way]:
    """All ways that `said` allows, in the order they are preferred where time does not tell: on the device before
    offloaded, activations kept before recomputed, simple strategies first, large passes first. None where the batch
    cannot be divided over the processes."""
    strategies = (said.strategy,) if said.strategy else every_strategy(cluster)
    checkpointing = (False, True) if said.gradient_checkpointing is None else (said.gradient_checkpointing,)
    world = len(cluster.hosts) * cluster.processes_per_node
    if world > 1:
        strategies = [strategy for strategy in strategies if strategy.engine != "single"]
    batches = [
        batch
        for batch in divisions(global_batch_size, world)
        if said.per_device in (None, batch.per_device) and said.accumulation in (None, batch.accumulation)
    ]
    for offloaded in (False, True):
        for recomputed in checkpointing:
            for strategy in strategies:
                if _offloads(strategy) == offloaded:
                    yield from (Way(strategy, recomputed, batch) for batch in batches)


def every_strategy(cluster: record.Cluster) -> tuple[record.Strategy, ...]:
    """What makes sense on the cluster, the simplest first, offloading last."""
    machines, processes = len(cluster.hosts), len(cluster.hosts) * cluster.processes_per_node
    if processes == 1:
        strategies = [_strategy("single")]
    else:
        strategies = [_strategy("ddp"), _zero(1), _zero(2), _fsdp(reshard_after_forward=False)]
        if machines > 1 and cluster.processes_per_node > 1:
            strategies.append(_fsdp(hybrid_shard=True))  # between far machines no weights travel
        strategies += [_fsdp(), _zero(3)]
    if cluster.device == "cuda":
        strategies += [_zero(2, offload_optimizer="cpu"), _fsdp(cpu_offload=True)]
        strategies.append(_zero(3, offload_optimizer="cpu", offload_param="cpu"))
    return tuple(strategies)


def _offloads(strategy: record.Strategy) -> bool:
    return bool(strategy.cpu_offload) or "cpu" in (strategy.offload_optimizer, strategy.offload_param)


def _said_strategy(recipe: Recipe) -> record.Strategy:
    if not recipe.sound("strategy"):
        raise Unusable
    fields = [field.name for field in dataclasses.fields(record.Strategy) if field.name not in ("engine", "config")]
    said = {field: recipe.get("strategy", field) for field in fields}
    return _strategy(recipe.get("strategy", "type"), **said, config=recipe.get("strategy", "config") or {})


def _strategy(engine: str, **said) -> record.Strategy:
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(record.Strategy))
    return record.Strategy(**{**nothing, "config": {}, **said, "engine": engine})


def _zero(stage: int, **said: str) -> record.Strategy:
    return _strategy(
        "deepspeed", **({"zero_stage": stage, "offload_optimizer": "none", "offload_param": "none"} | said)
    )


def _fsdp(**said: bool) -> record.Strategy:
    return _strategy("fsdp", **({"reshard_after_forward": True, "cpu_offload": False, "hybrid_shard": False} | said))
