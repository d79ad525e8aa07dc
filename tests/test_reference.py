"""The schema as editors use it, and docs/recipe.md, which is made from it."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsft.recipe.schema import load_schema

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = load_schema()
VERBATIM = ("strategy", "config")  # what is handed to DeepSpeed has DeepSpeed's own defaults


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema


def fields(schema: dict[str, Any] = SCHEMA, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """(path, schema, required) of every field, in lists and under every condition too."""
    schema = resolved(schema)
    complete = SCHEMA["$defs"]["complete"]
    required = (
        schema.get("required", ()),
        (complete["properties"].get(at[-1], {}) if at else complete).get("required", ()),
    )
    for name, field in schema.get("properties", {}).items():
        if field is not True:
            yield (*at, name), field, any(name in names for names in required)
            yield from fields(field, (*at, name))
    for word in ("items", "then", "else"):
        if word in schema:
            yield from fields(schema[word], at)


FIELDS = list(fields())


def valid(value: Any, field: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(field | {"$defs": SCHEMA["$defs"]}).is_valid(value)


def test_the_page_is_current():
    make = runpy.run_path(str(ROOT / "scripts" / "make_reference.py"))
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == make["reference"](SCHEMA), "run scripts/make_reference.py"
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(path[-1] for path, _, _ in FIELDS)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert len(FIELDS) > 80


@pytest.mark.parametrize(("path", "field", "required"), FIELDS, ids=[".".join(path) for path, _, _ in FIELDS])
def test_every_field_serves_an_editor(path, field, required):
    branches = "$ref" in field or "items" in field
    assert re.match(r"[A-Z\"]|[a-z0-9_]+: ", field["description"]) and field["description"].endswith("."), "a sentence"
    verbatim = path[:2] == VERBATIM and path != VERBATIM
    optional_in_its_object = path in (("$schema",), ("data", "eval", "split"))
    assert ("default" in field) + required == (not verbatim and not optional_in_its_object), "a default, or required"
    if "default" in field:
        assert valid(field["default"], field)
    shown = (
        field.get("examples")
        or field.get("enum")
        or field.get("type") == "boolean"
        or "properties" in field
        or branches
    )
    assert shown, "an example shows what to write"
    assert all(valid(example, field) for example in field.get("examples", ()))
    assert all(valid(value, field) for value in field.get("enum", ()))


def offered(schema: dict[str, Any], value: dict[str, Any]) -> set[str]:
    """The keys that an editor offers in the object `value`: those of `schema` and of each branch that holds."""
    schema = resolved(schema)
    names = set(schema.get("properties", {}))
    if "if" in schema:
        branch = "then" if valid(value, schema["if"]) else "else"
        names |= offered(schema.get(branch, {}), value)
    return names


@pytest.mark.parametrize("part", ["method", "strategy"])
def test_each_type_offers_its_own_keys(part):
    schema = SCHEMA["properties"][part]
    everything = {path[-1] for path, _, _ in FIELDS if path[:-1] == (part,)}
    found = set()
    for name in schema["properties"]["type"]["enum"]:
        keys = offered(schema, {"type": name})
        found |= keys
        for key in everything:  # what is offered is taken, and nothing else
            (field,) = [field for path, field, _ in FIELDS if path == (part, key)]
            example = (field.get("examples") or field.get("enum") or [True])[0] if key != "type" else name
            assert _knows(schema, {"type": name, key: example}) == (key in keys), (name, key)
    assert found == everything


def _knows(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    validator = jsonschema.Draft202012Validator(schema | {"$defs": SCHEMA["$defs"]})
    return not any(error.validator == "additionalProperties" for error in validator.iter_errors(value))


def test_an_evaluation_offers_a_file_and_a_split():
    evaluation = SCHEMA["properties"]["data"]["properties"]["eval"]
    assert offered(evaluation, {}) == {"path", "format", "split"}
    assert not valid({"split": 0.1, "path": "x", "format": "alpaca"}, evaluation)


def test_an_editor_asks_only_a_whole_recipe_for_everything():
    assert valid({"name": "more", "extends": "base.json", "training": {"max_steps": 9}}, SCHEMA)
    whole = {"name": "more", "training": {"max_steps": 9}}
    assert not valid(whole, SCHEMA) and not valid(whole | {"extends": None}, SCHEMA)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.json")), ids=lambda path: path.stem)
def test_examples_are_good_in_an_editor(recipe):
    values = json.loads(recipe.read_text())
    assert (recipe.parent / values["$schema"]).samefile(ROOT / "schemas" / "recipe.schema.json")
    assert [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(values)] == []
