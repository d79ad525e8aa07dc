"""Batch arithmetic: global_batch_size = per_device * accumulation * world_size."""

from __future__ import annotations

from dsft.errors import DsftError, Problem
from dsft.plan.record import Batch, Host
from dsft.recipe.record import Recipe

_TOTAL, _PER_DEVICE, _ACCUMULATION = FIELDS = (
    "global_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)


def plan_batch(recipe: Recipe, hosts: tuple[Host, ...]) -> Batch:
    """The batch of two given fields and the world, or of three that agree. Raises DsftError with the arithmetic."""
    world = len(hosts) * hosts[0].slots
    total, per_device, accumulation = (recipe.get("training", field) for field in FIELDS)
    said = [field for field in FIELDS if recipe.get("training", field) is not None]

    def wrong(message: str, help: str) -> DsftError:
        return DsftError(Problem("batch-size", message, recipe.where("training", *said[:1]), help))

    if len(said) < 2:
        missing = " and ".join(f'"{field}"' for field in FIELDS if field not in said)
        raise wrong(
            f"the batch is not determined: {missing} are not said",
            f"give two of the three; the {world} process{'es' if world > 1 else ''} give{'s' * (world == 1)} the third",
        )
    if total is None:
        total = per_device * accumulation * world
    elif per_device is None:
        per_device, rest = divmod(total, accumulation * world)
        if rest or not per_device:
            raise wrong(
                f"global_batch_size {total} cannot be divided by gradient_accumulation_steps * processes = "
                f"{accumulation}*{world}: {total} != {max(1, per_device)}*{accumulation}*{world}",
                _nearest(total, accumulation * world),
            )
    elif accumulation is None:
        accumulation, rest = divmod(total, per_device * world)
        if rest or not accumulation:
            raise wrong(
                f"global_batch_size {total} cannot be divided by per_device_train_batch_size * processes = "
                f"{per_device}*{world}: {total} != {per_device}*{max(1, accumulation)}*{world}",
                _nearest(total, per_device * world),
            )
    elif total != per_device * accumulation * world:
        raise wrong(
            f"{total} != {per_device}*{accumulation}*{world}: global_batch_size is not "
            "per_device_train_batch_size * gradient_accumulation_steps * processes",
            "leave one of the three out, and it follows from the others",
        )
    return Batch(world, per_device, accumulation, total)


def _nearest(total: int, factor: int) -> str:
    """The multiples of `factor` next to `total`."""
    below = total // factor * factor
    return (
        f"global_batch_size can be {below} or {below + factor}"
        if below
        else f"global_batch_size must be at least {factor}"
    )
