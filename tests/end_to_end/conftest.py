"""A folder to start jobs from, and the jobs that several tests look at."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import tiny
from jobs import ROOT, Launched, Shop

from dsft.environment import clean

PROGRAMS = Path(sys.executable).parent

# What `accelerate config` once wrote for another job. No job here may follow it.
OTHER_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 1, fsdp_offload_params: true}
mixed_precision: fp16
num_machines: 2
num_processes: 7
machine_rank: 1
use_cpu: false
"""


@pytest.fixture(scope="session")
def shop(tmp_path_factory) -> Shop:
    folder, elsewhere, home = (tmp_path_factory.mktemp(name) for name in ("shop", "elsewhere", "home"))
    tiny.write_model(folder / "model")
    tiny.write_rows(folder / "rows.json", 24)
    recipe = {
        "name": "tiny",
        "model": {"path": "model"},
        "data": {"train": [{"path": "rows.json", "format": "alpaca"}], "eval": {"split": 0.2}, "max_length": 128},
        "method": {"type": "lora", "r": 4},
        "strategy": {"type": "ddp"},
        "training": {
            "max_steps": 4, "global_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-2,
            "warmup_steps": 1, "precision": "fp32",
        },
        "logging": {"tensorboard": False},
        "cluster": {"device": "cpu", "processes_per_node": 2},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2))
    (elsewhere / "hostfiles").mkdir()
    shutil.copy(ROOT / "hostfiles" / "localhost", elsewhere / "hostfiles")
    (home / "hf" / "accelerate").mkdir(parents=True)
    (home / "hf" / "accelerate" / "default_config.yaml").write_text(OTHER_CONFIG)
    environment = {
        **clean(os.environ),
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
    }
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    return Shop(folder, elsewhere, environment)


@pytest.fixture(scope="session")
def launched(shop):
    """A function from an engine to the tiny job `dsft launch` ran with it."""
    ran: dict[str, Launched] = {}

    def of(engine: str) -> Launched:
        if engine not in ran:
            name = f"{engine}-launch"
            result = shop.done("dsft", "launch", shop.folder / "recipe.json", *shop.settings(name, engine))
            ran[engine] = Launched(shop.output(name), result.stdout, result.stderr)
        return ran[engine]

    return of
