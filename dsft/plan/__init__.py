"""A Recipe and what is known of model, data and machines into a Plan.

Each module plans one part and looks at one kind of thing: model, data, cluster, batch, training. What the recipe leaves
open is chosen by what the job is expected to need (choose.py, memory.py, cost.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import DsftError, Problem, refused
from dsft.plan import record
from dsft.plan.attempt import Attempt
from dsft.plan.batch import plan_batches
from dsft.plan.begun import is_begun
from dsft.plan.choose import Choice, Comparison, choose
from dsft.plan.cluster import check_precision, plan_cluster, plan_hosts
from dsft.plan.data import plan_data
from dsft.plan.deepspeed_keys import deepspeed_takes_all_keys
from dsft.plan.disk import disk_has_room
from dsft.plan.gpus import GPUS
from dsft.plan.machine import machine_memory
from dsft.plan.model import (
    Found,
    check_context,
    meant_folder,
    model_is_here,
    model_is_whole,
    model_suits,
    plan_model,
)
from dsft.plan.outlook import outlooks
from dsft.plan.record import Plan
from dsft.plan.strategy import offload_is_done, partitions_are_groups, shards_are_groups
from dsft.plan.training import doubts, plan_training
from dsft.plan.units import GIB
from dsft.plan.versions import installed_versions
from dsft.plan.ways import Said, open_ways, said_way
from dsft.plan.workload import Job
from dsft.recipe.record import Recipe, Unusable

__all__ = ["Comparison", "Plan", "compare", "installed_versions", "make_plan"]


def make_plan(
    recipe: Recipe,
    *,
    versions: Mapping[str, str],
    cwd: str | Path,
    memory: int | None = None,
    warn: Callable[[Problem], None] = lambda problem: None,
) -> Plan:
    """Every decision of the job. `versions` is `installed_versions()`; results go below `cwd` unless the recipe says. On
    CPUs a job may use `memory` bytes of each machine, by default what this one has. What is doubtful, but no mistake, is
    told to `warn`.

    Raises DsftError with all that is wrong: what the schema and the rules found, and what is wrong with the files.
    """
    attempt = Attempt(recipe.problems)
    basis = attempt(_basis, recipe, attempt)
    checkpoint = attempt(_plan_checkpoint, recipe, Path(cwd))
    memory = machine_memory() if memory is None else memory
    choice = attempt(_choose, recipe, basis, memory, attempt)
    attempt.check(disk_has_room, recipe, checkpoint, choice)
    if attempt.failed:
        raise DsftError(recipe.in_order(attempt.problems))

    plan = Plan(
        name=recipe.get("name"),
        recipe_sha256=hashlib.sha256(recipe.to_json(checkpoint.output_dir).encode()).hexdigest(),
        versions=dict(versions),
        model=dataclasses.replace(basis.found.model, gradient_checkpointing=choice.way.gradient_checkpointing),
        data=basis.data,
        method=basis.method,
        strategy=choice.way.strategy,
        batch=choice.way.batch,
        training=basis.training,
        checkpoint=checkpoint,
        logging=record.Logging(recipe.get("logging", "logging_steps"), recipe.get("logging", "tensorboard")),
        cluster=basis.cluster,
        launcher=recipe.get("launcher", "type"),
        estimate=_estimate(choice, _job(recipe, basis, memory)),
    )
    attempt.check(model_is_here, recipe, plan.model)
    attempt.check(_output_is_free, recipe, plan)
    for problem in recipe.in_order(attempt.problems):
        warn(problem)
    return plan


def _output_is_free(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """Warns of what keeps the plan from running here, while its output folder is as it is now."""
    where = recipe.where("checkpoint", "output_dir")
    folder = next(folder for folder in _and_parents(plan.checkpoint.output_dir) if os.path.exists(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        message = f"{folder} cannot be written to here, and results go into it"
        yield Problem("cannot-write", message, where, "choose another output_dir", severity="warning")
    try:
        is_begun(plan)
    except DsftError as error:
        yield from (dataclasses.replace(problem, where=where, severity="warning") for problem in error.problems)


def compare(recipe: Recipe, *, machines: int | None = None) -> tuple[Comparison, tuple[Problem, ...]]:
    """Every way to do the job of the recipe, on its own cluster or on `machines` machines of that kind; and what is to
    be said about the way that the recipe gets: an error where it does not fit.

    Raises DsftError for a recipe with other mistakes, and where model or GPU are not known.
    """
    memory = machine_memory()
    attempt = Attempt(recipe.problems)
    basis = attempt(_basis, recipe, attempt, machines or 0)
    if attempt.failed:
        raise DsftError(recipe.in_order(attempt.problems))
    job = _job(recipe, basis, memory)
    if job is None:
        raise _unknown(recipe, basis)
    choice = attempt(_choose, recipe, basis, memory, attempt)
    return Comparison(job, tuple(outlooks(job, Said())), choice), recipe.in_order(attempt.problems)


@dataclass(frozen=True)
class _Basis:
    """All that is decided before the way to do the job."""

    found: Found
    data: record.Data
    method: record.Method
    cluster: record.Cluster
    batches: tuple[record.Batch, ...]
    training: record.Training


def _basis(recipe: Recipe, attempt: Attempt, machines: int = 0) -> _Basis:
    """Problems go to `attempt`; raises Unusable where a part cannot be planned for one."""
    found = attempt(plan_model, recipe)
    data = attempt(plan_data, recipe)
    hosts = attempt(plan_hosts, recipe)
    if hosts and machines:
        hosts = hosts[:1] * machines
    cluster = attempt(plan_cluster, recipe, hosts)
    attempt(check_precision, recipe)
    short = attempt(check_context, recipe, found)
    attempt.check(model_suits, recipe, found)
    attempt.check(model_is_whole, recipe, found)
    attempt.check(offload_is_done, recipe)
    attempt.check(shards_are_groups, recipe, hosts)
    attempt.check(partitions_are_groups, recipe, hosts)
    attempt.check(deepspeed_takes_all_keys, recipe)
    batches = attempt(plan_batches, recipe, hosts)
    training = attempt(plan_training, recipe, batches, data)
    method = attempt(_method, recipe)
    parts = (found, data, method, cluster, batches, training)
    if None in (*parts, short):  # what fits is no question for rows that the model cannot take
        raise Unusable
    attempt.check(doubts, recipe, batches[0], data, training)
    return _Basis(*parts)


def _job(recipe: Recipe, basis: _Basis, memory: int) -> Job | None:
    """What the planner works on; None where the model's files are not here or the recipe does not say the GPU."""
    cluster, said = basis.cluster, recipe.get("cluster", "memory_gib")
    host_memory = None if said is None else int(said * GIB)
    if cluster.device == "cpu":
        capacity = (host_memory or memory) // cluster.processes_per_node
    else:
        capacity = GPUS[cluster.gpu].memory if cluster.gpu else None
    facts = basis.found.facts
    if capacity is None or facts is None or not facts.sized:
        return None
    return Job(
        facts,
        basis.found.model,
        basis.data,
        basis.method,
        basis.training,
        cluster,
        basis.batches[0].global_batch_size,
        capacity,
        host_memory,
        _checkpoints(recipe, basis.training.total_updates),
    )


