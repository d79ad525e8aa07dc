"""Data files, row by row: a JSON array or JSON Lines, each row with the line it starts at.

The planner counts and hashes with `scan`; training reads with `read_rows`. Both take a file for what its first
character says it is, whatever its name: "[" starts an array. Lines end at a line feed (a carriage return before it is
dropped) and nowhere else, blank lines are no rows, and a byte order mark at the start is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.errors import DsftError, Problem, Where, failed
from dsft.plan.formats import RowError, formats_of, to_messages

BOM = b"\xef\xbb\xbf"
SPACE = " \t\r\n"
SHOWN = 5  # so many bad rows of a file are reported one by one


@dataclass(frozen=True)
class Row:
    line: int  # where it starts in its file, from 1
    value: Any


def scan(path: str | Path, format: str) -> tuple[int, str]:
    """Number of rows and sha256 of a data file, every row looked at.

    Raises DsftError for a file that cannot be read, is empty, or is not UTF-8 or JSON; and with the rows that are not
    of `format`, each with its line.
    """
    content, sha256 = _read(path)
    rows, bad = 0, 0
    problems: list[Problem] = []
    for row in _rows(path, content, problems):
        rows += 1
        try:
            to_messages(format, row.value)
        except RowError as error:
            bad += 1
            problems.append(Problem("bad-row", str(error), Where(str(path), row.line)))
    if bad and len(problems) == bad == rows:
        raise DsftError(_other_format(path, content, format, problems[0]))
    if problems:
        raise DsftError(shorten(problems) if rows else problems[0])
    if not rows:
        raise failed("empty-data", "there are no rows", where=Where(str(path)))
    return rows, sha256


def _other_format(path: str | Path, content: bytes, format: str, first: Problem) -> Problem:
    """What to say of a file of which no row is of `format`: once, and which format it is."""
    row = next(_rows(path, content)).value
    fitting = formats_of(row)
    help = f'its rows are in format "{fitting[0]}"' if fitting else None
    return Problem("wrong-format", f'no row is in format "{format}": {first.message}', Where(str(path)), help)


def shorten(problems: list[Problem]) -> list[Problem]:
    """The first `SHOWN` problems of rows, and how many more there are."""
    rest = problems[SHOWN:]
    return problems[:SHOWN] + [Problem("bad-row", f"{len(rest)} more rows cannot be used", p.where) for p in rest[:1]]


def read_rows(path: str | Path, sha256: str | None = None) -> Iterator[Row]:
    """The rows of a data file. Raises DsftError for what is not JSON, or for a file that differs from `sha256`."""
    content, found = _read(path)
    if sha256 not in (None, found):
        raise failed(
            "data-changed",
            f"{path} was changed after the recipe was compiled",
            where=Where(str(path)),
            help="compile the recipe again",
        )
    yield from _rows(path, content)


def _rows(path: str | Path, content: bytes, unread: list[Problem] | None = None) -> Iterator[Row]:
    """`unread` takes what is wrong with lines that cannot be read; without it the first such line is raised."""
    return _array_rows(path, content) if _is_array(content) else _line_rows(path, content, unread)


def _read(path: str | Path) -> tuple[bytes, str]:
    """The file without its byte order mark, and the sha256 of the whole file."""
    where = Where(str(path))
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # a pipe may wait for ever
            raise failed("data-unreadable", "a pipe, a device or a socket", where=where, help="write it to a file")
        content = Path(path).read_bytes()
    except OSError as error:
        raise failed("data-unreadable", f"cannot be read: {error.strerror}", where=where) from error
    return content.removeprefix(BOM), hashlib.sha256(content).hexdigest()


def _is_array(content: bytes) -> bool:
    return content[:4096].lstrip().startswith(b"[")


def _line_rows(path: str | Path, content: bytes, unread: list[Problem] | None) -> Iterator[Row]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = _value(path, number, line)
        except DsftError as error:
            if unread is None:
                raise
            unread += error.problems
        else:
            yield Row(number, value)


def _value(path: str | Path, number: int, line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _bad(path, number, "not-utf-8", f"byte {error.start + 1} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _bad(path, number, "data-syntax", f"not JSON: {error.msg}", error.colno) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise _bad(path, number, "data-syntax", f"not JSON that can be read: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError where a key is said twice: of the two values one would be lost."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise ValueError(f'"{twice}" is said twice in an object')
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _array_rows(path: str | Path, content: bytes) -> Iterator[Row]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _bad(path, line, "not-utf-8", "the file is not UTF-8") from error
    line, counted = 1, 0

    def skip(at: int) -> int:
        while at < len(text) and text[at] in SPACE:
            at += 1
        return at

    def line_at(at: int) -> int:
        nonlocal line, counted
        line, counted = line + text.count("\n", counted, at), at
        return line

    at = skip(skip(0) + 1)  # behind the "["
    while text[at : at + 1] != "]":
        start = line_at(at)
        try:
            value, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _bad(path, line_at(error.pos), "data-syntax", f"not JSON: {error.msg}", error.colno) from error
        except (ValueError, RecursionError) as error:  # as above
            raise _bad(path, start, "data-syntax", f"not JSON that can be read: {error}") from error
        yield Row(start, value)
        at = skip(at)
        if text[at : at + 1] == ",":
            at = skip(at + 1)
            if text[at : at + 1] == "]":
                raise _bad(path, line_at(at), "data-syntax", "not JSON: a comma before the closing bracket")
        elif text[at : at + 1] != "]":
            raise _bad(path, line_at(at), "data-syntax", "not JSON: a comma or the closing bracket is missing")
    if skip(at + 1) != len(text):
        raise _bad(path, line_at(skip(at + 1)), "data-syntax", "not JSON: something follows the closing bracket")


def _bad(path: str | Path, line: int, kind: str, message: str, column: int | None = None) -> DsftError:
    return failed(kind, message, where=Where(str(path), line, column))
