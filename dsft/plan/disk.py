"""Room on the disk for what a job writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dsft.errors import DsftError, Problem
from dsft.plan.choose import Choice
from dsft.plan.describe import shown_size
from dsft.plan.record import Checkpoint
from dsft.recipe.record import Recipe


def check_disk(recipe: Recipe, checkpoint: Checkpoint, choice: Choice, warn: Callable[[Problem], None]) -> None:
    """Raises DsftError where checkpoints and result need more than the disk has free; of a job on other machines, whose
    disk may be another one, it warns."""
    if choice.outlook is None:
        return
    needed, folder = choice.outlook.memory.disk, Path(checkpoint.output_dir)
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return
    elsewhere = recipe.get("cluster", "hostfile") is not None
    problem = Problem(
        "disk-space",
        f"checkpoints and result need about {shown_size(needed)}, and {folder}{' here' * elsewhere} has {shown_size(free)} free",
        recipe.where("checkpoint", "output_dir"),
        'choose another "output_dir", a smaller "keep", or make room',
        severity="warning" if elsewhere else "error",
    )
    if not elsewhere:
        raise DsftError([problem])
    warn(problem)
