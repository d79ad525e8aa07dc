"""What the schema cannot say: rules over several fields of a recipe.

Each rule yields the Problems it finds. A field that is already reported raises Unusable when a rule reads it, which ends
that rule: what depends on a wrong field is not reported on top of it. Rules that need the data, the model or the number
of processes are in dsft.plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsft.errors import Problem
from dsft.recipe.record import Recipe, Unusable


def check(recipe: Recipe) -> list[Problem]:
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(recipe))
        except Unusable:
            continue
    return problems


def length_of_training(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("training", "num_train_epochs") is None and recipe.get("training", "max_steps") is None:
        yield Problem(
            "missing-key",
            'neither "num_train_epochs" nor "max_steps" is said in "training"',
            recipe.where("training"),
            'write "num_train_epochs": 1, or "max_steps"; with both, training ends at whichever comes first',
        )


def one_warmup(recipe: Recipe) -> Iterator[Problem]:
    ratio, steps = recipe.get("training", "warmup_ratio"), recipe.get("training", "warmup_steps")
    if ratio is not None and steps is not None:
        yield Problem(
            "said-twice",
            f"warm-up is said twice: warmup_ratio {ratio:g} and warmup_steps {steps}",
            recipe.where_key("training", "warmup_steps"),
            "keep one of them; null takes back what a base recipe says",
        )


def evaluation_has_data(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("training", "eval_steps") is not None and recipe.get("data", "eval") is None:
        yield Problem(
            "missing-key",
            '"eval_steps" asks for evaluation, and "data.eval" names no rows for it',
            recipe.where_key("training", "eval_steps"),
            'write "eval": {"split": 0.1} in "data", or remove "eval_steps"',
        )


def flash_attention_runs(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("model", "attn_implementation") == "flash_attention_2":
        for path, value, needed in (
            (("cluster", "device"), "cpu", "cuda"),
            (("training", "precision"), "fp32", "bf16"),
        ):
            if recipe.get(*path) == value:
                yield Problem(
                    "incompatible",
                    f'flash_attention_2 does not run with "{".".join(path)}" {value}',
                    recipe.where("model", "attn_implementation"),
                    f'write "sdpa", or "{path[-1]}": "{needed}"',
                )


RULES = (
    length_of_training,
    one_warmup,
    evaluation_has_data,
    flash_attention_runs,
)