def _checkpoints(recipe: Recipe, updates: int) -> int:
    """How many are on disk at the same time: a new one is whole before the oldest goes."""
    every = recipe.get("checkpoint", "save_steps")
    written = math.ceil(updates / every) if every else 0  # the last update too is saved
    return min(written, recipe.get("checkpoint", "keep") + 1)


def _choose(recipe: Recipe, basis: _Basis, memory: int, attempt: Attempt) -> Choice:
    """Raises DsftError where nothing fits, or where what is needed to choose is not known."""
    said, job = said_way(recipe), _job(recipe, basis, memory)
    if job is None:
        if said.strategy is None or len(basis.batches) > 1:
            raise _unknown(recipe, basis)
        # Recomputing nothing, where the recipe leaves that open.
        return Choice(next(open_ways(said, basis.cluster, basis.batches[0].global_batch_size)))
    return choose(job, said, where=recipe.where("strategy", "type"), warn=attempt.warn)


def _estimate(choice: Choice, job: Job | None) -> record.Estimate | None:
    if choice.outlook is None:
        return None
    memory = choice.outlook.memory
    return record.Estimate(
        memory=memory.parts,
        moment=memory.moment,
        device_bytes=memory.device,
        capacity_bytes=job.capacity,
        host_bytes=memory.host,
        disk_bytes=memory.disk,
        seconds_per_update=choice.outlook.seconds,
        reason=choice.reason,
    )


