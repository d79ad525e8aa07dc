"""The schedule in optimizer updates: how many, how many of them warm up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from dsft.errors import DsftError, Problem
from dsft.plan.record import Batch, Data, Training
from dsft.recipe.record import Recipe, Unusable
from dsft.recipe.rules import too_much_warmup


def plan_training(recipe: Recipe, batches: tuple[Batch, ...], data: Data) -> Training:
    """The schedule; it is the same for all `batches`, divisions of one global batch. Raises DsftError where the warm-up is longer than the training."""

    def said(field: str):
        return recipe.get("training", field)

    updates_per_epoch = math.ceil(data.train_rows / batches[0].global_batch_size)
    by_epochs = None if said("num_train_epochs") is None else said("num_train_epochs") * updates_per_epoch
    lengths = [updates for updates in (by_epochs, said("max_steps")) if updates is not None]
    if not lengths:
        raise Unusable  # as a rule of the recipe reports
    total_updates = min(lengths)
    # Rounded up, a ratio may be all of a short training, of which the first update has a rate of 0.
    by_ratio = min(warmup(total_updates, said("warmup_ratio") or 0.0), total_updates - 1)
    warmup_updates = said("warmup_steps") or by_ratio
    if warmup_updates >= total_updates:
        if total_updates == said("max_steps"):
            raise Unusable  # as a rule of the recipe reports
        raise DsftError([too_much_warmup(recipe, warmup_updates, total_updates)])
    return Training(
        updates_per_epoch=updates_per_epoch,
        total_updates=total_updates,
        learning_rate=said("learning_rate"),
        lr_scheduler_type=said("lr_scheduler_type"),
        warmup_updates=warmup_updates,
        optim=said("optim"),
        weight_decay=said("weight_decay"),
        adam_beta1=said("adam_beta1"),
        adam_beta2=said("adam_beta2"),
        adam_epsilon=said("adam_epsilon"),
        max_grad_norm=said("max_grad_norm"),
        precision=said("precision"),
        seed=said("seed"),
        eval_updates=said("eval_steps"),
    )


def doubts(recipe: Recipe, batch: Batch, data: Data, training: Training) -> Iterator[Problem]:
    """Warnings: what can be done, and is seldom meant."""
    if batch.global_batch_size > data.train_rows:
        yield Problem(
            "few-rows",
            f"an update takes {batch.global_batch_size} rows, and there are {data.train_rows}: every update is all of them",
            recipe.where("data", "train"),
            "a smaller global_batch_size, or more rows",
            severity="warning",
        )
    yield from _same_data(recipe, data)
    for section, field, does in (("training", "eval_steps", "evaluates"), ("checkpoint", "save_steps", "saves")):
        steps = recipe.get(section, field)
        if steps is not None and steps > training.total_updates:
            yield Problem(
                "no-effect",
                f'"{section}.{field}" is {steps}, and training has {training.total_updates} updates: nothing {does} before the end',
                recipe.where_key(section, field),
                f"at most {training.total_updates}, or leave it out",
                severity="warning",
            )


def _same_data(recipe: Recipe, data: Data) -> Iterator[Problem]:
    """Files are the same by what they hold, whatever they are called."""
    first: dict[str, str] = {}  # sha256 -> path
    for at, file in enumerate(data.train):
        if file.sha256 in first:
            before = first[file.sha256]
            again = "is listed twice" if before == file.path else f"holds the rows of {before} again"
            message = f"{file.path} {again}: an epoch shows each of them twice"
            where = recipe.where("data", "train", at, "path")
            yield Problem("same-data", message, where, "remove it, unless that is meant", severity="warning")
        first.setdefault(file.sha256, file.path)
    if data.eval and data.eval.sha256 in first:
        yield Problem(
            "same-data",
            "the rows to evaluate on are rows to train on: the evaluation will look better than it is",
            recipe.where("data", "eval", "path"),
            'write "eval": {"split": 0.1} to keep rows apart',
            severity="warning",
        )


def warmup(total_updates: int, ratio: float) -> int:
    """`ratio` of the updates, rounded up. The decimal as written counts: 0.07 of 100 is 7."""
    return math.ceil(total_updates * Fraction(repr(ratio)))
