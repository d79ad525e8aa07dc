"""JSON text to a tree that knows the place of every key and value.

The grammar is RFC 8259 to the letter, with a byte order mark at the start skipped. Beyond it, what no recipe can mean
is refused here once, so that nothing behind this module has to think of it: keys said twice, numbers beyond 64 bits,
characters that are no text (NUL, half of a surrogate pair), and nesting beyond `MAX_DEPTH`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dsft.errors import DsftError, Problem, Where

MAX_DEPTH = 64
MAX_EXCERPT = 400  # characters; a longer source line (a minified file) is not shown

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_BODY = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[^\s\[\]{},:\"']+")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Source:
    """What was read: a file's text, or a command line argument. A relative path in it is relative to `folder`."""

    name: str
    folder: Path
    text: str | None = None  # None: an argument, which has no lines


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of a source."""

    source: Source
    start: int = 0
    end: int = 0

    def where(self) -> Where:
        text = self.source.text
        if text is None:
            return Where(self.source.name)
        line_start = text.rfind("\n", 0, self.start) + 1
        line_end = text.find("\n", self.start)
        line = text[line_start : len(text) if line_end < 0 else line_end].rstrip("\r")
        length = max(1, min(self.end, line_start + len(line)) - self.start)
        return Where(
            self.source.name,
            text.count("\n", 0, self.start) + 1,
            self.start - line_start + 1,
            line if len(line) <= MAX_EXCERPT else None,
            length,
        )


@dataclass(frozen=True)
class Node:
    """A JSON value: a scalar, a tuple of nodes (array) or a dict of nodes (object)."""

    value: Any
    span: Span
    key: Span | None = None  # where the key stands that names it, in an object

    def plain(self) -> Any:
        """The value as `json.loads` would give it."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, tuple):
            return [child.plain() for child in self.value]
        return self.value


def parse(source: Source, text: str | None = None) -> Node:
    """The tree of `source.text`, or of `text` where the source is an argument.

    Raises DsftError at the first thing that is not JSON: what follows it cannot be told apart from its consequences.
    """
    parser = _Parser(source, source.text if text is None else text)
    return parser.document()


