"""What more than one launcher needs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dsft.plan.record import Plan

TRAIN = "dsft.train"


def plan_path(directory: Path) -> str:
    return str(directory / "plan.json")


def port(plan: Plan) -> int:
    """The head's port where all nodes must know it before they start: two jobs seldom share one.

    It lies outside the ranges that Linux hands out by itself (from 32768) and Kubernetes uses (from 30000).
    """
    digest = hashlib.sha256(f"{plan.name}\n{plan.checkpoint.output_dir}".encode()).digest()
    return 20000 + int.from_bytes(digest[:4], "big") % 9000
