"""`strategy.config` beyond the schema: keys that the chosen stage does not use or the installed DeepSpeed does not have.

The schema lists the keys that a recipe may add, with types and ranges: those of DeepSpeed `VERSION`, which a test
compares with DeepSpeed's own models. An installed DeepSpeed of another version may lack some of them, or have removed
them. Its names are read from its source, for importing it takes seconds; and only where a recipe adds keys at all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsft.errors import Problem
from dsft.plan.versions import installed_versions
from dsft.recipe.record import Recipe, Unusable

VERSION = "0.19.8"

# Keys of zero_optimization -> the stages that use them, as DeepSpeedEngine._configure_zero_optimizer hands them over. A
# key that is not here is used by all. Those that start with stage3_ say it themselves.
_STAGES = {
    "allgather_bucket_size": (1, 2),
    "allgather_partitions": (1, 2),
    "ignore_unused_parameters": (1, 2),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "enable_sanity_checks": (3,),
    "log_trace_cache_warnings": (3,),
    "memory_efficient_linear": (3,),
    "sub_group_size": (3,),
    "zero_hpz_partition_size": (3,),
}

# All that BF16_Optimizer, which ZeRO-1 is under bf16, is given of zero_optimization (`_configure_bf16_optimizer`).
_BF16_OPTIMIZER = ("allgather_bucket_size",)

# Keys that nothing in dsft makes use of, and why.
_UNUSED = {
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): "dsft gathers and writes the result itself",
}

# Where it is not 0, DeepSpeed asks gradients for the stream of a GPU.
_GPU_ONLY = ("zero_optimization", "stage3_module_granularity_threshold")

# Blocks of the configuration ("": the top) -> the sources in DeepSpeed's package that name their keys.
_SOURCES = {
    "": (
        "runtime/constants.py",
        "runtime/zero/config.py",
        "comm/constants.py",
        "profiling/constants.py",
    ),
    "zero_optimization": ("runtime/zero/config.py",),
    "comms_logger": ("comm/config.py",),
    "flops_profiler": ("profiling/constants.py",),
}


def deepspeed_takes_all_keys(recipe: Recipe) -> Iterator[Problem]:
    """Errors: keys that the installed DeepSpeed does not have, or that do not run on a CPU. Warnings: those without effect."""
    config = recipe.get("strategy", "config")
    if config:
        yield from _without_effect(recipe, config)
        yield from _unknown(recipe, config)
        yield from _gpu_only(recipe, config)


def stages(key: str) -> tuple[int, ...]:
    """The ZeRO stages that use the key."""
    return _STAGES.get(key, (3,) if key.startswith("stage3_") else (1, 2, 3))


def _without_effect(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Problem]:
    stage = recipe.get("strategy", "zero_stage")
    bf16_optimizer = _is_bf16_optimizer(recipe)
    for path in _said(recipe, config):
        because, using = _UNUSED.get(path), stages(path[-1])
        if because is None and stage not in using:
            because = f"zero_stage is {stage}, and {' and '.join(map(str, using))} use{'s' * (len(using) == 1)} it"
        elif (
            because is None
            and bf16_optimizer
            and path[:-1] == ("zero_optimization",)
            and path[-1] not in _BF16_OPTIMIZER
        ):
            because = "stage 1 under bf16 is DeepSpeed's BF16_Optimizer, which does not take it"
        if because:
            message = f'"strategy.config.{".".join(path)}" has no effect: {because}'
            where = recipe.where_key("strategy", "config", *path)
            yield Problem("no-effect", message, where, f'remove "{path[-1]}"', severity="warning")


def _is_bf16_optimizer(recipe: Recipe) -> bool:
    try:
        offloaded = recipe.get("strategy", "offload_optimizer") == "cpu"
        return (
            recipe.get("strategy", "zero_stage") == 1
            and recipe.get("training", "precision") == "bf16"
            and not offloaded
        )
    except Unusable:
        return False


def _gpu_only(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Problem]:
    block, key = _GPU_ONLY
    if _GPU_ONLY not in _said(recipe, config) or not config[block][key] or recipe.get("strategy", "zero_stage") != 3:
        return
    if recipe.get("cluster", "device") == "cpu":
        yield Problem(
            "incompatible",
            f'"{key}" does not run with "cluster.device" cpu',
            recipe.where_key("strategy", "config", block, key),
            "leave it out",
        )


def _unknown(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Problem]:
    package = importlib.util.find_spec("deepspeed")  # of a package this imports nothing
    if package is None or package.origin is None:
        return  # compiled for other machines; the versions are compared there
    names = {block: _installed_names(Path(package.origin).parent, block) for block in _SOURCES}
    for path in _said(recipe, config):
        block, _, key = ".".join(path).rpartition(".")
        if names[block] and key not in names[block]:
            yield Problem(
                "unknown-key",
                f'DeepSpeed {installed_versions().get("deepspeed", "")}, which is installed, has no key "{key}" in '
                f'"{".".join(("strategy.config", *path[:-1]))}"',
                recipe.where_key("strategy", "config", *path),
                f"remove it, or install DeepSpeed {VERSION}",
            )


def _said(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of all keys in `config`, one block deep, but for those that are reported already."""
    for key, value in config.items():
        for path in ((key,), *((key, inner) for inner in (value if isinstance(value, Mapping) else ()))):
            if not any(("strategy", "config", *path[:end]) in recipe.wrong for end in range(1, len(path) + 1)):
                yield path


def _installed_names(package: Path, block: str) -> set[str]:
    """The names in the sources of a block: fields of models, their aliases, and constants that hold a string.

    Empty where there are no such sources: a DeepSpeed of another make says nothing about its keys.
    """
    import ast  # seldom needed, and slow to load

    names: set[str] = set()
    for source in _SOURCES[block]:
        path = package / source
        for node in ast.walk(ast.parse(path.read_bytes())) if path.is_file() else ():
            match node:
                case ast.Assign(value=ast.Constant(value=str(name))):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.keyword(arg="alias", value=ast.Constant(value=str(name))):
                    names.add(name)
    return names
