"""The Recipe: every value of a job as its author said it or the schema fills it in, and where each was said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from dsft.errors import Problem, Where
from dsft.recipe.text import Node, Source

Path = tuple[str | int, ...]  # of a value in a recipe: ("data", "train", 0, "path")


class Unusable(Exception):
    """A value was asked for that is already reported as wrong. What needs it says nothing of its own."""


@dataclass(frozen=True)
class Recipe:
    """A recipe after `extends`, `--set` and the schema's defaults; paths absolute.

    `problems` is what the schema and the rules found. A recipe with problems can still be asked: values that are
    right can be checked further, so that one run reports everything. `dsft.plan.make_plan` raises them all.
    """

    values: Mapping[str, Any]
    tree: Node
    problems: tuple[Problem, ...]
    wrong: frozenset[Path]  # values, said or missing, that a problem is about

    def get(self, *path: str | int) -> Any:
        """The value at `path`; None where another `type` has no such field. Raises Unusable where it is wrong."""
        if any(path[:end] in self.wrong for end in range(len(path) + 1)):
            raise Unusable
        value: Any = self.values
        for step in path:
            if value is None or isinstance(value, Mapping) and step not in value:
                return None
            value = value[step]
        return value

    def sound(self, *path: str | int) -> bool:
        """Whether nothing is wrong with the value at `path` or any within it."""
        return not any(wrong[: len(path)] == path[: len(wrong)] for wrong in self.wrong)

    def said(self, *path: str | int) -> bool:
        """Whether the recipe itself says a value there, rather than a default of the schema."""
        node: Any = self.tree
        for step in path:
            if not isinstance(node.value, dict) or step not in node.value:
                return False
            node = node.value[step]
        return True

    def where(self, *path: str | int) -> Where:
        """The place of the value at `path`, or of the nearest object around it where nobody said it."""
        return self._nearest(path).span.where()

    def folder(self, *path: str | int) -> FilePath:
        """What a relative path at `path` is relative to."""
        return self._nearest(path).span.source.folder

    def where_key(self, *path: str | int) -> Where:
        """The place of the key at `path`, or of the nearest thing around it that was said."""
        node = self._nearest(path)
        return (node.key or node.span).where()

    def _nearest(self, path: Path) -> Node:
        node = self.tree
        for step in path:
            children = node.value if isinstance(node.value, (dict, tuple)) else ()
            if step not in (children if isinstance(children, dict) else range(len(children))):
                break
            node = children[step]
        return node

    def in_order(self, problems: list[Problem]) -> tuple[Problem, ...]:
        """The problems without repetition, by file (a recipe before the one it extends, arguments last), then by line."""
        read = sorted(dict.fromkeys(_sources(self.tree)), key=lambda source: (source.text is None, source.depth))
        rank = {source.name: at for at, source in enumerate(read)}

        def place(problem: Problem) -> tuple[int, str, int, int]:
            where = problem.where or Where("")
            other = "" if where.source in rank else where.source
            return rank.get(where.source, len(rank)), other, where.line or 0, where.column or 0

        return tuple(sorted(dict.fromkeys(problems), key=place))

    def to_json(self, output_dir: str) -> str:
        """The complete recipe as text: what `dsft compile` writes as recipe.json. `output_dir` is the plan's: the
        text means the same in any working directory."""
        values = {**self.values, "checkpoint": {**self.values["checkpoint"], "output_dir": output_dir}}
        values.pop("$schema", None)  # whose place is relative to the recipe's own folder
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _sources(node: Node) -> Iterator[Source]:
    """What `node` was read from, in the order of the tree."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        yield node.span.source
        if isinstance(node.value, dict):
            nodes.extend(reversed(node.value.values()))
