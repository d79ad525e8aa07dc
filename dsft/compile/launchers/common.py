"""What more than one launcher needs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dsft.plan.record import Host, Plan

TRAIN = "dsft.train"


def plan_path(directory: Path) -> str:
    return str(directory / "plan.json")


def visible_devices(plan: Plan, host: Host) -> dict[str, str]:
    """The environment that shows a process only the GPUs that the recipe selects on its machine."""
    if host.devices is None or plan.cluster.device != "cuda":
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))}


def on_devices(plan: Plan, host: Host) -> tuple[str, ...]:
    """The same as words before a command."""
    variables = visible_devices(plan, host)
    return ("env", *(f"{name}={value}" for name, value in variables.items())) if variables else ()


def port(plan: Plan) -> int:
    """The head's port where all nodes must know it before they start: two jobs seldom share one.

    It lies outside the ranges that Linux hands out by itself (from 32768) and Kubernetes uses (from 30000).
    """
    digest = hashlib.sha256(f"{plan.name}\n{plan.checkpoint.output_dir}".encode()).digest()
    return 20000 + int.from_bytes(digest[:4], "big") % 9000
