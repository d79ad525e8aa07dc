"""JSON Schema 2020-12, as much of it as the recipe's schema uses.

The jsonschema package finds the same, in the same order: a test compares the two. To import it takes longer than all
the rest of a compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dsft.recipe.record import Path


class Error(NamedTuple):
    """What one keyword finds wrong with one value. A keyword about keys finds all wrong or missing ones at once."""

    path: Path
    keyword: str
    limit: Any  # what the schema says beside the keyword
    value: Any
    schema: dict[str, Any]  # that says so


def errors(schema: Any, value: Any, root: dict[str, Any], path: Path = ()) -> Iterator[Error]:
    """Everything that is wrong with `value` by `schema`, a part of the schema `root`."""
    if schema is True:
        return
    for keyword, limit in schema.items():
        if keyword == "$ref":
            yield from errors(referred(limit, root), value, root, path)
        elif keyword == "allOf":
            for part in limit:
                yield from errors(part, value, root, path)
        elif keyword == "if":
            branch = "then" if is_valid(limit, value, root) else "else"
            yield from errors(schema.get(branch, True), value, root, path)
        elif keyword == "properties" and isinstance(value, dict):
            for name, field in limit.items():
                if name in value:
                    yield from errors(field, value[name], root, (*path, name))
        elif keyword == "items" and isinstance(value, list):
            for at, item in enumerate(value):
                yield from errors(limit, item, root, (*path, at))
        elif keyword == "additionalProperties" and isinstance(value, dict):  # false, the only form in use
            if value.keys() - schema["properties"].keys():
                yield Error(path, keyword, limit, value, schema)
        elif keyword in _CHECKS and not _CHECKS[keyword](value, limit):
            yield Error(path, keyword, limit, value, schema)


def is_valid(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    return next(errors(schema, value, root), None) is None


def referred(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    """What a $ref points at: "#/$defs/NAME", the only form in use."""
    return root["$defs"][reference.removeprefix("#/$defs/")]


def is_type(value: Any, name: str) -> bool:
    """Whether `value` is of the type `name`: true is no number, and 8.0 is a whole one."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or isinstance(value, float) and value.is_integer()
    return isinstance(value, _CLASSES[name])


_CLASSES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip


def _of_type(name: str, check: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`check` for values of one type: to all others the keyword says nothing."""
    return lambda value, limit: not is_type(value, name) or check(value, limit)


def _same(value: Any) -> Any:
    """Equal and hashable for what JSON Schema takes for equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, dict):
        return "object", frozenset((name, _same(child)) for name, child in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_same, value))
    return isinstance(value, bool), value


_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, names: any(is_type(value, name) for name in ([names] if isinstance(names, str) else names)),
    "enum": lambda value, allowed: _same(value) in map(_same, allowed),
    "const": lambda value, only: _same(value) == _same(only),
    "required": _of_type("object", lambda value, names: value.keys() >= set(names)),
    "minimum": _of_type("number", lambda value, limit: value >= limit),
    "maximum": _of_type("number", lambda value, limit: value <= limit),
    "exclusiveMinimum": _of_type("number", lambda value, limit: value > limit),
    "exclusiveMaximum": _of_type("number", lambda value, limit: value < limit),
    "minLength": _of_type("string", lambda value, limit: len(value) >= limit),
    "maxLength": _of_type("string", lambda value, limit: len(value) <= limit),
    "pattern": _of_type("string", lambda value, pattern: re.search(pattern, value) is not None),
    "minItems": _of_type("array", lambda value, limit: len(value) >= limit),
    "uniqueItems": _of_type("array", lambda value, _: len(set(map(_same, value))) == len(value)),
}
