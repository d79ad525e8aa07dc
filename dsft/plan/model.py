"""The model's folder, as far as it can be looked at without loading it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsft.errors import refused
from dsft.plan.record import Model
from dsft.recipe.load import nearby
from dsft.recipe.record import Recipe

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def plan_model(recipe: Recipe) -> Model:
    """Raises DsftError for a path that is neither a model's folder nor a hub id."""
    path = recipe.get("model", "path")
    where = recipe.where("model", "path")
    if os.path.isabs(path):
        if not os.path.isdir(path):
            raise refused("model-not-found", f"there is no folder {path}", where=where, help=nearby(Path(path)))
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise refused(
                "model-not-found",
                f"{path} has no config.json",
                where=where,
                help="name a folder that save_pretrained wrote, or one downloaded from the hub",
            )
    elif not _HUB_ID.fullmatch(path):
        raise refused(
            "model-not-found",
            f'"{path}" is neither a folder here nor a hub id such as org/name',
            where=where,
            help="a folder is relative to the file that says it",
        )
    fields = ("revision", "attn_implementation", "trust_remote_code", "gradient_checkpointing")
    return Model(path, *(recipe.get("model", field) for field in fields))
