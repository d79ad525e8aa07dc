"""The strategy, as far as its fields contradict each other or the machines."""

from __future__ import annotations

from collections.abc import Iterator

from dsft.errors import Problem
from dsft.plan.record import Host
from dsft.recipe.record import Recipe


def offload_is_done(recipe: Recipe) -> Iterator[Problem]:
    """DeepSpeed would leave it undone without a word."""
    stage, offload_param = recipe.get("strategy", "zero_stage"), recipe.get("strategy", "offload_param")
    if offload_param == "cpu" and stage != 3:
        yield Problem(
            "offload-stage",
            f'"offload_param" needs zero_stage 3, which shards the weights; it is {stage}',
            recipe.where("strategy", "offload_param"),
            'write "zero_stage": 3, or "offload_optimizer": "cpu" in place of "offload_param"',
        )


def shards_are_groups(recipe: Recipe, hosts: tuple[Host, ...]) -> Iterator[Problem]:
    """FSDP's hybrid: a machine is a group. Warns where there is nothing to replicate."""
    if not recipe.get("strategy", "hybrid_shard"):
        return
    where = recipe.where_key("strategy", "hybrid_shard")
    if hosts[0].slots == 1:
        yield Problem(
            "incompatible",
            '"hybrid_shard" shards over the processes of a machine, and each machine has one',
            where,
            'remove it to shard over the machines; for a whole copy in each process write "type": "ddp"',
        )
    elif len(hosts) == 1:
        message = '"strategy.hybrid_shard" has no effect: there is one machine'
        yield Problem("no-effect", message, where, 'remove "hybrid_shard"', severity="warning")


def partitions_are_groups(recipe: Recipe, hosts: tuple[Host, ...]) -> Iterator[Problem]:
    """DeepSpeed's hybrid: groups of processes that hold all weights, and it needs whole groups."""
    path = ("strategy", "config", "zero_optimization", "zero_hpz_partition_size")
    size, processes = recipe.get(*path), len(hosts) * hosts[0].slots
    if size and recipe.get("strategy", "zero_stage") == 3 and processes % min(size, processes):
        yield Problem(
            "incompatible",
            f"{processes} processes cannot be divided into groups of {size}",
            recipe.where(*path),
            f"write {hosts[0].slots}, the processes of a machine",
        )
