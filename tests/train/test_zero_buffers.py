"""What the planner says DeepSpeed holds besides weights, against the engine's own tensors."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from workshop import CONFIG

from dsft.plan import memory
from dsft.plan.facts import read_facts
from dsft.plan.workload import Workload

INPUTS, WIDTH = 64, 256  # of one trained matrix

ENGINE = """
import json, os, socket, sys
import deepspeed, torch

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in dsft.train
stage, offload = int(sys.argv[1]), sys.argv[2] == "True"
model = torch.nn.Linear(int(sys.argv[3]), int(sys.argv[4]), bias=False)
zero = {"stage": stage, "reduce_bucket_size": 1000}
if offload:
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32", "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
}
engine, optimizer, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)
engine.backward(engine(torch.ones(1, model.in_features, dtype=torch.bfloat16)).float().sum())

def size(tensor):
    return tensor.numel() * tensor.element_size()

found = {"class": type(optimizer).__name__}
if hasattr(optimizer, "temp_grad_buffer_for_gpu_offload"):
    found["largest"] = size(optimizer.temp_grad_buffer_for_gpu_offload)
if offload and stage == 3:
    groups = optimizer.fp32_partitioned_groups_flat
    found["gradients"] = size(optimizer.grad_partitions_flat_buffer) + sum(size(group.grad) for group in groups)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buffers_are_the_engines_own(tmp_path, stage, offload):
    command = [sys.executable, "-c", ENGINE, str(stage), str(offload), str(INPUTS), str(WIDTH)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    facts = dataclasses.replace(
        read_facts(str(tmp_path)), embedding_parameters=INPUTS * WIDTH, head_parameters=0, linears=()
    )
    work = Workload(
        "deepspeed", stage, trained=INPUTS * WIDTH, trained_bytes=2, master_bytes=4, offload_optimizer=offload
    )
    assert (found["class"] == "BF16_Optimizer") == memory.bf16_optimizer(work)
    if "largest" in found:
        assert stage < 3 and found["largest"] == memory.lasting_bucket(facts, work)
    if offload and stage == 3:
        state = work.trained * (2 * work.moment_bytes + work.master_bytes)
        assert found["gradients"] == memory.offloaded(facts, work) - state
