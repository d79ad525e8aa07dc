"""DeepSpeed's ZeRO stages 1 to 3, and its configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsft.plan.record import Plan

CONFIG = "deepspeed.json"


def files(plan: Plan) -> dict[str, str]:
    merged = _merge(plan.strategy.config, _decided(plan))
    return {CONFIG: json.dumps(merged, indent=2, ensure_ascii=False) + "\n"}


def accelerate_config(plan: Plan, directory: Path) -> dict[str, Any]:
    config = {"deepspeed_config_file": str(directory / CONFIG), "zero3_init_flag": False}
    if len(plan.cluster.hosts) > 1:
        config["deepspeed_multinode_launcher"] = "standard"  # the others write the environment, secrets too, to disk
    # Precision is said in deepspeed.json; Accelerator refuses a configuration that says it twice.
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": config, "mixed_precision": None}


def _decided(plan: Plan) -> dict[str, Any]:
    """All that the plan decides, said in full: DeepSpeed's defaults differ between versions."""
    batch, training = plan.batch, plan.training
    config: dict[str, Any] = {
        # The loop owns the accumulation window: to DeepSpeed each of its micro-batches is a whole one.
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": 1,
        "train_batch_size": batch.per_device * batch.world_size,
        # Left out it would mean 1.0 in this version and off in others.
        "gradient_clipping": training.max_grad_norm or 0.0,
        "bf16": {"enabled": training.precision == "bf16"},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": plan.strategy.zero_stage, **_offload(plan)},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if training.optim == "sgd":
        config["zero_allow_untested_optimizer"] = True  # DeepSpeed's list holds only Adam and its relatives
    if plan.strategy.offload_optimizer == "cpu":
        # The optimizer is torch's under every engine; DeepSpeed would insist on its own, compiled at the first start.
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def _offload(plan: Plan) -> dict[str, Any]:
    """The blocks of what lives in the host's memory. Page-locked, where there is a GPU to copy to."""
    strategy = plan.strategy
    devices = {"offload_optimizer": strategy.offload_optimizer, "offload_param": strategy.offload_param}
    pinned = plan.cluster.device == "cuda"
    return {name: {"device": device, "pin_memory": pinned} for name, device in devices.items() if device != "none"}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` and `over` together, objects merged at every depth; where both say something, `over`."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merge(base[key], value) if both else value
    return merged
