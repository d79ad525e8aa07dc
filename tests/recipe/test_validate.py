"""The validator against the jsonschema package: the same errors, in the same order."""

from __future__ import annotations

import jsonschema
import pytest
from drawn_recipes import VALUES, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsft.recipe.schema import load_schema
from dsft.recipe.validate import errors, is_valid

SCHEMA = load_schema()


def found(schema, value):
    return [(error.path, error.keyword, error.limit) for error in errors(schema, value, SCHEMA)]


def expected(schema, value):
    """jsonschema has an error for each missing key."""
    validator = jsonschema.Draft202012Validator(schema | {"$defs": SCHEMA["$defs"]})
    each = [
        (tuple(error.absolute_path), error.validator, error.validator_value) for error in validator.iter_errors(value)
    ]
    return [error for at, error in enumerate(each) if error[1] != "required" or error not in each[:at]]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(damaged() | VALUES)
def test_recipes(recipe):
    assert found(SCHEMA, recipe) == expected(SCHEMA, recipe)


NUMBERS = st.integers(-3, 3) | st.sampled_from([1.0, 1.5, -0.0, float("inf"), float("nan"), 2.0**80, 2**80, True])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text("ab\n", max_size=3)
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner))
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
LIMITS = {
    "type": TYPES | st.lists(TYPES, min_size=1, unique=True),
    "enum": st.lists(ANY, min_size=1, max_size=3),
    "const": ANY,
    "required": st.lists(st.sampled_from("abc"), unique=True),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), st.sampled_from([0, 1, 1.5])),
    **dict.fromkeys(("minLength", "maxLength", "minItems"), st.integers(0, 3)),
    "pattern": st.sampled_from(["^a", "b", "^a*$(?!\\n)"]),
    "uniqueItems": st.just(True),
}


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("keyword", LIMITS)
def test_every_keyword_on_any_value(keyword, data):
    schema, value = {keyword: data.draw(LIMITS[keyword])}, data.draw(ANY)
    assert found(schema, value) == expected(schema, value)
    assert is_valid(schema, value, SCHEMA) is (not expected(schema, value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (0, -0.0),
        ([1], [True]),
        ([1], [1.0]),
        ({"a": 0}, {"a": False}),
        ([], {}),
        (None, 0),
    ],
)
def test_what_is_equal(one, other):
    for schema, value in (({"const": one}, other), ({"enum": [one]}, other), ({"uniqueItems": True}, [one, other])):
        assert found(schema, value) == expected(schema, value)
