"""Fields of a strategy against each other and against the machines."""

from __future__ import annotations

import json
import re

import pytest

from dsft.errors import DsftError
from dsft.recipe.schema import load_schema

DEEPSPEED = {"type": "deepspeed", "zero_stage": 3}


def machines(workshop, count: int, slots: int) -> dict:
    hostfile = workshop.write("hosts", "".join(f"node{at} slots={slots}\n" for at in range(count)))
    return {"cluster": {"device": "cpu", "hostfile": str(hostfile)}, "training": {
        "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
    }}  # fmt: skip


def test_every_field_reaches_the_plan(workshop):
    fields = {"offload_optimizer": "cpu", "offload_param": "cpu", "config": {"dump_state": True}}
    planned = workshop.plan(strategy=DEEPSPEED | fields).strategy
    assert {name: getattr(planned, name) for name in fields} == fields
    assert (planned.cpu_offload, planned.hybrid_shard, planned.reshard_after_forward) == (None, None, None)

    fields = {"cpu_offload": True, "hybrid_shard": True, "reshard_after_forward": False}
    planned = workshop.plan(strategy={"type": "fsdp"} | fields, **machines(workshop, 2, 2)).strategy
    assert {name: getattr(planned, name) for name in fields} == fields
    assert (planned.zero_stage, planned.offload_optimizer, planned.offload_param) == (None, None, None)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_offloaded_from_stage_3_only(workshop, stage):
    workshop.plan(strategy=DEEPSPEED | {"offload_param": "cpu"})
    workshop.plan(strategy=DEEPSPEED | {"zero_stage": stage, "offload_optimizer": "cpu"})
    with pytest.raises(DsftError) as caught:
        workshop.plan(strategy=DEEPSPEED | {"zero_stage": stage, "offload_param": "cpu"})
    (problem,) = caught.value.problems
    assert problem.kind == "offload-stage"
    assert problem.where.text[problem.where.column - 1 :].startswith('"cpu"')


@pytest.mark.parametrize(
    "strategy",
    [
        {"type": "fsdp", "cpu_offload": True},
        DEEPSPEED | {"offload_param": "cpu"},
        DEEPSPEED | {"offload_optimizer": "cpu"},
    ],
)
def test_nothing_is_offloaded_from_a_cpu(workshop, strategy):
    (problem,) = workshop.warnings(strategy=strategy)
    assert problem.kind == "no-effect" and "the device is the CPU" in problem.message
    assert not workshop.warnings(strategy=strategy, cluster={"device": "cuda", "processes_per_node": 2})


def test_a_hybrid_of_one_machine_is_warned_of(workshop):
    fsdp = {"type": "fsdp", "hybrid_shard": True}
    (problem,) = workshop.warnings(strategy=fsdp)
    assert (problem.kind, problem.where.text.strip(' ,"')) == ("no-effect", 'hybrid_shard": true')
    assert workshop.warnings(strategy=fsdp, **machines(workshop, 2, 2)) == []
    assert workshop.warnings(strategy={"type": "fsdp"}, **machines(workshop, 1, 2)) == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_hybrid_needs_processes_to_shard_over(workshop, count):
    with pytest.raises(DsftError) as caught:
        workshop.plan(strategy={"type": "fsdp", "hybrid_shard": True}, **machines(workshop, count, 1))
    assert [problem.kind for problem in caught.value.problems] == ["incompatible"]


@pytest.mark.parametrize(
    ("size", "good"), [(1, True), (2, True), (3, True), (6, True), (8, True), (4, False), (5, False)]
)
def test_groups_that_hold_all_weights_are_whole(workshop, size, good):
    strategy = DEEPSPEED | {"config": {"zero_optimization": {"zero_hpz_partition_size": size}}}
    if good:
        assert workshop.plan(strategy=strategy, **machines(workshop, 3, 2)).batch.world_size == 6
        return
    with pytest.raises(DsftError, match=f"6 processes cannot be divided into groups of {size}") as caught:
        workshop.plan(strategy=strategy, **machines(workshop, 3, 2))
    (problem,) = caught.value.problems
    assert problem.kind == "incompatible" and problem.where.text.strip().endswith(f": {size}")


def test_keys_without_effect_do_not_stop_a_plan(workshop):
    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 10}}
    strategy = {"type": "deepspeed", "zero_stage": 2, "config": config}
    assert [problem.kind for problem in workshop.warnings(strategy=strategy)] == ["no-effect"]
    assert workshop.plan(strategy=strategy).strategy.config == config


REFUSED = load_schema()["properties"]["strategy"]["properties"]["type"]["x-refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_the_replacement_of_a_refused_strategy_compiles(workshop, name):
    with pytest.raises(DsftError) as caught:
        workshop.plan(strategy={"type": name})
    (problem,) = caught.value.problems
    assert (problem.kind, problem.help) == ("not-allowed-value", REFUSED[name])
    fields = re.findall(r'"(zero_stage|offload_\w+|hybrid_shard)": ("\w+"|\w+)', problem.help)
    written = re.findall(r'"(single|ddp|fsdp|deepspeed)"', problem.help)[0]
    strategy = {"type": written} | {field: json.loads(value) for field, value in fields}
    engine = workshop.plan(
        f"cluster.processes_per_node={1 if written == 'single' else 2}", strategy=strategy
    ).strategy.engine
    assert engine == written


def test_auto_chooses_all_of_the_strategy(workshop):
    fields = {"zero_stage": 3, "reshard_after_forward": True, "hybrid_shard": True, "config": {}}
    with pytest.raises(DsftError) as caught:
        workshop.plan(strategy={"type": "auto"} | fields)
    assert [problem.kind for problem in caught.value.problems] == ["unknown-key"] * 4
    assert all('only another "type" of strategy has it' in problem.help for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("gpu", "precision", "good"), [("t4", "fp32", True), ("a10g", "bf16", True), ("t4", "bf16", False)]
)
def test_the_gpu_computes_in_the_precision(workshop, gpu, precision, good):
    said = (f"cluster.gpu={gpu}", "cluster.device=cuda", f"training.precision={precision}")
    if good:
        assert workshop.plan(*said).training.precision == precision
        return
    with pytest.raises(DsftError) as caught:
        workshop.plan(*said)
    (problem,) = caught.value.problems
    assert problem.kind == "precision-device" and "t4" in problem.message
