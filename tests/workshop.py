from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsft.plan import make_plan
from dsft.recipe import load_recipe

COMPLETE = {
    "name": "tiny",
    "model": {"path": "./model"},
    "data": {"train": [{"path": "rows.json", "format": "alpaca"}], "max_length": 128},
    "method": {"type": "lora"},
    "strategy": {"type": "ddp"},
    "training": {
        "max_steps": 5,
        "global_batch_size": 16,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
    },
    "cluster": {"device": "cpu", "processes_per_node": 2},
}


class Workshop:
    """A folder with a model, ten rows and recipes."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "rows.json").write_text(json.dumps([{"instruction": str(n), "output": "x"} for n in range(10)]))

    def write(self, name: str, recipe: dict | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe if isinstance(recipe, str) else json.dumps(recipe, indent=2))
        return path

    def recipe(self, *overrides: str, **changes):
        return load_recipe(self.write("recipe.json", COMPLETE | changes), overrides)

    def plan(self, *overrides: str, **changes):
        return make_plan(self.recipe(*overrides, **changes), versions={"python": "3.11"}, cwd=self.folder)


@pytest.fixture
def workshop(tmp_path) -> Workshop:
    return Workshop(tmp_path)
