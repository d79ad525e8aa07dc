"""Room on the disk for what a job writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsft.errors import Problem
from dsft.plan.choose import Choice
from dsft.plan.describe import shown_size
from dsft.plan.record import Checkpoint
from dsft.recipe.record import Recipe


def disk_has_room(recipe: Recipe, checkpoint: Checkpoint, choice: Choice) -> Iterator[Problem]:
    """For checkpoints and result; a warning of a job on other machines, whose disk may be another one."""
    if choice.outlook is None:
        return
    needed, folder = choice.outlook.memory.disk, Path(checkpoint.output_dir)
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return
    elsewhere = recipe.get("cluster", "hostfile") is not None
    yield Problem(
        "disk-space",
        f"checkpoints and result need about {shown_size(needed)}, and {folder}{' here' * elsewhere} has {shown_size(free)} free",
        recipe.where("checkpoint", "output_dir"),
        'choose another "output_dir", a smaller "keep", or make room',
        severity="warning" if elsewhere else "error",
    )
