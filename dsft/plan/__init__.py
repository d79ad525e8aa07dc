"""A Recipe and what is known of model, data and machines into a Plan.

Each module plans one part and looks at one kind of thing: cluster, batch, data, model, training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from dsft.errors import DsftError, Problem, refused
from dsft.plan import record
from dsft.plan.attempt import Attempt
from dsft.plan.batch import plan_batches
from dsft.plan.cluster import plan_cluster, plan_hosts
from dsft.plan.data import plan_data
from dsft.plan.deepspeed_keys import check_deepspeed_keys
from dsft.plan.model import check_model, plan_model
from dsft.plan.record import Plan
from dsft.plan.strategy import check_hybrid, check_offload
from dsft.plan.training import plan_training
from dsft.plan.versions import installed_versions
from dsft.recipe.record import Recipe

__all__ = ["Plan", "installed_versions", "make_plan"]


def make_plan(
    recipe: Recipe,
    *,
    versions: Mapping[str, str],
    cwd: str | Path,
    warn: Callable[[Problem], None] = lambda problem: None,
) -> Plan:
    """Every decision of the job. `versions` is `installed_versions()`; results go below `cwd` unless the recipe says.

    Raises DsftError with all that is wrong: what the schema and the rules found, and what is wrong with the files.
    """
    attempt = Attempt(recipe.problems)
    found = attempt(plan_model, recipe)
    attempt(check_model, recipe, found)
    data = attempt(plan_data, recipe)
    hosts = attempt(plan_hosts, recipe)
    cluster = attempt(plan_cluster, recipe, hosts)
    attempt(check_offload, recipe)
    attempt(check_hybrid, recipe, hosts, attempt.warn)
    attempt(check_deepspeed_keys, recipe, attempt.warn)
    batches = attempt(plan_batches, recipe, hosts)
    batch = batches[0] if batches else None
    training = attempt(plan_training, recipe, batches, data)
    checkpoint = attempt(_plan_checkpoint, recipe, Path(cwd))
    problems = recipe.in_order(attempt.problems)
    if attempt.failed:
        raise DsftError(problems)
    for problem in problems:
        warn(problem)

    return Plan(
        name=recipe.get("name"),
        recipe_sha256=hashlib.sha256(recipe.to_json(checkpoint.output_dir).encode()).hexdigest(),
        versions=dict(versions),
        model=found.model,
        data=data,
        method=_method(recipe),
        strategy=_strategy(recipe),
        batch=batch,
        training=training,
        checkpoint=checkpoint,
        logging=record.Logging(recipe.get("logging", "logging_steps"), recipe.get("logging", "tensorboard")),
        cluster=cluster,
        launcher=recipe.get("launcher", "type"),
    )


def _method(recipe: Recipe) -> record.Method:
    r, alpha, dropout, targets = (
        recipe.get("method", field) for field in ("r", "lora_alpha", "lora_dropout", "target_modules")
    )
    targets = tuple(targets) if isinstance(targets, list) else targets
    return record.Method(recipe.get("method", "type"), r, alpha, dropout, targets)


def _strategy(recipe: Recipe) -> record.Strategy:
    return record.Strategy(
        engine=recipe.get("strategy", "type"),
        zero_stage=recipe.get("strategy", "zero_stage"),
        offload_optimizer=recipe.get("strategy", "offload_optimizer"),
        offload_param=recipe.get("strategy", "offload_param"),
        reshard_after_forward=recipe.get("strategy", "reshard_after_forward"),
        cpu_offload=recipe.get("strategy", "cpu_offload"),
        hybrid_shard=recipe.get("strategy", "hybrid_shard"),
        config=recipe.get("strategy", "config") or {},
    )


def _plan_checkpoint(recipe: Recipe, cwd: Path) -> record.Checkpoint:
    said = recipe.get("checkpoint", "output_dir")
    output_dir = said or str(Path(os.path.abspath(cwd)) / "runs" / recipe.get("name"))
    for folder in (Path(output_dir), *Path(output_dir).parents):
        if os.path.exists(folder):  # unlike Path.exists, no error for a name that is too long
            if not folder.is_dir():
                raise refused(
                    "not-a-directory",
                    f"{folder} is a file; results need a directory there",
                    where=recipe.where("checkpoint", "output_dir"),
                )
            break
    return record.Checkpoint(
        output_dir=output_dir,
        save_updates=recipe.get("checkpoint", "save_steps"),
        keep=recipe.get("checkpoint", "keep"),
        resume=recipe.get("checkpoint", "resume"),
    )
