"""JSON text to a tree that knows the place of every key and value.

The grammar is RFC 8259 to the letter, with a byte order mark at the start skipped. Beyond it, what no recipe can mean
is refused here once, so that nothing behind this module has to think of it: keys said twice, numbers beyond 64 bits,
characters that are no text (NUL, half of a surrogate pair), and nesting beyond `MAX_DEPTH`.

A mistake that leaves no doubt of what follows (a comment, a comma too many, NaN) is noted and reading goes on. At any
other (a bracket or a quotation mark that is missing) it ends: what follows cannot be told apart from its consequences.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dsft.errors import DsftError, Problem, Where

MAX_DEPTH = 64
MAX_PROBLEMS = 1000  # of one text; what has more is no recipe

_SPACE = re.compile(r"[ \t\n\r]*")
_COMMENT = re.compile(r"//[^\r\n]*|#[^\r\n]*|/\*.*?\*/", re.DOTALL)
_STRING_BODY = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_LENIENT_STRING = re.compile(r'"(?:[^"\\\r\n]++|\\[^\r\n])*+"')
_SINGLE_QUOTED = re.compile(r"'([^'\\\x00-\x1f]*)'")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"""(?:(?!//|/\*)[^\s\[\]{},:"'#])+""")
_UNQUOTED_KEY = re.compile(r"([A-Za-z_$][A-Za-z0-9_$.-]*)[ \t]*:")
_CONSTANTS = {"true": True, "false": False, "null": None}
_STARTS_VALUE = frozenset("\"{['-tfn0123456789")


@dataclass(frozen=True)
class Source:
    """What was read: a file's text, or a command line argument. A relative path in it is relative to `folder`."""

    name: str
    folder: Path
    text: str | None = None  # None: an argument, which has no lines
    depth: int = 0  # of a recipe that others extend: how many

    @functools.cached_property
    def line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text or ""))]


class Span(NamedTuple):
    """Characters `start` to `end` of a source."""

    source: Source
    start: int = 0
    end: int = 0

    def where(self) -> Where:
        text, starts = self.source.text, self.source.line_starts
        if text is None:
            return Where(self.source.name)
        line = bisect.bisect_right(starts, self.start)
        line_start = starts[line - 1]
        line_end = starts[line] - 1 if line < len(starts) else len(text)
        if line_end > line_start and text[line_end - 1] == "\r":
            line_end -= 1
        length = max(1, min(self.end, line_end) - self.start)
        column = self.start - line_start + 1
        return Where.in_line(self.source.name, line, column, text[line_start:line_end], length)


