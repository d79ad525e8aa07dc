"""Options and fixtures of all tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny

from dsft.plan import record

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden, and what README.md and docs/errors.md show of dsft's output, instead of comparing",
    )


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.fixture
def make_record():
    """A function that makes a Plan by hand: no recipe, no machine, every path under /work."""
    return _make_record


def _make_record(
    engine: str = "ddp",
    *,
    world_size: int = 2,
    zero_stage: int | None = None,
    hosts: tuple[str, ...] = ("localhost",),
    device: str = "cpu",
    launcher: str = "local",
    config: dict | None = None,
    **fields,
) -> record.Plan:
    hosts_of_one_size = tuple(record.Host(name, world_size // len(hosts)) for name in hosts)
    plan = tiny.plan(
        Path("/work/model"), record.DataFile("/work/train.json", "alpaca", 90, "1" * 64), Path("/work/runs/tiny"),
        engine=engine, stage=zero_stage or (2 if engine == "deepspeed" else None), world=world_size, per_device=2,
        accumulation=3, machines=len(hosts), eval_split_rows=9, config=config or {}, **fields,
    )  # fmt: skip
    plan = tiny.change(plan, "cluster", hosts=hosts_of_one_size, device=device)
    return dataclasses.replace(plan, versions={"python": "3.11", "torch": "2.13.0"}, launcher=launcher)
