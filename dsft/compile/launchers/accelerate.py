"""accelerate launch, once on every node, and its configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dsft.compile.launchers.common import TRAIN, on_devices, plan_path, port
from dsft.plan.record import Plan

CONFIG = "accelerate.yaml"


def files(plan: Plan, directory: Path, engine: ModuleType) -> dict[str, str]:
    return {CONFIG: _yaml(_config(plan) | engine.accelerate_config(plan, directory))}


def commands(plan: Plan, directory: Path) -> tuple[tuple[str, ...], ...]:
    config = ("--config_file", str(directory / CONFIG))
    train = ("-m", TRAIN, plan_path(directory))
    hosts = plan.cluster.hosts
    if len(hosts) == 1:
        return ((*on_devices(plan, hosts[0]), "accelerate", "launch", *config, *train),)
    return tuple(
        (*on_devices(plan, host), "accelerate", "launch", *config, "--machine_rank", str(rank), *train)
        for rank, host in enumerate(hosts)
    )


def _config(plan: Plan) -> dict[str, Any]:
    several = len(plan.cluster.hosts) > 1
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "use_cpu": plan.cluster.device == "cpu",
        "mixed_precision": "bf16" if plan.training.precision == "bf16" else "no",
        "num_machines": len(plan.cluster.hosts),
        "num_processes": plan.batch.world_size,
        "machine_rank": 0,
        # On one machine accelerate takes a free port (0).
        "main_process_ip": plan.cluster.hosts[0].name if several else "127.0.0.1",
        "main_process_port": port(plan) if several else 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "enable_cpu_affinity": False,
    }


def _yaml(config: Mapping[str, Any], indent: str = "") -> str:
    """`config` as YAML in block style; a scalar of JSON is one of YAML, quoted where it must be."""
    lines = ""
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            lines += f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
        else:
            lines += f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n"
    return lines
