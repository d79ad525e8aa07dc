"""Whatever a recipe is made of, it gives a plan or a DsftError, never another exception."""

from __future__ import annotations

import contextlib
import copy
import io
import json

import pytest
from drawn_recipes import VALUES, WORDS, damaged, furnish, good, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workshop import COMPLETE, Workshop

from dsft import cli
from dsft.errors import DsftError
from dsft.plan import make_plan, record
from dsft.recipe import load_recipe

SETTINGS = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = json.dumps(COMPLETE, indent=2)
RICH = COMPLETE | {
    "extends": None,
    "data": COMPLETE["data"] | {"eval": {"split": 0.1}, "chat_template": None},
    "strategy": {"type": "deepspeed", "zero_stage": 2, "config": {"zero_optimization": {"overlap_comm": True}}},
    "checkpoint": {"output_dir": "out"},
}


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


def run(workshop: Workshop, content: bytes, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command on a recipe."""
    path = workshop.folder / "recipe.json"
    path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([arguments[0], str(path), *arguments[1:]])
    assert "internal error" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def furnished(workshop, monkeypatch):
    furnish(workshop)
    monkeypatch.chdir(workshop.folder)
    return workshop


@settings(SETTINGS, max_examples=200)
@given(good())
def test_no_rule_fires_on_a_good_recipe(furnished, recipe):
    code, out, err = run(furnished, json.dumps(recipe).encode(), "compile", "-o", "out")
    assert (code, err) == (0, ""), err
    assert recipe["name"] in out


@SETTINGS
@given(damaged(), st.sampled_from(["text", "json", "github"]))
def test_a_damaged_recipe(furnished, recipe, form):
    code, out, err = run(furnished, json.dumps(recipe).encode(), "check", "--format", form)
    if form == "text":
        assert code == (2 if "error[" in err else 0)
        return
    assert err == ""
    if form == "github":
        assert code == (2 if "::error " in out else 0) and all(line.startswith("::") for line in out.splitlines())
    else:
        said = json.loads(out)
        assert code == (0 if said["ok"] else 2) and (said["ok"] or said["problems"])


@SETTINGS
@given(good(), st.data())
def test_the_text_of_a_good_recipe_damaged(furnished, recipe, data):
    text = json.dumps(recipe, indent=data.draw(st.sampled_from([None, 1])))
    for _ in range(data.draw(st.integers(1, 3))):
        at, removed = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(st.text("{}[]\",:\\'e0-.1 \n\t#/*é\0=", max_size=3)) + text[at + removed :]
    code, _, err = run(furnished, text.encode(), "check")
    assert code == (2 if "error[" in err else 0)


@SETTINGS
@given(st.binary(max_size=300))
def test_bytes_on_the_command_line(workshop, content):
    assert run(workshop, content, "check")[0] == 2
