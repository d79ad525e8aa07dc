"""The data files as they are now: read through, counted and hashed; and the rows kept for evaluation."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path as FilePath

from dsft.errors import DsftError, Problem, refused
from dsft.plan.record import Data, DataFile
from dsft.plan.rows import scan
from dsft.recipe.load import read_text
from dsft.recipe.record import Path, Recipe, Unusable


def plan_data(recipe: Recipe) -> Data:
    """Raises DsftError with what is wrong in any of the files."""
    problems: list[Problem] = []

    def scanned(*path: str | int) -> DataFile | None:
        """The file at `path` of the recipe; None where it is wrong."""
        try:
            return _data_file(recipe, path)
        except Unusable:
            return None
        except DsftError as error:
            problems.extend(error.problems)
            return None

    train = [scanned("data", "train", at) for at in range(len(recipe.get("data", "train")))]
    said = recipe.get("data", "eval")
    split = said.get("split") if said else None
    evaluation = scanned("data", "eval") if said and split is None else None
    template = None
    try:
        template = _chat_template(recipe)
    except DsftError as error:
        problems.extend(error.problems)
    if problems:
        raise DsftError(problems)
    if None in train or (said and split is None and evaluation is None):
        raise Unusable

    rows = sum(file.rows for file in train)
    split_rows = 0
    if split is not None:
        split_rows = held_out(rows, recipe.get("data", "eval", "split"))
        if split_rows >= rows:
            raise refused(
                "too-few-rows",
                f"{rows} row{'s' * (rows > 1)} to train on, {split_rows} of them kept for evaluation: none is left",
                where=recipe.where("data", "eval", "split"),
                help='give more rows, or a file of its own to "eval"',
            )
    return Data(
        train=tuple(train),
        eval=evaluation,
        eval_split_rows=split_rows,
        train_rows=rows - split_rows,
        eval_rows=evaluation.rows if evaluation else split_rows,
        max_length=recipe.get("data", "max_length"),
        chat_template=template,
    )


def held_out(rows: int, split: float) -> int:
    """`split` of `rows` rounded down, at least one. The decimal as written counts: 0.29 of 100 is 29."""
    return max(1, int(rows * Fraction(repr(split))))


def _data_file(recipe: Recipe, at: Path) -> DataFile:
    path = recipe.get(*at, "path")
    try:
        rows, sha256 = scan(path)
    except DsftError as error:
        raise DsftError(
            problem if problem.where and problem.where.line else _asked_by(problem, recipe, at)
            for problem in error.problems
        ) from error
    return DataFile(path, recipe.get(*at, "format"), rows, sha256)


def _asked_by(problem: Problem, recipe: Recipe, at: Path) -> Problem:
    """A problem of a whole file, at the place in the recipe that names the file."""
    return Problem(problem.kind, problem.message, recipe.where(*at, "path"), problem.help)


def _chat_template(recipe: Recipe) -> str | None:
    path = recipe.get("data", "chat_template")
    if path is None:
        return None
    return read_text(FilePath(path), path, what="chat template", asked_by=recipe.where("data", "chat_template"))
