"""The one error type of dsft, and its exit codes.

Every stage raises `DsftError` with one or more `Problem`s; `dsft.cli` and `dsft.train` are the only places that print
one and end the process. Anything else that reaches them is a fault of dsft itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXIT_FAILED = 1  # a run that started and failed
EXIT_USAGE = 2  # a wrong command line, a wrong recipe, or a plan that does not match the launched world
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells count it: 128 + SIGINT

MAX_EXCERPT = 160  # characters of a source line that are shown


@dataclass(frozen=True)
class Where:
    """A place a person can open: a file (or the argument that said it) and, where known, a position in it.

    `line` and `column` count from 1; `length` is the number of characters to underline. `text` is the source line, or
    the part of a long one that begins at column `text_start`. A place without a line is a whole file, a command line
    argument, or a JSON path.
    """

    source: str
    line: int | None = None
    column: int | None = None
    text: str | None = None
    length: int = 1
    text_start: int = 1

    @classmethod
    def in_line(cls, source: str, line: int, column: int, text: str, length: int) -> Where:
        """A place in the source line `text`. A long one (a minified file) is cut around the place."""
        if len(text) <= MAX_EXCERPT:
            return cls(source, line, column, text, length)
        start = max(0, min(column - 1 - MAX_EXCERPT // 4, len(text) - MAX_EXCERPT))
        part = text[start : start + MAX_EXCERPT]
        # Each "…" takes the place of one character, so that columns stay.
        if start + MAX_EXCERPT < len(text):
            part = part[:-1] + "…"
        return cls(source, line, column, "…" + part[1:] if start else part, length, start + 1)

    @property
    def is_argument(self) -> bool:
        """Whether this is a command line argument ("--set a=1") and no file."""
        return self.source.startswith("--")

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what kind, what, where, and what to write instead.

    `kind` is a stable kebab-case name such as "unknown-key"; it names a page of documentation and never changes with
    the wording of the message.
    """

    kind: str
    message: str
    where: Where | None = None
    help: str | None = None
    severity: str = "error"  # or "warning"

    def render(self) -> str:
        """The problem as a compiler would print it: place, kind, message, source line with carets, help."""
        place = f"{self.where}: " if self.where else ""
        lines = [f"{place}{self.severity}[{self.kind}]: {_visible(self.message)}"]
        margin = "  "
        if self.where and self.where.text is not None and self.where.column is not None:
            number, text = str(self.where.line), self.where.text
            margin = " " * (len(number) + 3)
            start = self.where.column - self.where.text_start
            under = text[start : start + self.where.length]
            # Tabs are kept in the caret line so that it lines up at any tab width.
            before = "".join(c if c == "\t" else " " * _width(c) for c in text[:start])
            lines.append(f"  {number} | {_visible(text)}")
            lines.append(f"{margin}| {before}{'^' * max(1, sum(map(_width, under)))}")
        if self.help:
            lines.append(f"{margin}help: {_visible(self.help)}")
        return "\n".join(lines)


def _visible(text: str) -> str:
    """`text` with each character that would move or hide others (escapes, direction marks) as U+FFFD."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def _width(char: str) -> int:
    """The columns that a terminal gives a character: two for most of East Asia's, none for a combining one."""
    if char.isascii():
        return 1
    import unicodedata  # seldom needed, and slow to load

    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class DsftError(Exception):
    """One or more problems that end a command. `exit_code` is what the process returns."""

    def __init__(self, problems: Problem | Iterable[Problem], exit_code: int = EXIT_USAGE):
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.exit_code = exit_code
        super().__init__("\n".join(problem.render() for problem in self.problems))


def failed(kind: str, message: str, *, where: Where | None = None, help: str | None = None) -> DsftError:
    """A run that started and cannot go on: exit code 1."""
    return DsftError(Problem(kind, message, where, help), EXIT_FAILED)


def refused(kind: str, message: str, *, where: Where | None = None, help: str | None = None) -> DsftError:
    """Something the user must change before anything starts: exit code 2."""
    return DsftError(Problem(kind, message, where, help), EXIT_USAGE)
