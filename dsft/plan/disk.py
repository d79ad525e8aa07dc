"""Room on the disk for what a job writes."""

from __future__ import annotations

import os
from pathlib import Path

from dsft.errors import refused
from dsft.plan.choose import Choice
from dsft.plan.describe import gib
from dsft.plan.record import Checkpoint
from dsft.recipe.record import Recipe


def check_disk(recipe: Recipe, checkpoint: Checkpoint, choice: Choice) -> None:
    """Raises DsftError where checkpoints and result need more than the disk has free."""
    if choice.outlook is None:
        return
    needed, folder = choice.outlook.memory.disk, Path(checkpoint.output_dir)
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)  # as shutil.disk_usage, which loads four kinds of compression
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise refused(
            "disk-space",
            f"checkpoints and result need about {gib(needed)}, and {folder} has {gib(free)} free",
            where=recipe.where("checkpoint", "output_dir"),
            help='choose another "output_dir", a smaller "keep", or make room',
        )