class _Parser:
    def __init__(self, source: Source, text: str):
        self.source = source
        self.text = text
        self.at = 0

    def document(self) -> Node:
        self.space()
        if self.at == len(self.text):
            self.fail("the file is empty", help="a recipe is one JSON object: { … }")
        node = self.value(depth=0)
        self.space()
        if self.at < len(self.text):
            self.unexpected("the end of the file")
        return node

    def value(self, depth: int) -> Node:
        """The value that starts here, after white space."""
        start, char = self.at, self.peek()
        if depth > MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH} levels")
        if char == "{":
            value: Any = self.object(depth)
        elif char == "[":
            value = self.array(depth)
        elif char == '"':
            value = self.string()
        elif char and (char in "-+." or "0" <= char <= "9"):
            value = self.number()
        else:
            word = _WORD.match(self.text, self.at)
            if not word or word[0] not in _CONSTANTS:
                self.unexpected("a value")
            self.at = word.end()
            value = _CONSTANTS[word[0]]
        return Node(value, Span(self.source, start, self.at))

    def object(self, depth: int) -> dict[str, Node]:
        opened, members = self.at, {}
        self.at += 1
        self.space()
        while self.peek() != "}":
            name, key = self.key(opened)
            if name in members:
                first = members[name].key.where()
                self.fail(
                    f'"{name}" is said twice in the same object',
                    key.start,
                    key.end,
                    kind="duplicate-key",
                    help=f"it is already said at line {first.line}; keep one of them" if first.line else None,
                )
            self.space()
            if self.peek() != ":":
                self.unexpected(f'a ":" after the key "{name}"')
            self.at += 1
            self.space()
            node = self.value(depth + 1)
            members[name] = Node(node.value, node.span, key)
            self.separator("}", opened)
        self.at += 1
        return members

    def array(self, depth: int) -> tuple[Node, ...]:
        opened, items = self.at, []
        self.at += 1
        self.space()
        while self.peek() != "]":
            items.append(self.value(depth + 1))
            self.separator("]", opened)
        self.at += 1
        return tuple(items)

    def key(self, opened: int) -> tuple[str, Span]:
        start = self.at
        if self.peek() != '"':
            if not self.peek():
                self.unclosed(opened)
            self.unexpected('a key in double quotes or "}"')
        return self.string(), Span(self.source, start, self.at)

    def separator(self, close: str, opened: int) -> None:
        """A comma with a further member behind it, or the closing bracket, which is left in place."""
        after_value = self.at
        self.space()
        char = self.peek()
        if char == close:
            return
        if char == ",":
            comma = self.at
            self.at += 1
            self.space()
            if self.peek() == close:
                self.fail(f'a comma before "{close}"', comma, help="JSON takes no trailing comma; remove it")
            if self.peek() == ",":
                self.fail("two commas with nothing between them", help="remove one")
            if not self.peek():
                self.unclosed(opened)
            return
        if not char:
            self.unclosed(opened)
        if char in "]}":
            where = Span(self.source, opened, opened + 1).where()
            self.fail(
                f'"{char}" where "{close}" is missing: "{self.text[opened]}" of line {where.line or 1}, '
                f"column {where.column or opened + 1} is still open"
            )
        if char == ":" and close == "]":
            where = Span(self.source, opened, opened + 1).where()
            self.fail(
                'a key and ":" in a list',
                help=f'"[" of line {where.line or 1}, column {where.column or opened + 1} '
                'is still open; write "]" before the key',
            )
        if char in "\"{['-tfn" or "0" <= char <= "9":
            self.fail("a comma is missing", after_value, after_value + 1, help=f'write "," here, or "{close}"')
        self.unexpected(f'"," or "{close}"')

    def string(self) -> str:
        start = self.at
        body = _STRING_BODY.match(self.text, start)
        end = body.end()
        char = self.text[end : end + 1]
        if char != '"':
            if char == "\\":
                self.fail(
                    f"unknown escape {self.text[end : end + 2]!s} in a string",
                    end,
                    end + 2,
                    help=r'a backslash itself is written "\\"; in a path "/" does as well',
                )
            if char in ("", "\n", "\r"):
                self.fail("a string that is not closed in its line", start, end, help='write the missing "')
            name = {"\t": "tab"}.get(char, "control character")
            self.fail(f"a bare {name} in a string", end, help=f"write \\t or \\u{ord(char):04x}")
        self.at = end + 1
        text = json.loads(self.text[start : self.at])
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
            self.fail("a string with NUL or half of a surrogate pair, which is no text", start, self.at)
        return text

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.at)
        word = _WORD.match(self.text, self.at)
        if not match or match.end() != word.end():
            self.unexpected("a value")
        start, self.at = self.at, match.end()
        fraction, exponent = match.groups()
        value = float(match[0]) if fraction or exponent or len(match[0]) > 20 else int(match[0])
        whole = not (fraction or exponent)
        if abs(value) == float("inf") or (whole and not -(2**63) <= value < 2**63):
            self.fail("a number too large for 64 bits", start, self.at)
        return value

    def peek(self) -> str:
        """The character here; "" at the end."""
        return self.text[self.at : self.at + 1]

    def space(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()

    def unclosed(self, opened: int) -> NoReturn:
        self.fail(
            f'"{self.text[opened]}" is never closed',
            opened,
            opened + 1,
            help=f'write the missing "{"}" if self.text[opened] == "{" else "]"}"',
        )

    def unexpected(self, wanted: str) -> NoReturn:
        """Says what stands here in place of `wanted`, by the mistakes that people make."""
        char, rest = self.peek(), self.text[self.at :]
        word = _WORD.match(self.text, self.at)
        word = word[0] if word else char
        if not char:
            self.fail(f"the text ends where {wanted} must follow")
        if char == "'":
            self.fail("a string in single quotes", help='JSON strings take double quotes: "…"')
        if rest.startswith(("//", "/*", "#")):
            line = rest.split("\n", 1)[0].rstrip("\r")
            self.fail("a comment", self.at, self.at + len(line), help="JSON has no comments; remove it")
        if char == ",":
            self.fail(f'"," where {wanted} must stand')
        end = self.at + len(word)
        if word.lstrip("+-") in ("NaN", "nan", "Infinity", "inf", "Inf"):
            self.fail(f"{word} is not a JSON number", self.at, end, help="write a number, or null")
        if word.lower() in ("true", "false", "none", "null"):
            right = {"none": "null"}.get(word.lower(), word.lower())
            self.fail(f"{word} is not JSON", self.at, end, help=f"write {right}")
        if char in "+-." or "0" <= char <= "9":
            self.fail(
                f"{_short(word)} is not a JSON number",
                self.at,
                end,
                help="digits, a point and an exponent, as in 8, 0.1 or 2e-4; no +, no leading zero, no bare point",
            )
        if char in "}]" or char in '[{:="':
            self.fail(f'"{char}" where {wanted} must stand')
        self.fail(f"{_short(word)} where {wanted} must stand", self.at, end, help="strings and keys take double quotes")

    def fail(
        self,
        message: str,
        start: int | None = None,
        end: int | None = None,
        *,
        kind: str = "syntax",
        help: str | None = None,
    ) -> NoReturn:
        start = self.at if start is None else start
        raise DsftError(
            Problem(kind, message, Span(self.source, start, start + 1 if end is None else end).where(), help)
        )


def _short(word: str) -> str:
    return json.dumps(word if len(word) <= 40 else word[:40] + "…", ensure_ascii=False)
