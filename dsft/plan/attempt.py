"""Going on after a mistake, so that one run reports them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dsft.errors import DsftError, Problem
from dsft.recipe.record import Unusable


class Attempt:
    """Calls functions and collects the Problems of those that fail."""

    def __init__(self, problems: Iterable[Problem] = ()):
        self.problems = list(problems)  # warnings too
        self.failed = any(problem.severity == "error" for problem in self.problems)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result; None where it fails, or where an argument is None because another one failed."""
        try:
            if None in arguments:
                raise Unusable
            return function(*arguments)
        except DsftError as error:
            self.problems.extend(error.problems)
        except Unusable:  # already reported
            pass
        self.failed = True
        return None

    def check(self, rule: Callable[..., Iterable[Problem]], *arguments: Any) -> None:
        """Collects what the rule yields, errors and warnings; nothing where an argument is None, as above."""
        if None in arguments:
            return
        try:
            for problem in rule(*arguments):
                self.problems.append(problem)
                self.failed |= problem.severity == "error"
        except Unusable:  # already reported
            pass

    def warn(self, *problems: Problem) -> None:
        self.problems.extend(problems)

    def raise_problems(self) -> None:
        """Raises DsftError with what was found, or Unusable where all of it is reported elsewhere."""
        if self.failed and self.problems:
            raise DsftError(self.problems)
        if self.failed:
            raise Unusable
