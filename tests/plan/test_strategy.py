"""Fields of a strategy against each other and against the machines."""

from __future__ import annotations

import pytest

from dsft.errors import DsftError

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


def test_keys_without_effect_do_not_stop_a_plan(workshop):
    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 10}}
    strategy = {"type": "deepspeed", "zero_stage": 2, "config": config}
    assert [problem.kind for problem in workshop.warnings(strategy=strategy)] == ["no-effect"]
    assert workshop.plan(strategy=strategy).strategy.config == config
