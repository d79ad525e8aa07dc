"""Options and fixtures of all tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

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
    precision: str = "fp32",
    device: str = "cpu",
    launcher: str = "local",
    config: dict | None = None,
    offload_optimizer: str = "none",
    offload_param: str = "none",
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    hybrid_shard: bool = False,
    **training,
) -> record.Plan:
    if engine == "deepspeed" and zero_stage is None:
        zero_stage = 2
    deepspeed, fsdp = engine == "deepspeed", engine == "fsdp"
    per_node = world_size // len(hosts)
    plan = record.Plan(
        name="tiny",
        recipe_sha256="0" * 64,
        versions={"python": "3.11", "torch": "2.13.0"},
        model=record.Model("/work/model", None, "sdpa", False, False),
        data=record.Data(
            train=(record.DataFile("/work/train.json", "alpaca", 90, "1" * 64),),
            eval=None,
            eval_split_rows=9,
            train_rows=81,
            eval_rows=9,
            max_length=128,
            chat_template=None,
        ),
        method=record.Method("lora", 8, 16.0, 0.0, "all-linear"),
        strategy=record.Strategy(
            engine=engine,
            zero_stage=zero_stage,
            offload_optimizer=offload_optimizer if deepspeed else None,
            offload_param=offload_param if deepspeed else None,
            reshard_after_forward=reshard_after_forward if fsdp else None,
            cpu_offload=cpu_offload if fsdp else None,
            hybrid_shard=hybrid_shard if fsdp else None,
            config=config or {},
        ),
        batch=record.Batch(world_size, 2, 3, 6 * world_size),
        training=record.Training(
            updates_per_epoch=7,
            total_updates=14,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_updates=1,
            optim="adamw",
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            max_grad_norm=1.0,
            precision=precision,
            seed=42,
            eval_updates=None,
        ),
        checkpoint=record.Checkpoint("/work/runs/tiny", None, 2, "auto"),
        logging=record.Logging(1, False),
        cluster=record.Cluster(device, tuple(record.Host(name, per_node) for name in hosts), per_node, 60),
        launcher=launcher,
    )
    return dataclasses.replace(plan, training=dataclasses.replace(plan.training, **training))
