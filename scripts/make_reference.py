"""Writes docs/recipe.md, the reference of all fields of a recipe, from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schemas" / "recipe.schema.json"
PAGE = ROOT / "docs" / "recipe.md"

INTRODUCTION = """\
# The recipe

All fields of a recipe. `scripts/make_reference.py` writes this page from [schemas/recipe.schema.json](../schemas/recipe.schema.json):
change a description there, then run it. What the fields do together is in the [README](../README.md), what fits in memory in
[planner.md](planner.md), and each error in [errors.md](errors.md).

**In an editor.** `"$schema"`, a path relative to the recipe, makes VS Code and other editors complete keys and values, show these
descriptions and underline what is wrong. `dsft schema > recipe.schema.json` writes the schema to where a recipe can name it.
`dsft init` writes a first recipe.

**Which value counts.** In this order, the later over the earlier:

1. the default, as below
2. the recipe that `"extends"` names, and before it the one that that one extends
3. the recipe itself
4. `--set KEY=VALUE` on the command line, in any order: a key said twice counts as said last

Objects are merged field by field; lists and single values are replaced as a whole. An object with another `"type"` replaces
the one below it whole: a full fine-tuning keeps nothing of a LoRA's fields. `null` in a field that can be null takes back what is
below. What counts in the end is in the compiled `recipe.json`, with all defaults.

**Paths.** A relative path is relative to the file that says it, so a recipe can be called from anywhere; a path in `--set` is
relative to the working directory. `~` is the home folder. `model.path` is a folder where there is one, or else an id of the Hugging Face hub.

**Values are taken at their word.** A number in quotes is text, not a number: `"1e-4"` is refused where `1e-4` is meant. `true`
is no number, and `1` is not `true`. A whole number may be written `8` or `8.0`, not `8.5`. `null` stands only where a type below
ends in "or null". In `--set`, VALUE is JSON where it can be read as JSON, or else text: `--set name=mine` and `--set
name='"mine"'` say the same.
"""

_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true` or `false`",
    "object": "object",
    "array": "list",
}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


def reference(schema: dict[str, Any]) -> str:
    """The page as Markdown: the introduction, then a section for each object."""
    return "\n".join([INTRODUCTION, *_sections(schema, schema, ())])


def _sections(schema: dict[str, Any], part: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The section of the object `part` at `path`, then those of the objects in it."""
    part = _resolve(schema, part)
    title = f"`{'.'.join(path)}`" if path else "A recipe"
    yield f"{'#' * (1 + max(1, len(path)))} {title}\n\n{_cell(part['description'])}\n"
    complete = schema["$defs"]["complete"]
    required = set((complete["properties"].get(path[-1], {}) if path else complete).get("required", ()))
    objects = []
    for condition, variant in [("", part), *_variants(part)]:
        variant = _resolve(schema, variant)
        fields = {name: field for name, field in variant.get("properties", {}).items() if field is not True}
        if condition:
            yield f"{condition}:\n" if fields else f"{condition}: no other field.\n"
        if fields:
            yield _table(fields, required.union(variant.get("required", ())))
        objects += [(name, field) for name, field in fields.items() if _has_fields(field)]
    for name, field in objects:
        inner = field.get("items", field)
        yield from _sections(schema, inner, (*path, name if inner is field else f"{name}[]"))


def _variants(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(when it holds, schema) of each branch of a chain of if, then, else."""
    if "if" not in part:
        return
    wanted = part["if"].get("properties", {}).get("type")
    if wanted:
        values = wanted.get("enum") or [wanted["const"]]
        yield "With " + _either([f'`"type": {json.dumps(value)}`' for value in values]), part["then"]
        yield from _variants(part.get("else", {}))
    else:
        yield f'With `"{part["if"]["required"][0]}"`', part["then"]
        yield "Without it", part["else"]


def _table(fields: dict[str, Any], required: set[str]) -> str:
    lines = ["| field | type | default | meaning | example |", "| --- | --- | --- | --- | --- |"]
    for name, field in fields.items():
        default = _code(field["default"]) if "default" in field else "required" if name in required else ""
        example = _code(field["examples"][0]) if "examples" in field else ""
        lines.append(f"| `{name}` | {_type(field)} | {default} | {_cell(field['description'])} | {example} |")
    return "\n".join(lines) + "\n"


def _type(field: dict[str, Any]) -> str:
    """What a field takes, in words."""
    values = field.get("enum") or field.get("then", {}).get("enum") or []
    types = field.get("type", [])
    types = [types] if isinstance(types, str) else types
    words = [_code(value) for value in values if value is not None]
    words += [_WORDS[name] for name in types if name != "null" and not (values and name in ("string", "integer"))]
    if "x-path" in field:
        words[words.index("text")] = "path or hub id" if field["x-path"] == "model" else "path"
    limits = [text.format(json.dumps(field[key])) for key, text in _LIMITS.items() if key in field]
    null = ["null"] if "null" in types or None in values else []
    if limits:
        return ", ".join([_either(words), *limits]) + (", or null" if null else "")
    return _either(words + null)


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _has_fields(field: dict[str, Any]) -> bool:
    return "properties" in field or "$ref" in field.get("items", {})


def _resolve(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][part["$ref"].removeprefix("#/$defs/")] if "$ref" in part else part


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """Text as it stands in a table; <name> is no HTML."""
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    PAGE.write_text(reference(json.loads(SCHEMA.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PAGE)
