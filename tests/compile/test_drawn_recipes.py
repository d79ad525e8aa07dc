"""A rule never fires on a good recipe: hundreds of drawn ones compile without a word, and the compiled recipe again."""

from __future__ import annotations

import json

from drawn_recipes import furnished, good
from hypothesis import HealthCheck, given, settings
from workshop import Workshop, workshop

from dsft.compile import compile_plan
from dsft.plan import make_plan
from dsft.recipe import load_recipe

__all__ = ["furnished", "workshop"]

NOT_OF_THE_RECIPE = {"model-not-cached", "not-installed"}  # warnings of what this machine lacks
MEMORY = 64 << 30  # of the machine, in bytes: the tests are the same on all


def compiled(workshop: Workshop, recipe: str):
    """The plan of a recipe, and its files; an error is raised, and a warning fails."""
    loaded = load_recipe(workshop.write("recipe.json", recipe))
    warnings = []
    plan = make_plan(loaded, versions={}, cwd=workshop.folder, memory=MEMORY, warn=warnings.append)
    assert [warning.render() for warning in warnings if warning.kind not in NOT_OF_THE_RECIPE] == []
    return plan, compile_plan(plan, loaded.to_json(plan.checkpoint.output_dir), workshop.folder / "build")


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(good())
def test_no_rule_fires_on_a_good_recipe(furnished, recipe):
    plan, artifacts = compiled(furnished, json.dumps(recipe))
    assert plan.training.total_updates >= plan.training.warmup_updates
    assert compiled(furnished, artifacts.files["recipe.json"]) == (plan, artifacts)
