"""What the schema cannot say: rules over several fields of a recipe.

Each rule yields the Problems it finds: an error where the job would fail or train otherwise than the recipe says, a warning
where a field has no effect. A field that is already reported raises Unusable when a rule reads it, which ends
that rule: what depends on a wrong field is not reported on top of it. Rules that need the data, the model or the number
of processes are in dsft.plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from dsft.errors import Problem
from dsft.recipe.record import Recipe, Unusable
from dsft.recipe.schema import default

MOST_USUAL_RATE = 0.1  # from here on no published fine-tuning with AdamW is


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


def warmup_within_steps(recipe: Recipe) -> Iterator[Problem]:
    """Told without the data; epochs are looked at when its rows are counted."""
    warmup, steps = recipe.get("training", "warmup_steps"), recipe.get("training", "max_steps")
    if warmup is not None and steps is not None and warmup >= steps:
        yield too_much_warmup(recipe, warmup, steps)


def too_much_warmup(recipe: Recipe, warmup: int, updates: int) -> Problem:
    return Problem(
        "out-of-range",
        f"{warmup} warm-up updates, and training has {updates}: the learning rate would never get to its height",
        recipe.where("training", "warmup_steps"),
        f"at most {updates - 1}, or warmup_ratio in its place",
    )


def evaluation_has_data(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("training", "eval_steps") is not None and recipe.get("data", "eval") is None:
        yield Problem(
            "missing-key",
            '"eval_steps" asks for evaluation, and "data.eval" names no rows for it',
            recipe.where_key("training", "eval_steps"),
            'write "eval": {"split": 0.1} in "data", or remove "eval_steps"',
        )


def usual_learning_rate(recipe: Recipe) -> Iterator[Problem]:
    rate = recipe.get("training", "learning_rate")
    if recipe.get("training", "optim") == "adamw" and rate >= MOST_USUAL_RATE:
        yield Problem(
            "unlikely-value",
            f"a learning rate of {rate:g}: AdamW moves every weight by about as much in each update",
            recipe.where("training", "learning_rate"),
            "usual are 1e-5 for all weights and 2e-4 for LoRA; is a minus missing in the exponent?",
            severity="warning",
        )


def flash_attention_is_installed(recipe: Recipe) -> Iterator[Problem]:
    asked = recipe.get("model", "attn_implementation") == "flash_attention_2"
    runs = recipe.get("cluster", "device") == "cuda" and recipe.get("training", "precision") == "bf16"
    if asked and runs and not find_spec("flash_attn"):
        yield Problem(
            "not-installed",
            "flash_attention_2 needs the package flash-attn, which is not installed here",
            recipe.where("model", "attn_implementation"),
            'install it on every machine that trains, or write "sdpa"',
            severity="warning",
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
                return


def gpu_without_gpus(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("cluster", "device") == "cpu" and recipe.get("cluster", "gpu") is not None:
        yield Problem(
            "contradiction",
            f'"gpu" is {recipe.get("cluster", "gpu")}, and "device" is cpu',
            recipe.where("cluster", "gpu"),
            'remove "gpu", or write "device": "cuda"',
        )


def keeping_needs_saving(recipe: Recipe) -> Iterator[Problem]:
    if _chosen(recipe, "checkpoint", "keep") and recipe.get("checkpoint", "save_steps") is None:
        yield _no_effect(
            recipe, ("checkpoint", "keep"), "no checkpoint is written", 'write "save_steps" beside it, or remove "keep"'
        )


def adam_has_betas(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("training", "optim") == "sgd":
        for field in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if _chosen(recipe, "training", field):
                yield _no_effect(recipe, ("training", field), '"optim" is sgd', f'remove "{field}"')


def folders_have_no_revision(recipe: Recipe) -> Iterator[Problem]:
    path = recipe.get("model", "path")
    if recipe.get("model", "revision") is not None and os.path.isabs(path):
        yield _no_effect(recipe, ("model", "revision"), f"{path} is a folder", 'remove "revision"')


def offloading_leaves_a_device(recipe: Recipe) -> Iterator[Problem]:
    if recipe.get("cluster", "device") == "cpu":
        sharded = recipe.get("strategy", "zero_stage") in (None, 3)  # else "offload_param" is an error
        for field in ("offload_optimizer", "cpu_offload", *["offload_param"] * sharded):
            if recipe.get("strategy", field) in ("cpu", True):
                because = "the device is the CPU, whose memory it would use"
                yield _no_effect(recipe, ("strategy", field), because, f'remove "{field}"')


def _chosen(recipe: Recipe, *path: str) -> bool:
    """Whether the recipe says another value than the default: a compiled recipe says all defaults too."""
    return recipe.said(*path) and recipe.get(*path) != default(path)


def _no_effect(recipe: Recipe, path: tuple[str, ...], because: str, help: str) -> Problem:
    message = f'"{".".join(path)}" has no effect: {because}'
    return Problem("no-effect", message, recipe.where_key(*path), help, severity="warning")


RULES = (
    length_of_training,
    one_warmup,
    evaluation_has_data,
    warmup_within_steps,
    usual_learning_rate,
    flash_attention_is_installed,
    flash_attention_runs,
    gpu_without_gpus,
    keeping_needs_saving,
    adam_has_betas,
    folders_have_no_revision,
    offloading_leaves_a_device,
)
