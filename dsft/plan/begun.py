"""What the output folder of a plan holds already: nothing, a run that this one goes on with, or something else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dsft.errors import refused
from dsft.plan.record import Plan, differences, from_json

RECORD = "run.json"  # the plan of the run
METRICS = "metrics.jsonl"

# What may differ between a run and its continuation. The rest decides what is learned, and must not.
FREE_TO_CHANGE = {
    *("recipe_sha256", "versions", "strategy", "checkpoint", "logging", "cluster", "launcher", "estimate", "files"),
    *("batch.world_size", "batch.per_device", "batch.accumulation", "model.gradient_checkpointing"),
}


def is_begun(plan: Plan) -> bool:
    """Whether output_dir holds a run that this plan goes on with.

    Raises DsftError where it holds another run, or any under "never", or what is not of a run at all.
    """
    folder = Path(plan.checkpoint.output_dir)
    before = folder / RECORD
    begun = [
        name for name in ("adapter", "model", "checkpoints", METRICS, "config.json") if os.path.exists(folder / name)
    ]
    if not begun:
        return False  # a run that failed before its first update binds nobody
    if not os.path.isfile(before):
        raise refused(
            "folder-taken",
            f"{folder} holds {', '.join(begun)} of something else than a run of dsft",
            help="choose another checkpoint.output_dir",
        )
    if plan.checkpoint.resume == "never":
        raise refused(
            "run-exists",
            f"{folder} holds a run already, and checkpoint.resume is never",
            help="choose another checkpoint.output_dir, or remove that folder",
        )
    try:
        old = from_json(before.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        help = "written by another version of dsft? Choose another checkpoint.output_dir, or remove that folder"
        raise refused("run-unreadable", f"cannot read {before}: {error}", help=help) from error
    changes = list(_changes(old, plan))
    if changes:
        raise refused(
            "other-run",
            f"{folder} holds a run that this one cannot go on with: " + "; ".join(changes),
            help="choose another name or checkpoint.output_dir, or remove that folder",
        )
    return True


def _changes(old: Plan, new: Plan) -> Iterator[str]:
    """Each decision about what is learned that differs, with both values."""
    for path, was, now in differences(old, new):
        if path.split(".")[0] not in FREE_TO_CHANGE and path not in FREE_TO_CHANGE:
            yield f"{path} was {was} and is {now}"
