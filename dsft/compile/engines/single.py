"""One process: no wrapping, no communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsft.plan.record import Plan


def files(plan: Plan) -> dict[str, str]:
    return {}


def accelerate_config(plan: Plan, directory: Path) -> dict[str, Any]:
    return {"distributed_type": "NO"}
