"""Every engine on a GPU by NCCL follows one process there. Needs one GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny
import torch

from dsft.compile import compile_plan, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def losses(plan, folder) -> list[float]:
    plan = tiny.change(plan, "cluster", device="cuda")
    write(compile_plan(plan, "{}\n", folder / "compiled"), folder / "compiled")
    command = [sys.executable, "-m", "dsft.train", folder / "compiled" / "plan.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    ("engine", "stage", "fields"),
    [
        ("ddp", None, {}),
        ("fsdp", None, {}),
        ("fsdp", None, {"cpu_offload": True}),
        ("deepspeed", 1, {}),
        ("deepspeed", 1, {"offload_optimizer": "cpu"}),
        ("deepspeed", 2, {}),
        ("deepspeed", 2, {"offload_optimizer": "cpu"}),
        ("deepspeed", 3, {}),
        ("deepspeed", 3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    ],
)
def test_ten_updates_on_a_gpu_follow_one_process(model, data, tmp_path, engine, stage, fields, method, precision):
    options = {"method": method, "precision": precision, "learning_rate": 2e-3, "save_updates": 5}
    runs = []
    for name, kind, zero, more in (("reference", "single", None, {}), ("run", engine, stage, fields)):
        folder = tmp_path / name
        folder.mkdir()
        runs.append(losses(tiny.plan(model, data, folder / "out", engine=kind, stage=zero, **more, **options), folder))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5 if precision == "fp32" else 5e-3)
