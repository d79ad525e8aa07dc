"""dsft itself starts the processes, on this machine alone (dsft/launch)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dsft.plan.record import Plan


def files(plan: Plan, directory: Path, engine: ModuleType) -> dict[str, str]:
    return {}


def commands(plan: Plan, directory: Path) -> tuple[tuple[str, ...], ...]:
    if len(plan.cluster.hosts) > 1:
        return ()
    return (("dsft", "launch", str(directory / "recipe.json"), "-o", str(directory)),)
