"""The engines' own readers find every decided value in the compiled files."""

from __future__ import annotations

import pytest

from dsft.compile import compile_plan, write


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_deepspeed(make_record, tmp_path, monkeypatch, zero_stage, precision, optim):
    import torch
    from deepspeed.runtime import config as reader

    monkeypatch.setattr(reader.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(reader.dist, "get_world_size", lambda *_: 4)
    plan = make_record(
        "deepspeed",
        world_size=4,
        zero_stage=zero_stage,
        precision=precision,
        optim=optim,
        max_grad_norm=None,
        config={"zero_optimization": {"reduce_bucket_size": 12345}},
    )
    write(compile_plan(plan, "{}\n", tmp_path), tmp_path)
    config = reader.DeepSpeedConfig(str(tmp_path / "deepspeed.json"))

    assert config.world_size == 4  # as the reader checks the batch sizes against it
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.gradient_accumulation_steps == 1
    assert config.train_batch_size == 8
    assert config.gradient_clipping == 0.0
    assert config.bfloat16_config.enabled is (precision == "bf16")
    assert config.float16_config.enabled is False
    assert config.grad_accum_dtype == "fp32"
    assert config.communication_data_type == torch.float32
    assert config.zero_enabled and config.zero_optimization_stage == zero_stage
    assert config.zero_config.reduce_bucket_size == 12345
    assert config.zero_allow_untested_optimizer is (optim == "sgd")
    assert config.steps_per_print is None and config.wall_clock_breakdown is False
    assert config.optimizer_name is None and config.scheduler_name is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("engine", "distributed_type"),
    [("single", "NO"), ("ddp", "MULTI_GPU"), ("fsdp", "FSDP"), ("deepspeed", "DEEPSPEED")],
)
def test_accelerate_on_one_machine(make_record, tmp_path, engine, distributed_type, device, precision):
    world_size = 1 if engine == "single" else 4
    plan = make_record(engine, world_size=world_size, device=device, precision=precision)
    config = _accelerate(plan, tmp_path)

    assert config.distributed_type.value == distributed_type
    assert (config.num_machines, config.num_processes, config.machine_rank) == (1, world_size, 0)
    assert config.main_process_port == 0  # a free one
    assert config.use_cpu is (device == "cpu")
    expected = {"fp32": "no", "bf16": "bf16"}[precision]
    assert config.mixed_precision == (None if engine == "deepspeed" else expected)
    if engine == "fsdp":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_reshard_after_forward"] is True
    if engine == "deepspeed":
        assert config.deepspeed_config["deepspeed_config_file"] == str(tmp_path / "deepspeed.json")


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed"])
def test_accelerate_on_several_machines(make_record, tmp_path, engine):
    artifacts_plan = make_record(engine, world_size=4, hosts=("node1", "node2"))
    config = _accelerate(artifacts_plan, tmp_path)
    assert config.distributed_type.value != "MULTI_CPU"  # which would train each machine alone
    assert (config.num_machines, config.num_processes) == (2, 4)
    assert config.main_process_ip == "node1" and config.main_process_port > 0 and config.same_network
    if engine == "deepspeed":
        assert config.deepspeed_config["deepspeed_multinode_launcher"] == "standard"


def test_accelerator_accepts_the_deepspeed_configuration(make_record, tmp_path, monkeypatch):
    """A program that uses Accelerator reads the compiled files too: it refuses a setting that is said in both."""
    from accelerate.utils import DeepSpeedPlugin

    config = _accelerate(make_record("deepspeed", zero_stage=3, precision="bf16"), tmp_path)
    said = [*config.deepspeed_config, *(["mixed_precision"] if config.mixed_precision else [])]
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(said))  # as `accelerate launch` sets it
    plugin = DeepSpeedPlugin(hf_ds_config=config.deepspeed_config["deepspeed_config_file"])
    assert plugin.hf_ds_config.is_zero3()


def _accelerate(plan, directory):
    from accelerate.commands.config import load_config_from_file

    write(compile_plan(plan, "{}\n", directory), directory)
    return load_config_from_file(str(directory / "accelerate.yaml"))


@pytest.mark.parametrize("name", ["localhost", "two_nodes"])
def test_deepspeed_reads_the_hostfiles(name, pytestconfig):
    from deepspeed.launcher.runner import fetch_hostfile

    pool = fetch_hostfile(str(pytestconfig.rootpath / "hostfiles" / name))
    assert pool == {"localhost": {"localhost": 2}, "two_nodes": {"node1": 2, "node2": 2}}[name]
