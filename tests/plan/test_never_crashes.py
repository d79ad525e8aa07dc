"""Whatever a recipe is made of, it gives a plan or a DsftError, never another exception."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workshop import COMPLETE, Workshop

from dsft.errors import DsftError
from dsft.plan import make_plan, record
from dsft.recipe import load_recipe, schema

SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = json.dumps(COMPLETE, indent=2)
RICH = COMPLETE | {
    "extends": None,
    "data": COMPLETE["data"] | {"eval": {"split": 0.1}, "chat_template": None},
    "strategy": {"type": "deepspeed", "zero_stage": 2, "config": {"zero_optimization": {"overlap_comm": True}}},
    "checkpoint": {"output_dir": "out"},
}
WORDS = sorted(
    {name for _, name, _ in schema._all_fields()} | {"lora", "full", "rows.json", "model", "~", "", "é", "dp"}
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(WORDS), v, max_size=3)
)


def plan_of(workshop: Workshop, content: bytes, overrides=()) -> None:
    path = workshop.folder / "recipe.json"
    path.write_bytes(content)
    try:
        plan = make_plan(load_recipe(path, overrides), versions={}, cwd=workshop.folder)
    except DsftError as error:
        assert error.problems and error.exit_code == 2
        assert all(problem.where and problem.render().encode() for problem in error.problems)
    else:
        assert record.from_json(record.to_json(plan)) == plan


@SETTINGS
@given(st.binary(max_size=200))
def test_bytes(workshop, content):
    plan_of(workshop, content)


@SETTINGS
@given(st.integers(0, len(TEXT)), st.integers(0, 5), st.text("{}[]\",:\\'e0-.1 \n\t#/é", max_size=3))
def test_a_recipe_with_some_characters_changed(workshop, at, removed, inserted):
    plan_of(workshop, (TEXT[:at] + inserted + TEXT[at + removed :]).encode())


def places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(list(places(RICH))[1:]), VALUES, st.sampled_from(WORDS)), max_size=4))
def test_a_recipe_with_some_values_changed(workshop, changes):
    recipe = copy.deepcopy(RICH)
    for path, value, key in changes:
        inner = recipe
        try:
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
        if isinstance(inner, dict):
            inner[key] = value
    plan_of(workshop, json.dumps(recipe).encode())


@SETTINGS
@given(
    st.sampled_from([".".join(map(str, path)) for path in places(RICH)]), st.text(max_size=8) | VALUES.map(json.dumps)
)
def test_any_argument(workshop, key, value):
    plan_of(workshop, json.dumps(RICH).encode(), [f"{key}={value}"])


@SETTINGS
@given(st.binary(max_size=60) | st.text("n12 slots=0#@:.\n\r\t-[]", max_size=60).map(str.encode))
def test_any_hostfile(workshop, content):
    (workshop.folder / "hosts").write_bytes(content)
    plan_of(workshop, json.dumps(COMPLETE | {"cluster": {"hostfile": "hosts"}}).encode())


@pytest.mark.parametrize("kind", [[], {}, None, 3, True, "x", 1.5])
@pytest.mark.parametrize("path", list(places(RICH)), ids=str)
def test_every_place_of_every_type(workshop, path, kind):
    recipe = {"": copy.deepcopy(RICH)}
    inner, steps = recipe, ("", *path)
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = kind
    plan_of(workshop, json.dumps(recipe[""]).encode())
