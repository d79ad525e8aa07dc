"""Every engine on a GPU by NCCL follows one process there, and goes on from its checkpoint. Needs one GPU."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys

import pytest
import tiny
import torch

from dsft.compile import compile_plan, write

DEVICE = "cuda"
OPTIONS = {"learning_rate": 2e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

OFFLOAD_ALL = {"offload_optimizer": "cpu", "offload_param": "cpu"}
STRATEGIES = {
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "fsdp-offload": {"engine": "fsdp", "cpu_offload": True},
    "fsdp-hybrid": {"engine": "fsdp", "hybrid_shard": True},
    "fsdp-hybrid-offload": {"engine": "fsdp", "hybrid_shard": True, "cpu_offload": True},
    "zero1": {"engine": "deepspeed", "stage": 1},
    "zero1-offload": {"engine": "deepspeed", "stage": 1, "offload_optimizer": "cpu"},
    "zero2": {"engine": "deepspeed", "stage": 2},
    "zero2-offload": {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
    "zero3": {"engine": "deepspeed", "stage": 3},
    "zero3-offload": {"engine": "deepspeed", "stage": 3, **OFFLOAD_ALL},
}


def losses(plan, folder) -> list[float]:
    """Runs the plan as `python -m dsft.train`, and returns the loss of each update that its metrics tell of."""
    plan = tiny.change(plan, "cluster", device=DEVICE)
    write(compile_plan(plan, "{}\n", folder / "compiled"), folder / "compiled")
    command = [sys.executable, "-m", "dsft.train", folder / "compiled" / "plan.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.fixture(scope="module")
def reference(model, data, tmp_path_factory):
    """A function from method and precision to the losses of one process with one pass an update."""

    @functools.cache
    def of(method: str, precision: str) -> list[float]:
        folder = tmp_path_factory.mktemp("reference")
        return losses(tiny.plan(model, data, folder / "out", **OPTIONS, method=method, precision=precision), folder)

    return of


@pytest.mark.parametrize(("method", "precision"), [("lora", "bf16"), ("full", "fp32")])
@pytest.mark.parametrize("name", STRATEGIES)
def test_ten_updates_on_a_gpu_follow_one_process(reference, model, data, tmp_path, name, method, precision):
    """Two passes an update, for each engine accumulates in its own way; then the last five updates once more."""
    output = tmp_path / "out"
    options = OPTIONS | {
        "method": method,
        "precision": precision,
        "per_device": 2,
        "accumulation": 2,
        "save_updates": 5,
    }
    plan = tiny.plan(model, data, output, **STRATEGIES[name], **options)
    expected = pytest.approx(reference(method, precision), rel=1e-5 if precision == "fp32" else 5e-3)
    assert losses(plan, tmp_path) == expected
    shutil.rmtree(output / "checkpoints" / "update-00000010")
    shutil.rmtree(output / ("adapter" if method == "lora" else "model"))
    assert losses(plan, tmp_path) == expected
