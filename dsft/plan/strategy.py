"""The strategy, as far as its fields contradict each other or the machines."""

from __future__ import annotations

from collections.abc import Callable

from dsft.errors import Problem, refused
from dsft.plan.record import Host
from dsft.recipe.record import Recipe


def check_offload(recipe: Recipe) -> None:
    """Raises DsftError for an offload that DeepSpeed would leave undone without a word."""
    stage, offload_param = recipe.get("strategy", "zero_stage"), recipe.get("strategy", "offload_param")
    if offload_param == "cpu" and stage != 3:
        raise refused(
            "offload-stage",
            f'"offload_param" needs zero_stage 3, which shards the weights; it is {stage}',
            where=recipe.where("strategy", "offload_param"),
            help='write "zero_stage": 3, or "offload_optimizer": "cpu" in place of "offload_param"',
        )


def check_hybrid(recipe: Recipe, hosts: tuple[Host, ...], warn: Callable[[Problem], None]) -> None:
    """Warns where there is nothing to replicate. Raises DsftError where nothing would be sharded, or not evenly."""
    _check_partition(recipe, hosts)
    if not recipe.get("strategy", "hybrid_shard"):
        return
    where = recipe.where_key("strategy", "hybrid_shard")
    if hosts[0].slots == 1:
        raise refused(
            "incompatible",
            '"hybrid_shard" shards over the processes of a machine, and each machine has one',
            where=where,
            help='remove it to shard over the machines; for a whole copy in each process write "type": "ddp"',
        )
    if len(hosts) == 1:
        message = '"strategy.hybrid_shard" has no effect: there is one machine'
        warn(Problem("no-effect", message, where, 'remove "hybrid_shard"', severity="warning"))


def _check_partition(recipe: Recipe, hosts: tuple[Host, ...]) -> None:
    """DeepSpeed's hybrid: groups of processes that hold all weights, and it needs whole groups."""
    path = ("strategy", "config", "zero_optimization", "zero_hpz_partition_size")
    size, processes = recipe.get(*path), len(hosts) * hosts[0].slots
    if size and recipe.get("strategy", "zero_stage") == 3 and processes % min(size, processes):
        raise refused(
            "incompatible",
            f"{processes} processes cannot be divided into groups of {size}",
            where=recipe.where(*path),
            help=f"write {hosts[0].slots}, the processes of a machine",
        )
