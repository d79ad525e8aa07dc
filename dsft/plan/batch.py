"""Batch arithmetic: global_batch_size = per_device * accumulation * world_size."""

from __future__ import annotations

import math

from dsft.errors import DsftError, refused
from dsft.plan.record import Batch, Host
from dsft.recipe.record import Recipe

_TOTAL, _PER_DEVICE, _ACCUMULATION = FIELDS = (
    "global_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)

MOST_ROWS = 10**9  # as the schema has it of global_batch_size


def plan_batches(recipe: Recipe, hosts: tuple[Host, ...]) -> tuple[Batch, ...]:
    """The batch of two given fields and the world, or of three that agree. Where the global batch alone is given: every
    division of it, the largest per_device first. Raises DsftError with the arithmetic where nothing comes out."""
    world = len(hosts) * hosts[0].slots
    total, per_device, accumulation = (recipe.get("training", field) for field in FIELDS)
    said = [field for field in FIELDS if recipe.get("training", field) is not None]

    def wrong(message: str, help: str) -> DsftError:
        return refused("batch-size", message, where=recipe.where("training", *said[:1]), help=help)

    if total is None and len(said) < 2:
        missing = " and ".join(f'"{field}"' for field in FIELDS if field not in said)
        raise wrong(
            f"the batch is not determined: {missing} are not said",
            f"give two of the three; the {world} process{'es' if world > 1 else ''} give{'s' * (world == 1)} the third",
        )
    if total is None:
        total = per_device * accumulation * world
        if total > MOST_ROWS:
            message = f"{per_device}*{accumulation}*{world} = {total} rows an update are more than {MOST_ROWS}"
            raise refused("out-of-range", message, where=recipe.where("training", *said[:1]))
        return (Batch(world, per_device, accumulation, total),)
    if per_device and accumulation and total != per_device * accumulation * world:
        raise wrong(
            f"{total} != {per_device}*{accumulation}*{world}: global_batch_size is not "
            "per_device_train_batch_size * gradient_accumulation_steps * processes",
            "leave one of the three out, and it follows from the others",
        )
    given = per_device or accumulation or 1
    quotient, rest = divmod(total, given * world)
    if rest or not quotient:
        divisor, factors = "processes", str(world)
        if len(said) == 2:
            divisor, factors = f"{said[1]} * processes", f"{given}*{world}"
        message = f"global_batch_size {total} cannot be divided by {divisor} = {factors}"
        if len(said) == 2:
            nearest = max(1, quotient)
            product = f"{nearest}*{given}*{world}" if accumulation else f"{given}*{nearest}*{world}"
            message += f": {total} != {product}"
        raise wrong(message, _nearest(total, given * world))
    if len(said) > 1:
        return (Batch(world, per_device or quotient, accumulation or quotient, total),)
    return divisions(total, world)


def divisions(total: int, world: int) -> tuple[Batch, ...]:
    """Every way to divide `total` rows over `world` processes, the largest per_device first; none if it leaves a rest."""
    rows, rest = divmod(total, world)
    if rest or not rows:
        return ()
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    sizes = sorted({*small, *(rows // size for size in small)}, reverse=True)
    return tuple(Batch(world, size, rows // size, total) for size in sizes)


def _nearest(total: int, factor: int) -> str:
    """The multiples of `factor` next to `total`."""
    below = total // factor * factor
    return (
        f"global_batch_size can be {below} or {below + factor}"
        if below
        else f"global_batch_size must be at least {factor}"
    )
