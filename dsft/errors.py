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


@dataclass(frozen=True)
class Where:
    """A place a person can open: a file (or the argument that said it) and, where known, a position in it.

    `line` and `column` count from 1; `text` is the whole source line and `length` the number of characters to
    underline. A place without a line is a whole file, a command line argument, or a JSON path.
    """

    source: str
    line: int | None = None
    column: int | None = None
    text: str | None = None
    length: int = 1

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
        lines = [f"{place}{self.severity}[{self.kind}]: {self.message}"]
        margin = "  "
        if self.where and self.where.text is not None and self.where.column is not None:
            number = str(self.where.line)
            margin = " " * (len(number) + 3)
            # Tabs are kept in the caret line so that it lines up at any tab width.
            before = "".join(c if c == "\t" else " " for c in self.where.text[: self.where.column - 1])
            lines.append(f"  {number} | {self.where.text}")
            lines.append(f"{margin}| {before}{'^' * max(1, self.where.length)}")
        if self.help:
            lines.append(f"{margin}help: {self.help}")
        return "\n".join(lines)


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
