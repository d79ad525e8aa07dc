"""Types are taken at their word: one rule, as dsft.recipe.schema states it, for every field of the schema."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from workshop import COMPLETE

from dsft.recipe import schema
from dsft.recipe.text import Source, parse

ZERO_3 = {"type": "deepspeed", "zero_stage": 3}
# A recipe for each branch of the schema: a field is looked at in the first one that has it.
BASES = [
    COMPLETE | {"strategy": {"type": "fsdp"}, "data": COMPLETE["data"] | {"eval": {"split": 0.5}}},
    COMPLETE | {"strategy": ZERO_3, "data": COMPLETE["data"] | {"eval": {"path": "rows.json", "format": "alpaca"}}},
]
WRITTEN = ['"1e-4"', '"8"', '"true"', "true", "false", "0", "8", "8.0", "1e1", "8.5", "null", "[]", "[8]", "{}"]
KINDS = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object", int: "integer"}


def fields() -> list[tuple[str | int, ...]]:
    """Every field that a recipe can say, objects and lists too; of a list, its first item."""
    paths = []
    for place, name, _ in schema._all_fields():
        path = (*place, name)
        paths.append((*path[:2], 0, *path[2:]) if path[:2] == ("data", "train") and len(path) > 2 else path)
    return sorted(set(paths), key=str)


def with_value(base: dict, path, written: str) -> str | None:
    """The text of `base` with `written` at `path`; None where `base` has no such place."""
    recipe = copy.deepcopy(base)
    inner = recipe
    for step in path[:-1]:
        if isinstance(inner, dict) and step not in inner and path[:2] == ("data", "eval"):
            return None
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else inner[step]
    inner[path[-1]] = "<here>"
    return json.dumps(recipe).replace('"<here>"', written)


def found(path, written: str):
    """(what is wrong at the path or in it, the value as a recipe with it has it), in the first base with the field."""
    for base in BASES:
        text = with_value(base, path, written)
        if text is None:
            continue
        values, problems, wrong = schema.check(parse(Source("r.json", Path("/"), text)))
        if any(problem.kind in ("unknown-key", "refused-key") for problem in problems):
            continue
        value = values
        for step in path:
            value = value.get(step) if isinstance(value, dict) else value[step]
        return [at for at in wrong if at[: len(path)] == path], value
    raise AssertionError(f"no base has {path}")


def declared(path) -> dict:
    names = tuple(step for step in path if isinstance(step, str))
    return next(
        schema._resolve(field)
        for place, name, field in schema._all_fields()
        if (*place, name) == names and field is not True
    )


def types(field: dict) -> set[str]:
    if "type" in field:
        return {field["type"]} if isinstance(field["type"], str) else set(field["type"])
    return {KINDS[type(option)] for option in field["enum"]}


@pytest.mark.parametrize("path", fields(), ids=str)
def test_every_field(path):
    field = declared(path)
    allowed = types(field)
    for written in WRITTEN:
        value = json.loads(written)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number:
            right = "number" in allowed or "integer" in allowed and value == int(value)
        else:
            right = KINDS[type(value)] in allowed
        wrong, taken = found(path, written)
        if not right:
            assert path in wrong, f"{written} was taken for {path}"
        elif not wrong:  # of the right type, and not out of range besides
            if is_number:
                assert repr(taken) == repr(int(value) if "integer" in allowed else float(value)), f"{written} at {path}"
            elif isinstance(value, (bool, type(None))):
                assert taken is value


@pytest.mark.parametrize("path", fields(), ids=str)
def test_every_field_takes_its_examples_and_default(path):
    field = declared(path)
    for said in [
        *field.get("examples", []),
        *field.get("enum", []),
        *([field["default"]] if "default" in field else []),
    ]:
        assert found(path, json.dumps(said))[0] == [], f"{said!r} is refused at {path}"
