"""The data files as they are now: read through, counted and hashed; and the rows kept for evaluation."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path as FilePath

from dsft.errors import DsftError, Problem, refused
from dsft.plan.attempt import Attempt
from dsft.plan.record import Data, DataFile
from dsft.plan.rows import scan
from dsft.recipe.load import nearby, read_text
from dsft.recipe.record import Path, Recipe


def plan_data(recipe: Recipe) -> Data:
    """Raises DsftError with what is wrong in any of the files."""
    attempt = Attempt()
    files = attempt(recipe.get, "data", "train") or ()
    train = [attempt(_data_file, recipe, "data", "train", at) for at in range(len(files))]
    said = attempt(recipe.get, "data", "eval") or {}
    split = attempt(recipe.get, "data", "eval", "split") if "split" in said else None
    evaluation = attempt(_data_file, recipe, "data", "eval") if said and "split" not in said else None
    template = attempt(_chat_template, recipe)
    max_length = attempt(recipe.get, "data", "max_length")
    attempt.raise_problems()

    rows = sum(file.rows for file in train)
    split_rows = 0
    if split is not None:
        split_rows = held_out(rows, split)
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
        max_length=max_length,
        chat_template=template,
    )


def held_out(rows: int, split: float) -> int:
    """`split` of `rows` rounded down, at least one. The decimal as written counts: 0.29 of 100 is 29."""
    return max(1, int(rows * Fraction(repr(split))))


def _data_file(recipe: Recipe, *at: str | int) -> DataFile:
    path = recipe.get(*at, "path")
    if not os.path.exists(path):
        where, help = recipe.where(*at, "path"), nearby(FilePath(path), recipe.where(*at, "path"))
        raise refused("file-not-found", f"no data file at {path}", where=where, help=help)
    try:
        rows, sha256 = scan(path, recipe.get(*at, "format"))
    except DsftError as error:
        raise DsftError(
            problem if problem.where and problem.where.line else _asked_by(problem, recipe, at)
            for problem in error.problems
        ) from error
    return DataFile(path, recipe.get(*at, "format"), rows, sha256)


def _asked_by(problem: Problem, recipe: Recipe, at: Path) -> Problem:
    """A problem of a whole file, at the place in the recipe that names the file."""
    message = f"{recipe.get(*at, 'path')}: {problem.message}"
    return Problem(problem.kind, message, recipe.where(*at, "path"), problem.help)


def _chat_template(recipe: Recipe) -> str | None:
    path = recipe.get("data", "chat_template")
    if path is None:
        return None
    where = recipe.where("data", "chat_template")
    text = read_text(FilePath(path), path, what="chat template", asked_by=where)
    from dsft.plan.template import check_template  # with jinja2, which takes time, and few recipes name a template

    check_template(text, path, where)
    return text
