"""torch's DistributedDataParallel: a whole copy of the model in each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsft.plan.record import Plan


def files(plan: Plan) -> dict[str, str]:
    return {}


def accelerate_config(plan: Plan, directory: Path) -> dict[str, Any]:
    # On a CPU too: MULTI_CPU starts one process a machine and leaves it alone.
    return {"distributed_type": "MULTI_GPU"}
