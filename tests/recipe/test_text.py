"""The JSON parser against the standard library's, and the places that it gives."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.errors import MAX_EXCERPT, DsftError
from dsft.recipe.text import MAX_PROBLEMS, Source, parse, parse_all

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
        assert error.problems
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


@pytest.mark.parametrize("before", [0, 1, 40, 500, 9_999])
@pytest.mark.parametrize("after", [0, 1, 200, 9_999])
def test_a_long_line_is_cut_around_the_place(before, after):
    with pytest.raises(DsftError) as caught:
        tree_of("[" + " " * before + "nope" + " " * after + "]")
    (problem,) = caught.value.problems
    assert problem.where.column == 2 + before
    first, excerpt, carets, _ = problem.render().split("\n")
    assert first.startswith(f"r.json:1:{2 + before}: ") and len(excerpt) <= MAX_EXCERPT + len("  1 | ")
    assert excerpt[carets.index("^") : carets.rindex("^") + 1] == "nope"
    whole = before + after + len("[nope]") <= MAX_EXCERPT
    assert ("…" not in excerpt) is whole


@pytest.mark.parametrize(
    ("line", "under"),
    [("[\t\tno", "\t\t^^"), ("[“, no]", "^"), ('["漢字" no]', "      ^"), ('["é́" 1, nope]', "   ^")],
)
def test_carets_stand_under_the_place(line, under):
    with pytest.raises(DsftError) as caught:
        tree_of(line)
    carets = caught.value.problems[0].render().split("\n")[2].removeprefix("    | ")
    assert carets.rstrip() == " " + under


def test_what_moves_or_hides_text_is_not_printed():
    with pytest.raises(DsftError) as caught:
        tree_of('{"a\u202e": 1, "a\u202e": "\x1b[31m"}')
    assert "\u202e" not in str(caught.value) and "\x1b" not in str(caught.value)


# --- reading on ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1,}', {"a": 1}),
        ("[1,, 2,]", [1, 2]),
        ('{"a": 1 // c\n}', {"a": 1}),
        ("[1, # c\r\n2]", [1, 2]),
        ("/* c\n d */ [1]", [1]),
        ("['a b', \"c\"]", ["a b", "c"]),
        ("{a: 1, $b.c-d : 2}", {"a": 1, "$b.c-d": 2}),
        ("{'a': 1}", {"a": 1}),
        ('{"a" = 1}', {"a": 1}),
        ('{"a" 1}', {"a": 1}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('[1 "b" {} [] true]', [1, "b", {}, [], True]),
        ('{"a": 1, "a": 2, "b": 3}', {"a": None, "b": 3}),
        ('{"a": NaN, "b": -Infinity, "c": 1e999, "d": 007, "e": +1, "f": .5}', dict.fromkeys("abcdef")),
        ('{"a": True, "b": None, "c": lora, "d": "\\q", "e": "\t", "f": "\\ud800"}', dict.fromkeys("abcdef")),
        ('{"\\q": 1, "b": 2}', {"b": 2}),
    ],
)
def test_a_mistake_that_leaves_no_doubt_is_noted_and_read_over(text, value):
    tree, problems = parse_all(Source("r.json", Path("/"), text))
    assert problems and readable(tree) == value


def readable(node):
    """The plain value, with None for what a problem is about."""
    if node.broken:
        return None
    if isinstance(node.value, dict):
        return {name: readable(child) for name, child in node.value.items()}
    return [readable(child) for child in node.value] if isinstance(node.value, tuple) else node.value


@pytest.mark.parametrize(
    "text",
    ["", "[", '{"a": 1', '{"a"', '{"a":', "[1}", '{"a": [1}', '["a": 1]', '"open', "['open]", "/* open", '["a\\"]',
     "[1] [2]", "{,}", "[,]", '{"a": 1 b}', '{"a": }'],
)  # fmt: skip
def test_a_mistake_that_leaves_doubt_is_the_last(text):
    with pytest.raises(DsftError) as caught:
        parse_all(Source("r.json", Path("/"), text))
    assert len(caught.value.problems) == 1


def test_what_was_noted_before_is_reported_too():
    with pytest.raises(DsftError) as caught:
        tree_of('{"a": NaN, "a": 1,, "b": [1}')
    assert [(p.kind, p.where.column) for p in caught.value.problems] == [
        ("syntax", 7), ("duplicate-key", 12), ("syntax", 19), ("syntax", 28)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["[" + " 1" * 500_000, "[" + "1,," * 100_000, "{" + '"a":1,' * 60_000, "[" + "#\n" * 200_000]
)
def test_mistakes_without_end_are_not_read_to_the_end(text):
    start = time.monotonic()
    with pytest.raises(DsftError) as caught:
        tree_of(text)
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert time.monotonic() - start < 5  # quadratic work would be minutes


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