def _unknown(recipe: Recipe, basis: _Basis) -> DsftError:
    """Why nothing can be said about memory."""
    if basis.found.facts is None or not basis.found.facts.sized:
        path, yourself = (
            basis.found.model.path,
            "say strategy, per_device_train_batch_size and gradient_checkpointing yourself",
        )
        if os.path.isabs(path):
            why = f"the planner has no formulas for the kind of model in {path}"
            help = f"take the whole folder, with its weights in safetensors; or {yourself}"
        else:
            why = f"the files of {path} are not on this machine"
            help = meant_folder(recipe, path) or f"name its folder; or {yourself}"
        return refused("not-known", f"what fits is not known: {why}", where=recipe.where("model", "path"), help=help)
    return refused(
        "not-known",
        "what fits is not known: the recipe does not say the kind of GPU",
        where=recipe.where("cluster"),
        help='write it in "cluster", as in "gpu": "h100-80gb"; or say strategy and per_device_train_batch_size yourself',
    )


def _method(recipe: Recipe) -> record.Method:
    if not recipe.sound("method"):
        raise Unusable
    r, alpha, dropout, targets = (
        recipe.get("method", field) for field in ("r", "lora_alpha", "lora_dropout", "target_modules")
    )
    targets = tuple(targets) if isinstance(targets, list) else targets
    return record.Method(recipe.get("method", "type"), r, alpha, dropout, targets)


def _and_parents(folder: str) -> tuple[Path, ...]:
    return Path(folder), *Path(folder).parents


def _plan_checkpoint(recipe: Recipe, cwd: Path) -> record.Checkpoint:
    said = recipe.get("checkpoint", "output_dir")
    output_dir = said or str(Path(os.path.abspath(cwd)) / "runs" / recipe.get("name"))
    too_long = next((name for name in Path(output_dir).parts if len(os.fsencode(name)) > 255), None)
    if too_long:
        raise refused(
            "not-a-directory",
            f"a folder's name has at most 255 bytes, and {too_long[:20]}… has {len(os.fsencode(too_long))}",
            where=recipe.where("checkpoint", "output_dir"),
        )
    for folder in _and_parents(output_dir):
        if os.path.exists(folder):  # unlike Path.exists, no error for a name that is too long
            if not folder.is_dir():
                raise refused(
                    "not-a-directory",
                    f"{folder} is a file; results need a directory there",
                    where=recipe.where("checkpoint", "output_dir"),
                )
            break
        if os.path.islink(folder):
            raise refused(
                "not-a-directory",
                f"{folder} is a link to {os.path.realpath(folder)}, which is not there; results need a directory",
                where=recipe.where("checkpoint", "output_dir"),
            )
    return record.Checkpoint(
        output_dir=output_dir,
        save_updates=recipe.get("checkpoint", "save_steps"),
        keep=recipe.get("checkpoint", "keep"),
        resume=recipe.get("checkpoint", "resume"),
    )
