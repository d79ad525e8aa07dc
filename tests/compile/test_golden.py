"""The compiled output of every example recipe, exact. `pytest --update-golden` writes tests/golden anew.

A recipe is compiled in a copy of the repository with fixed versions, and the copy's place is then called /dsft: what
is compared is the same on every machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from dsft.compile import compile_plan, write
from dsft.plan import make_plan
from dsft.plan.record import from_json, to_json
from dsft.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.json"))
MEMORY = 32 * 2**30
VERSIONS = {"python": "3.11", "torch": "2.13.0", "deepspeed": "0.19.8"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """Recipes, hostfiles and data, and stand-ins for what `make` fetches."""
    root = tmp_path_factory.mktemp("repository")
    for folder in ("recipes", "hostfiles", "data"):
        shutil.copytree(ROOT / folder, root / folder)
    model = root / "build" / "models" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    published = json.loads((ROOT / "tests" / "plan" / "configs" / "published.json").read_text())
    (config,) = (each["config"] for each in published if each["name"].endswith("SmolLM2-135M"))
    (model / "config.json").write_text(json.dumps(config))
    (root / "build" / "data").mkdir()
    shutil.copy(ROOT / "data" / "identity.json", root / "build" / "data")
    return root


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name, repository, update_golden):
    golden = GOLDEN / f"{name}.txt"
    text = _compiled(name, repository)
    if update_golden:
        golden.write_text(text)
    assert golden.exists(), "no golden file of this recipe: run pytest --update-golden"
    assert text == golden.read_text(), "if the change is meant: pytest --update-golden, and look at the difference"


def test_every_golden_file_has_a_recipe(update_golden):
    stale = [path for path in GOLDEN.glob("*.txt") if path.stem not in RECIPES]
    if update_golden:
        for path in stale:
            path.unlink()
    else:
        assert not stale


@pytest.mark.parametrize("name", RECIPES)
def test_the_compiled_recipe_compiles_to_the_same(name, repository, tmp_path):
    """launch/local.sh starts from it, and from any working directory."""

    def compiled(path, cwd):
        recipe = load_recipe(path, [])
        plan = make_plan(recipe, versions=VERSIONS, cwd=cwd, memory=MEMORY)
        return compile_plan(plan, recipe.to_json(plan.checkpoint.output_dir), tmp_path / "build")

    artifacts = compiled(repository / "recipes" / f"{name}.json", cwd=repository)
    write(artifacts, tmp_path / "build")
    assert compiled(tmp_path / "build" / "recipe.json", cwd=tmp_path) == artifacts


def _compiled(name: str, root: Path) -> str:
    """All files and commands of a recipe as one text."""
    recipe = load_recipe(root / "recipes" / f"{name}.json", [])
    plan = make_plan(recipe, versions=VERSIONS, cwd=root, memory=MEMORY)
    recipe_json = recipe.to_json(plan.checkpoint.output_dir).replace(str(root), "/dsft")
    plan = dataclasses.replace(
        from_json(to_json(plan).replace(str(root), "/dsft")),
        recipe_sha256=hashlib.sha256(recipe_json.encode()).hexdigest(),
    )
    artifacts = compile_plan(plan, recipe_json, f"/dsft/build/{plan.name}")
    parts = []
    for file, text in artifacts.files.items():
        mode = " (executable)" if file in artifacts.executable else ""
        parts.append(f"===== {file}{mode}\n{text}")
    for launcher, commands in artifacts.commands.items():
        argvs = "".join(f"{list(argv)}\n" for argv in commands)
        parts.append(f"===== to start: {launcher}\n{argvs}")
    return "\n".join(parts)
