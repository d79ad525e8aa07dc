"""What an engine makes of the model before the first update: nothing of it is rounded, untied or left out."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import tiny

from dsft.compile import compile_plan, write
from dsft.plan import record

pytestmark = pytest.mark.slow

ENGINES = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "fsdp-offload": {"engine": "fsdp", "cpu_offload": True},
    "zero1": {"engine": "deepspeed", "stage": 1},
    "zero2-offload": {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
    "zero3": {"engine": "deepspeed", "stage": 3},
    "zero3-offload": {"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}


joined = None  # the world of that process, joined once


@pytest.fixture(scope="module")
def process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def changed_by_wrapping(plan: record.Plan, directory: Path) -> list[str]:
    """Wraps the model in a world of one and names what is not as before. Runs in a process of its own."""
    import torch

    from dsft.train.engines import engine
    from dsft.train.model import base_model, build_model
    from dsft.train.report import quieten_libraries
    from dsft.train.world import join

    global joined
    world = joined = joined or join(plan)
    quieten_libraries("cpu")
    model = build_model(plan)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert weights and any("inv_freq" in name for name in buffers)
    module = engine(plan.strategy.engine)
    wrapped = module.wrap(plan, model, world, directory)
    whole = {name: module.gather(wrapped, p).cpu() for name, p in wrapped.trainable.items()}
    changed = [name for name in weights.keys() ^ whole.keys()]
    changed += [name for name in weights.keys() & whole.keys() if not torch.equal(whole[name], weights[name])]
    changed += [name for name, buffer in model.named_buffers() if not torch.equal(buffers[name], buffer)]
    plain = base_model(model)
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    return sorted(changed) + ["ties"] * (not tied)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", ENGINES)
def test_weights_and_buffers_are_as_before(process, model, data, tmp_path, name, method, precision):
    plan = tiny.plan(model, data, tmp_path / "out", method=method, precision=precision, **ENGINES[name])
    write(compile_plan(plan, "{}\n", tmp_path), tmp_path)
    assert process.apply(changed_by_wrapping, (plan, tmp_path)) == []
