"""The schema's part of a recipe: everything it finds wrong, in a user's words, and the defaults that it fills in.

Beyond JSON Schema three annotations are read: `x-path` (true: a path, made absolute; "model": a path, or a hub id that
is left alone), `x-aliases` (names that other programs have for the key) and `x-refused` (of an enum: values, of an object: keys that
people try, each with the reason and what to write instead).

Types are taken at their word, the same for every field:

    written       where a number, a whole number, true or false is wanted
    "1e-4"        wrong: a string, whatever is in it
    true          wrong for a number; 1 and 0 are wrong for true or false
    8.0, 1e3      the whole numbers 8 and 1000, by JSON Schema's rule; 8.5 is none, nor is 1e300: beyond 64 bits
    8             the number 8.0
    null          wrong, but for the fields whose type names it; there it says anew that nothing is said
    [8], {}       wrong: never unpacked
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import jsonschema

from dsft.errors import DsftError, Problem
from dsft.recipe.record import Path
from dsft.recipe.text import MAX_PROBLEMS, Node, Source, parse
from dsft.shipped import shipped

_TYPES = {
    "object": "an object {…}",
    "array": "a list […]",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


_JSON = jsonschema.Draft202012Validator
_Validator = jsonschema.validators.extend(
    _JSON,
    type_checker=_JSON.TYPE_CHECKER.redefine(
        "integer", lambda _, value: _JSON.TYPE_CHECKER.is_type(value, "integer") and -(2**63) <= value < 2**63
    ),
)


def schema_path() -> FilePath:
    return shipped("schemas/recipe.schema.json")


@functools.cache
def load_schema() -> dict[str, Any]:
    return json.loads(schema_path().read_text(encoding="utf-8"))


def check(tree: Node) -> tuple[dict[str, Any], list[Problem], set[Path]]:
    """The complete values of `tree`, what is wrong with it, and the paths of wrong or missing values."""
    validator = _Validator(load_schema())
    found: dict[Path, Problem] = {}  # the first word on a path is the last
    broken = set(_broken(tree))
    wrong = set(broken)
    said = tree.plain()
    if isinstance(said, dict) and isinstance(said.get("extends"), str) and said["extends"]:
        said["extends"] = None  # followed: `tree` is all of the recipe
    errors = itertools.islice(validator.iter_errors(said), MAX_PROBLEMS + 1)
    # Missing keys last: one that is said misspelt or in another place is not missing.
    in_turn = sorted(errors, key=lambda error: error.validator == "required")
    if isinstance(said, dict) and (said.get("extends") is not None or ("extends",) in broken):
        # A base was meant, and is not read: what it would say is not missing, and nothing can be told of the whole.
        in_turn = [error for error in in_turn if error.absolute_schema_path[0] != "allOf"]
        wrong.add(())
    problems = (item for error in in_turn for item in _problems(tree, error, wrong))
    for path, problem in itertools.islice(problems, MAX_PROBLEMS + 1):
        is_key = problem.kind in ("unknown-key", "refused-key")
        if path in found or not is_key and any(path[:end] in broken for end in range(len(path) + 1)):
            continue
        if len(found) == MAX_PROBLEMS:
            message = f"more than {MAX_PROBLEMS} problems; the rest is not reported"
            path, problem = (), Problem("too-many-problems", message, problem.where)
        found[path] = problem
        # Without its type nothing else in a section can be checked.
        wrong.update((path, path[:-1]) if path[-1:] == ("type",) else (path,))
    complete = _complete(validator, validator.schema, tree)
    if isinstance(complete, dict):
        complete["extends"] = None  # the bases are merged in
    return complete, list(found.values()), wrong


def _broken(node: Node, path: Path = ()) -> Iterator[Path]:
    """The paths of the values about whose text a problem is noted already."""
    if node.broken:
        yield path
    if isinstance(node.value, (dict, tuple)):
        children = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for step, child in children:
            yield from _broken(child, (*path, step))


# --- what is wrong ------------------------------------------------------------------------------------------------


def _problems(tree: Node, error: jsonschema.ValidationError, wrong: set[Path]) -> Iterator[tuple[Path, Problem]]:
    """The problems of one error of jsonschema. Adds to `wrong` the key that an unknown one seems to mean."""
    path: Path = tuple(error.absolute_path)
    node = _at(tree, path)
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        for key in (key for key in error.instance if key not in known):
            place, where = f' in "{dotted(path)}"' if path else "", node.value[key].key.where()
            refusal = error.schema.get("x-refused", {}).get(key)
            if refusal:
                yield (*path, key), Problem("refused-key", f"{_shown(key)} cannot be said{place}", where, refusal)
                continue
            meant, help = _meant_key(key, path, known)
            if meant:
                wrong.add(meant)
            yield (*path, key), Problem("unknown-key", f"unknown key {_shown(key)}{place}", where, help)
    elif error.validator == "required":
        for key in error.validator_value:
            if key not in error.instance and (*path, key) not in wrong:
                place = f'"{dotted(path)}"' if path else "the recipe"
                help = _describe(key, _field(path, key))
                yield (*path, key), Problem("missing-key", f'"{key}" is missing in {place}', node.span.where(), help)
    else:
        kind, message, help = _wrong_value(error)
        name = f'"{dotted(path)}"' if path else "a recipe"
        yield path, Problem(kind, f"{name} {message}", node.span.where(), help)


def _wrong_value(error: jsonschema.ValidationError) -> tuple[str, str, str | None]:
    """(kind, what follows the field's name, help)."""
    limit, value = error.validator_value, error.instance
    shown = _shown(value)
    examples = error.schema.get("examples")
    example = f"for example {_shown(examples[0])}" if examples else None
    match error.validator:
        case "type":
            types = [limit] if isinstance(limit, str) else limit
            help = None
            if "integer" in types and _JSON.TYPE_CHECKER.is_type(value, "integer"):
                return "out-of-range", f"must fit into 64 bits, not {shown}", example
            if isinstance(value, str) and _reads_as(value, types):
                help = f"write {value} without quotes"
            elif value == "auto":  # in strategy.config: a word of transformers' integration, not of DeepSpeed
                help = "leave it out, and the default is taken"
            elif value is None:
                help = _without_null(error.schema)
            return "wrong-type", f"must be {' or '.join(_TYPES[t] for t in types)}, not {shown}", help or example
        case "enum" | "const":
            return "not-allowed-value", *_not_in(value, [limit] if error.validator == "const" else limit, error.schema)
        case "minimum":
            return "out-of-range", f"must be at least {limit}, not {shown}", example
        case "maximum":
            return "out-of-range", f"must be at most {limit}, not {shown}", example
        case "exclusiveMinimum":
            return "out-of-range", f"must be above {limit}, not {shown}", example
        case "exclusiveMaximum":
            return "out-of-range", f"must be below {limit}, not {shown}", example
        case "minLength" | "minItems":
            return "out-of-range", "must not be empty", example
        case "maxLength":
            return "out-of-range", f"must have at most {limit} characters, not {len(value)}", example
        case "uniqueItems":
            return "not-allowed-value", f"says an item twice: {shown}", "keep one of each"
        case "pattern":
            help = 'letters, digits, ".", "_" and "-", the first a letter or digit'
            return "not-allowed-value", f"cannot be {shown}", help
    raise AssertionError(f"the schema uses {error.validator}, which has no words yet")


def _not_in(value: Any, allowed: list[Any], schema: dict[str, Any]) -> tuple[str, str]:
    refusal = schema.get("x-refused", {}).get(value if isinstance(value, str) else json.dumps(value))
    options = ", ".join(_shown(option) for option in allowed)
    if refusal:
        return f"cannot be {_shown(value)}", refusal
    close = _closest(value, [option for option in allowed if isinstance(option, str)])
    help = f'did you mean "{close}"?' if close else value is None and _without_null(schema) or schema.get("description")
    return f"must be one of {options}, not {_shown(value)}", help


def _without_null(schema: dict[str, Any]) -> str | None:
    return f"leave it out for the default, {_shown(schema['default'])}" if "default" in schema else None


def _meant_key(key: str, path: Path, siblings: dict[str, Any]) -> tuple[Path | None, str]:
    """The path of the key that an unknown one seems to mean, and a help that says so."""
    for name, field in siblings.items():
        if key in _annotation(field, "x-aliases", []):
            return (*path, name), f'it is called "{name}" here'
    close = None if any(key == name for _, name, _ in _all_fields()) else _closest(key, list(siblings))
    if close:
        return (*path, close), f'did you mean "{close}"?'
    elsewhere = [
        (place, name) for place, name, field in _all_fields() if key in (name, *_annotation(field, "x-aliases", []))
    ]
    if path in [place for place, _ in elsewhere]:
        if "type" in siblings:
            return None, f'only another "type" of {path[-1]} has it; known here: ' + ", ".join(siblings)
        return None, "it does not go together with " + ", ".join(f'"{name}"' for name in siblings)
    if len(elsewhere) == 1:
        place, name = elsewhere[0]
        return (*place, name), f'write it as "{name}" in "{dotted(place)}"' if place else f'"{name}" belongs at the top'
    return None, "known here: " + ", ".join(name for name in siblings if name != "$schema")


def _closest(word: Any, names: list[str]) -> str | None:
    """The name that `word` seems to mean."""
    by_lower = {name.lower(): name for name in names}
    part = str(word).lower()
    holding = [name for name in by_lower if len(part) > 1 and (name.startswith(part) or name.endswith(f"_{part}"))]
    close = holding or difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else None


def dotted(path: Path) -> str:
    """A path as a person writes it: data.train[0].path."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _reads_as(text: str, types: list[str]) -> bool:
    """Whether `text` is JSON of one of the types."""
    try:
        value = parse(Source("", FilePath()), text).plain()
    except DsftError:
        return False
    return any(_Validator.TYPE_CHECKER.is_type(value, name) for name in types)


def _at(tree: Node, path: Path) -> Node:
    for step in path:
        tree = tree.value[step]
    return tree


# --- walking the schema -------------------------------------------------------------------------------------------


def _resolve(schema: Any) -> Any:
    """`schema`, or what its $ref points at ("#/$defs/name", the only form in use)."""
    if isinstance(schema, dict) and "$ref" in schema:
        return load_schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


@functools.cache
def _all_fields() -> tuple[tuple[Path, str, Any], ...]:
    """(place, key, schema) of every key of every object that a recipe can have; those in a list at the list's place."""
    return tuple(_fields(load_schema(), ()))


def _fields(schema: Any, place: Path) -> Iterator[tuple[Path, str, Any]]:
    schema = _resolve(schema)
    if not isinstance(schema, dict):
        return
    for name, field in schema.get("properties", {}).items():
        yield place, name, field
        yield from _fields(field, (*place, name))
    for part in ("then", "else", "items"):
        yield from _fields(schema.get(part), place)


def _field(place: Path, key: str) -> Any:
    names = tuple(step for step in place if isinstance(step, str))
    return next((field for at, name, field in _all_fields() if at == names and name == key), {})


def default(path: Path) -> Any:
    """The default of the field at `path`; None where it has none."""
    return _annotation(_field(path[:-1], path[-1]), "default", None)


def description(path: Path) -> str:
    """The meaning of the field at `path`."""
    return _annotation(_field(path[:-1], path[-1]), "description", "")


def _describe(key: str, field: Any) -> str | None:
    description, examples = _annotation(field, "description", ""), _annotation(field, "examples", [])
    example = f'for example "{key}": {_shown(examples[0])}' if examples else ""
    return "; ".join(part for part in (description.removesuffix("."), example) if part) or None


def _annotation(field: Any, name: str, otherwise: Any) -> Any:
    field = _resolve(field)
    return field.get(name, otherwise) if isinstance(field, dict) else otherwise


def _applicable(validator: jsonschema.Draft202012Validator, schema: Any, value: Any) -> Iterator[dict[str, Any]]:
    """`schema` and each one beside it that holds for `value`: what $ref names, the branch of an `if` that is taken."""
    if not isinstance(schema, dict):
        return
    yield schema
    if "$ref" in schema:
        yield from _applicable(validator, _resolve(schema), value)
    if "if" in schema:
        branch = "then" if validator.evolve(schema=schema["if"]).is_valid(value) else "else"
        yield from _applicable(validator, schema.get(branch), value)


def _complete(validator: jsonschema.Draft202012Validator, schema: Any, node: Node) -> Any:
    """The plain value of `node` with every default filled in, paths absolute, and numbers of the schema's type."""
    plain = node.plain()
    schemas = list(_applicable(validator, schema, plain))
    if isinstance(node.value, dict):
        known: dict[str, Any] = {}
        for part in schemas:
            for name, field in part.get("properties", {}).items():
                if field is not True:
                    known[name] = field
        result = {}
        for name, field in known.items():
            if name in node.value:
                result[name] = _complete(validator, field, node.value[name])
            elif "default" in field:
                result[name] = _complete(validator, field, Node(field["default"], node.span))
        return result | {name: plain[name] for name in plain if name not in result}
    if isinstance(node.value, tuple):
        items = next((part["items"] for part in schemas if "items" in part), None)
        return [_complete(validator, items, child) for child in node.value]
    for part in schemas:
        if "x-path" in part and isinstance(plain, str):
            return _absolute(plain, node.span.source.folder, part["x-path"])
        # JSON Schema's rule: a number without a fraction is whole, so 8.0 is 8; true is no number at all.
        if isinstance(plain, (int, float)) and not isinstance(plain, bool):
            types = part.get("type", ())
            if "integer" in types and plain == int(plain):
                return int(plain)
            if "number" in types:
                return float(plain)
    return plain


def _absolute(text: str, folder: FilePath, kind: Any) -> str:
    """`text` relative to `folder`. A model that is not there and does not look like a path is a hub id."""
    path = os.path.abspath(os.path.join(folder, os.path.expanduser(text)))
    if kind == "model" and not text.startswith((".", "/", "~")) and not os.path.lexists(path):
        return text
    return path
