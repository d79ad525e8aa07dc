"""The memory that the planner expects against what real jobs take here: every engine, full and LoRA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from dsft.plan.process import checkpoint_bytes
from dsft.plan.workload import Workload

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_here.py"
CASES = [
    "30m-full-single-fp32-2x256", "30m-full-ddp-fp32-2x256", "30m-full-fsdp-fp32-2x256", "30m-full-zero1-fp32-2x256",
    "30m-full-zero2-fp32-2x256", "30m-full-zero3-fp32-2x256", "135m-lora-single-fp32-2x256",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_within_a_tenth(case):
    done = subprocess.run([sys.executable, BENCHMARK, case, "--parts"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 runs" in done.stdout


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_checkpoint_takes_what_is_planned(trained, model, data, tmp_path, method, optim):
    run = trained(tiny.plan(model, data, tmp_path / "out", method=method, optim=optim, updates=2, save_updates=2))
    weights = run.weights.values()
    planned = checkpoint_bytes(Workload("single", trained=sum(w.numel() for w in weights), optimizer=optim))
    (saved,) = (run.output / "checkpoints").iterdir()
    sizes = {path.name: path.stat().st_size for path in saved.iterdir()}
    written = sizes["parameters.safetensors"] + sizes["moments.safetensors"]
    headers = 200 * 3 * len(weights) + 100  # of safetensors: name, dtype, shape and place of each tensor
    assert planned <= written <= planned + headers
