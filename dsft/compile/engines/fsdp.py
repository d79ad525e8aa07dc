"""PyTorch's FSDP2 (fully_shard): weights, gradients and optimizer state sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsft.plan.record import Plan


def files(plan: Plan) -> dict[str, str]:
    return {}


def accelerate_config(plan: Plan, directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan.strategy.reshard_after_forward,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_offload_params": plan.strategy.cpu_offload,
            "fsdp_cpu_ram_efficient_loading": False,
            # The model recomputes its activations by itself where the plan says so; twice is an error.
            "fsdp_activation_checkpointing": False,
        },
    }
    if plan.strategy.hybrid_shard:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": len(plan.cluster.hosts),
            "parallelism_config_dp_shard_size": plan.cluster.processes_per_node,
        }
    return config