class Node(NamedTuple):
    """A JSON value: a scalar, a tuple of nodes (array) or a dict of nodes (object)."""

    value: Any
    span: Span
    key: Span | None = None  # where the key stands that names it, in an object
    broken: bool = False  # a problem is noted about its text: the value says nothing

    def plain(self) -> Any:
        """The value as `json.loads` would give it."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, tuple):
            return [child.plain() for child in self.value]
        return self.value


def parse(source: Source, text: str | None = None) -> Node:
    """The tree of `source.text`, or of `text` where the source is an argument. Raises DsftError for what is not JSON."""
    node, problems = parse_all(source, text)
    if problems:
        raise DsftError(problems)
    return node


def parse_all(source: Source, text: str | None = None) -> tuple[Node, list[Problem]]:
    """The tree, and the problems that did not keep it from being read. Raises DsftError with those up to the first
    that did."""
    parser = _Parser(source, source.text if text is None else text)
    return parser.document(), parser.problems


class _Parser:
    def __init__(self, source: Source, text: str):
        self.source = source
        self.text = text
        self.at = 0
        self.problems: list[Problem] = []

    def document(self) -> Node:
        self.space()
        if self.at == len(self.text):
            self.stop("the file is empty", help="a recipe is one JSON object: { … }")
        node = self.value(depth=0)
        self.space()
        if self.at < len(self.text):
            self.unexpected("the end of the file")
        return node

    def value(self, depth: int) -> Node:
        """The value that starts here, after white space."""
        start, char = self.at, self.peek()
        if depth > MAX_DEPTH:
            self.stop(f"nested deeper than {MAX_DEPTH} levels")
        noted = len(self.problems)
        if char == "{":
            return Node(self.object(depth), Span(self.source, start, self.at))
        if char == "[":
            return Node(self.array(depth), Span(self.source, start, self.at))
        if char == '"':
            value: Any = self.string()
        elif char == "'":
            return Node(self.single_quoted("a value"), Span(self.source, start, self.at))
        elif char and (char in "-+." or "0" <= char <= "9"):
            value = self.number()
        else:
            value = self.word()
        return Node(value, Span(self.source, start, self.at), None, len(self.problems) > noted)

    def object(self, depth: int) -> dict[str, Node]:
        opened, members = self.at, {}
        self.at += 1
        self.space()
        while self.peek() != "}":
            noted = len(self.problems)
            name, key = self.key(opened)
            readable = len(self.problems) == noted or self.text[key.start] != '"'
            self.colon(name)
            node = self.value(depth + 1)
            if name in members:
                first = members[name].key.where()
                self.note(
                    f'"{_cut(name)}" is said twice in the same object',
                    key.start,
                    key.end,
                    kind="duplicate-key",
                    help=f"it is already said at line {first.line}, column {first.column}; keep one of them"
                    if first.line
                    else None,
                )
                members[name] = members[name]._replace(broken=True)
            elif readable:
                members[name] = Node(node.value, node.span, key, node.broken)
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
        start, char = self.at, self.peek()
        wanted = 'a key in double quotes or "}"'
        if char == '"':
            name = self.string()
        elif char == "'":
            name = self.single_quoted(wanted)
        elif bare := _UNQUOTED_KEY.match(self.text, start):
            name, self.at = bare[1], bare.end(1)
            self.note("a key without quotes", start, self.at, help=f'write "{_cut(name)}"')
        elif char:
            self.unexpected(wanted)
        else:
            self.unclosed(opened)
        return name, Span(self.source, start, self.at)

    def colon(self, name: str) -> None:
        after_key = self.at
        self.space()
        char = self.peek()
        if char == ":":
            self.at += 1
            self.space()
            return
        wanted = f'a ":" after the key "{_cut(name)}"'
        if char == "=":
            self.note(f'"=" where {wanted} must stand', help='write ":"')
            self.at += 1
            self.space()
        elif char in _STARTS_VALUE:
            self.note("a colon is missing", after_key, after_key + 1, help='write ":" here')
        else:
            self.unexpected(wanted)

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
            while self.peek() == ",":
                self.note("two commas with nothing between them", help="remove one")
                self.at += 1
                self.space()
            if self.peek() == close:
                self.note(f'a comma before "{close}"', comma, help="JSON takes no trailing comma; remove it")
            if not self.peek():
                self.unclosed(opened)
            return
        if not char:
            self.unclosed(opened)
        if char in "]}":
            where = Span(self.source, opened, opened + 1).where()
            self.stop(
                f'"{char}" where "{close}" is missing: "{self.text[opened]}" of line {where.line or 1}, '
                f"column {where.column or opened + 1} is still open"
            )
        if char == ":" and close == "]":
            where = Span(self.source, opened, opened + 1).where()
            self.stop(
                'a key and ":" in a list',
                help=f'"[" of line {where.line or 1}, column {where.column or opened + 1} '
                'is still open; write "]" before the key',
            )
        if char in _STARTS_VALUE:
            self.note("a comma is missing", after_value, after_value + 1, help=f'write "," here, or "{close}"')
            if char in "\"'" or close == "]":
                return
            raise DsftError(self.problems)  # no key: the members cannot be told apart
        self.unexpected(f'"," or "{close}"')

    def string(self) -> str:
        """The string that starts here. One with a mistake inside its quotes is noted, and means nothing."""
        start = self.at
        body = _STRING_BODY.match(self.text, start)
        end = body.end()
        char = self.text[end : end + 1]
        if char != '"':
            if char == "\\":
                self.note(
                    f"unknown escape {self.text[end : end + 2]!s} in a string",
                    end,
                    end + 2,
                    help=r'a backslash itself is written "\\"; in a path "/" does as well',
                )
            elif char in ("", "\n", "\r"):
                self.stop("a string that is not closed in its line", start, end, help='write the missing "')
            else:
                name = {"\t": "tab"}.get(char, "control character")
                self.note(f"a bare {name} in a string", end, help=f"write \\t or \\u{ord(char):04x}")
            whole = _LENIENT_STRING.match(self.text, start)
            if not whole:
                raise DsftError(self.problems)
            self.at = whole.end()
            return ""
        self.at = end + 1
        if "\\" not in body[0]:
            return self.text[start + 1 : end]
        text = json.loads(self.text[start : self.at])
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
            self.note("a string with NUL or half of a surrogate pair, which is no text", start, self.at)
            return ""
        return text

    def single_quoted(self, wanted: str) -> str:
        whole = _SINGLE_QUOTED.match(self.text, self.at)
        if not whole:
            self.unexpected(wanted)
        self.note("a string in single quotes", self.at, whole.end(), help='JSON strings take double quotes: "…"')
        self.at = whole.end()
        return whole[1]

    def number(self) -> int | float | None:
        match = _NUMBER.match(self.text, self.at)
        word = _WORD.match(self.text, self.at)
        if not match or match.end() != word.end():
            return self.word()
        start, self.at = self.at, match.end()
        fraction, exponent = match.groups()
        value = float(match[0]) if fraction or exponent or len(match[0]) > 20 else int(match[0])
        whole = not (fraction or exponent)
        if abs(value) == float("inf") or (whole and not -(2**63) <= value < 2**63):
            self.note("a number too large for 64 bits", start, self.at)
            return None
        return value

    def word(self) -> bool | None:
        """true, false or null, however they are spelt; any other word is noted, and means nothing."""
        match = _WORD.match(self.text, self.at)
        if not match:
            self.unexpected("a value")
        word = match[0]
        if word not in _CONSTANTS:
            self.note(*_not_a_value(word, self.at))
        self.at = match.end()
        return _CONSTANTS.get(word)

    def peek(self) -> str:
        """The character here; "" at the end."""
        return self.text[self.at : self.at + 1]

    def space(self) -> None:
        """Behind white space, and comments, which are noted."""
        self.at = _SPACE.match(self.text, self.at).end()
        while self.text[self.at : self.at + 1] in ("/", "#"):
            comment = _COMMENT.match(self.text, self.at)
            if not comment:
                return
            self.note("a comment", self.at, comment.end(), help="JSON has no comments; remove it")
            self.at = _SPACE.match(self.text, comment.end()).end()

    def unclosed(self, opened: int) -> NoReturn:
        self.stop(
            f'"{self.text[opened]}" is never closed',
            opened,
            opened + 1,
            help=f'write the missing "{"}" if self.text[opened] == "{" else "]"}"',
        )

    def unexpected(self, wanted: str) -> NoReturn:
        """Says what stands here in place of `wanted`."""
        char = self.peek()
        if not char:
            self.stop(f"the text ends where {wanted} must follow")
        if char == "'":
            self.stop("a string in single quotes", help='JSON strings take double quotes: "…"')
        if self.text.startswith("/*", self.at):
            self.stop("a comment that is never closed", self.at, self.at + 2, help="JSON has no comments; remove it")
        if not char.isprintable():
            help = "it cannot be seen; remove it, or write a plain space"
            self.stop(f"the character U+{ord(char):04X} where {wanted} must stand", help=help)
        word = _WORD.match(self.text, self.at)
        if not word or char == "=":
            self.stop(f'"{char}" where {wanted} must stand')
        message, start, end, help = _not_a_value(word[0], self.at, wanted)
        self.stop(message, start, end, help=help)

    def note(
        self,
        message: str,
        start: int | None = None,
        end: int | None = None,
        help: str | None = None,
        *,
        kind: str = "syntax",
    ) -> None:
        start = self.at if start is None else start
        where = Span(self.source, start, start + 1 if end is None else end).where()
        self.problems.append(Problem(kind, message, where, help))
        if len(self.problems) == MAX_PROBLEMS:
            raise DsftError([*self.problems, Problem("syntax", f"{MAX_PROBLEMS} mistakes: not read further", where)])

    def stop(self, message: str, start: int | None = None, end: int | None = None, help: str | None = None) -> NoReturn:
        self.note(message, start, end, help)
        raise DsftError(self.problems)


def _not_a_value(word: str, at: int, wanted: str = "a value") -> tuple[str, int, int, str]:
    """(message, start, end, help) of a word that is no JSON value, by the mistakes that people make."""
    end = at + len(word)
    if word.lstrip("+-") in ("NaN", "nan", "Infinity", "inf", "Inf"):
        return f"{word} is not a JSON number", at, end, "write a number, or null"
    if word.lower() in ("true", "false", "none", "null") and word not in _CONSTANTS:
        return f"{word} is not JSON", at, end, f"write {word.lower().replace('none', 'null')}"
    if word[0] in "+-." or "0" <= word[0] <= "9":
        help = "digits, a point and an exponent, as in 8, 0.1 or 2e-4; no +, no leading zero, no bare point"
        return f"{_short(word)} is not a JSON number", at, end, help
    if word[0] in "“”„«»‘’`":
        return f"{word[0]} where {wanted} must stand", at, end, 'the quotation marks of JSON are plain: "…"'
    return f"{_short(word)} where {wanted} must stand", at, end, "strings and keys take double quotes"


def _short(word: str) -> str:
    return json.dumps(_cut(word), ensure_ascii=False)


def _cut(word: str) -> str:
    return word if len(word) <= 40 else word[:40] + "…"
