"""The JSON parser against the standard library's, and the places that it gives."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.errors import DsftError
from dsft.recipe.text import Source, parse

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def tree_of(text: str):
    return parse(Source("r.json", Path("/"), text))


@given(VALUES, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_values_as_json_loads_gives_them(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    parsed = tree_of(text).plain()
    assert parsed == json.loads(text)
    assert repr(parsed) == repr(json.loads(text))  # 1, 1.0 and True apart


@given(st.text("{}[]\",:'\\0123456789.eE+-truefalsn \n\r\t/#é\0", max_size=30))
def test_takes_nothing_that_json_refuses(text):
    try:
        parsed = tree_of(text).plain()
    except DsftError as error:
        assert len(error.problems) == 1
        return
    assert repr(parsed) == repr(json.loads(text))


def test_places_of_keys_and_values():
    tree = tree_of('{\r\n\t"a": [1,\r\n  {"é b": "x"}]}')
    inner = tree.value["a"].value[1].value["é b"]
    assert str(tree.value["a"].key.where()) == "r.json:2:2"
    assert str(tree.value["a"].span.where()) == "r.json:2:7"
    assert (inner.key.where().line, inner.key.where().column, inner.key.where().length) == (3, 4, 5)
    assert (inner.span.where().column, inner.span.where().text) == (11, '  {"é b": "x"}]}')


def test_a_value_over_several_lines_is_underlined_in_its_first():
    where = tree_of('{"a": [1,\n 2]}').value["a"].span.where()
    assert (where.line, where.column, where.length) == (1, 7, 3)


def test_a_line_too_long_to_read_is_not_shown():
    with pytest.raises(DsftError) as caught:
        tree_of("[" + "1, " * 1000 + "]")
    (problem,) = caught.value.problems
    assert (problem.where.column, problem.where.text) == (2999 + 1, None)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '"' + "a" * 4_000_000, '"' + "\\u0041" * 500_000])
def test_hostile_text_is_refused_at_once(text):
    start = time.monotonic()
    with pytest.raises(DsftError):
        tree_of(text)
    assert time.monotonic() - start < 5  # exponential or quadratic work would be hours


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\u0000"', "9223372036854775808", "1" * 5000, "-1e400"])
def test_json_that_no_recipe_can_mean(text):
    with pytest.raises(DsftError):
        tree_of(text)
