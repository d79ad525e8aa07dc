"""The engines' and launchers' own readers find every decided value in the compiled files."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from drawn_recipes import furnished, good
from hypothesis import HealthCheck, Phase, given, settings
from workshop import workshop

from dsft.compile import compile_plan, write
from dsft.compile.launchers.common import port
from dsft.plan import make_plan
from dsft.recipe import load_recipe

__all__ = ["furnished", "workshop"]

STRATEGIES = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "fsdp-gathered": {"engine": "fsdp", "reshard_after_forward": False},
    "fsdp-offload": {"engine": "fsdp", "cpu_offload": True},
    "fsdp-hybrid": {"engine": "fsdp", "hybrid_shard": True},
    **{f"zero{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
    **{f"zero{n}-offload": {"engine": "deepspeed", "zero_stage": n, "offload_optimizer": "cpu"} for n in (1, 2, 3)},
    "zero3-offload-param": {"engine": "deepspeed", "zero_stage": 3, "offload_param": "cpu"},
    "zero3-offload-all": {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}
DEEPSPEED = [name for name, fields in STRATEGIES.items() if fields["engine"] == "deepspeed"]
SEVERAL = [name for name in STRATEGIES if name != "single"]


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def compiled(plan, directory):
    artifacts = compile_plan(plan, "{}\n", directory)
    write(artifacts, directory)
    return artifacts


@pytest.mark.parametrize(
    ("precision", "optim", "device", "max_grad_norm"),
    [("fp32", "adamw", "cpu", None), ("bf16", "sgd", "cuda", 0.3), ("bf16", "adamw", "cuda", 10.0)],
)
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(make_record, tmp_path, monkeypatch, name, precision, optim, device, max_grad_norm):
    plan = make_record(
        **STRATEGIES[name],
        world_size=4,
        precision=precision,
        optim=optim,
        device=device,
        max_grad_norm=max_grad_norm,
        config={
            "zero_optimization": {"reduce_bucket_size": 12345, "stage3_prefetch_bucket_size": 77},
            "comms_logger": {"enabled": True},
            "flops_profiler": {"enabled": True, "profile_step": 2},
            "dump_state": True,
        },
    )
    compiled(plan, tmp_path)
    config = check_deepspeed(plan, tmp_path, monkeypatch)
    assert (config.train_micro_batch_size_per_gpu, config.train_batch_size) == (2, 8)
    assert (config.zero_config.reduce_bucket_size, config.zero_config.prefetch_bucket_size) == (12345, 77)
    assert config.comms_config.comms_logger.enabled and config.dump_state
    assert (config.flops_profiler_config.enabled, config.flops_profiler_config.profile_step) == (True, 2)


def check_deepspeed(plan, directory, monkeypatch):
    """What DeepSpeed makes of the compiled deepspeed.json is what the plan decides, and what the recipe adds."""
    import torch
    from deepspeed.runtime import config as reader

    monkeypatch.setattr(reader.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(reader.dist, "get_world_size", lambda *_: plan.batch.world_size)
    config = reader.DeepSpeedConfig(str(directory / "deepspeed.json"))
    training, strategy, zero = plan.training, plan.strategy, config.zero_config

    assert config.world_size == plan.batch.world_size  # as the reader checks the batch sizes against it
    assert config.train_micro_batch_size_per_gpu == plan.batch.per_device
    assert config.gradient_accumulation_steps == 1
    assert config.train_batch_size == plan.batch.per_device * plan.batch.world_size
    assert config.gradient_clipping == (training.max_grad_norm or 0.0)
    assert config.bfloat16_config.enabled is (training.precision == "bf16")
    assert config.float16_config.enabled is False
    assert config.grad_accum_dtype == "fp32"
    assert config.communication_data_type == torch.float32
    assert config.zero_allow_untested_optimizer is (training.optim == "sgd")
    assert config.steps_per_print is None and config.optimizer_name is None and config.scheduler_name is None

    assert config.zero_enabled and zero.stage == strategy.zero_stage
    for block, planned in (
        (zero.offload_optimizer, strategy.offload_optimizer),
        (zero.offload_param, strategy.offload_param),
    ):
        assert (block.device if block else "none") == planned
        assert block is None or block.pin_memory is (plan.cluster.device == "cuda")
    assert config.zero_force_ds_cpu_optimizer is (strategy.offload_optimizer == "none")

    blocks = {
        "zero_optimization": zero,
        "comms_logger": getattr(config.comms_config, "comms_logger", None),  # there where it is said
        "flops_profiler": config.flops_profiler_config,
    }
    for key, said in strategy.config.items():
        for name, value in said.items() if isinstance(said, Mapping) else ():
            assert getattr(blocks[key], name.removeprefix("stage3_")) == value
        assert isinstance(said, Mapping) or getattr(config, key) == said
    return config


def told(plan, directory, node: int):
    """What `accelerate launch` makes of the compiled command of a node, and of the file that it names."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    argv = compiled(plan, directory).commands["accelerate"][node]
    arguments = argv[argv.index("launch") + 1 :]
    return _validate_launch_command(launch_command_parser().parse_args(arguments))[0]


def check_accelerate(arguments, plan, directory, node: int):
    engine, strategy, several = plan.strategy.engine, plan.strategy, len(plan.cluster.hosts) > 1
    assert (arguments.num_machines, arguments.num_processes) == (len(plan.cluster.hosts), plan.batch.world_size)
    assert int(arguments.machine_rank) == node
    assert arguments.main_process_ip == (plan.cluster.hosts[0].name if several else "127.0.0.1")
    assert arguments.main_process_port == (port(plan) if several else 0)  # 0: a free one
    assert arguments.rdzv_backend == "static"
    assert arguments.use_cpu is (plan.cluster.device == "cpu")
    assert (arguments.module, arguments.training_script) == (True, "dsft.train")
    assert arguments.training_script_args == [str(directory / "plan.json")]
    chosen = {"ddp": arguments.multi_gpu, "fsdp": arguments.use_fsdp, "deepspeed": arguments.use_deepspeed}
    assert [name for name, on in chosen.items() if on] == ([engine] if engine != "single" else [])
    planned_precision = "no" if plan.training.precision == "fp32" or engine == "deepspeed" else "bf16"
    assert arguments.mixed_precision == planned_precision  # DeepSpeed's is in deepspeed.json
    assert bool(arguments.use_parallelism_config) is bool(strategy.hybrid_shard)
    if engine == "fsdp":
        assert arguments.fsdp_version == 2
        assert arguments.fsdp_reshard_after_forward is strategy.reshard_after_forward
        assert arguments.fsdp_offload_params is strategy.cpu_offload
        assert arguments.fsdp_activation_checkpointing is False
    if engine == "deepspeed":
        assert arguments.deepspeed_config_file == str(directory / "deepspeed.json")
        assert arguments.deepspeed_multinode_launcher == ("standard" if several else None)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), ("cuda", "bf16")])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "fsdp-hybrid"])
def test_accelerate_on_one_machine(make_record, tmp_path, name, device, precision):
    plan = make_record(**STRATEGIES[name], world_size=1 if name == "single" else 4, device=device, precision=precision)
    check_accelerate(told(plan, tmp_path, 0), plan, tmp_path, 0)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("name", SEVERAL)
def test_accelerate_on_several_machines(make_record, tmp_path, name, node):
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    plan = make_record(**STRATEGIES[name], world_size=6, hosts=("node1", "node2", "node3"), precision="bf16")
    arguments = told(plan, tmp_path, node)
    check_accelerate(arguments, plan, tmp_path, node)
    if node > 0:  # the head would look whether the port is free here
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ""  # as launch_command sets it
            command, environment = prepare_deepspeed_cmd_env(arguments)
            assert command is None  # torchrun's own code starts the processes; the other launchers would want ssh
            assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(tmp_path / "deepspeed.json")
        else:
            prepare_multi_gpu_env(arguments)
        assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("3", "2", node)
        assert arguments.rdzv_endpoint == f"node1:{port(plan)}"


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "fsdp" in name])
def test_accelerator_finds_the_fsdp_settings(make_record, tmp_path, monkeypatch, name):
    """In the environment that `accelerate launch` gives to the processes, by the classes that Accelerator reads it with."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import CPUOffloadPolicy

    plan = make_record(**STRATEGIES[name], world_size=4, hosts=("node1", "node2"))
    for key, value in prepare_multi_gpu_env(told(plan, tmp_path, 1)).items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is plan.strategy.reshard_after_forward
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is plan.strategy.cpu_offload
    if plan.strategy.hybrid_shard:
        parallel = ParallelismConfig()
        assert (parallel.dp_replicate_size, parallel.dp_shard_size, parallel.total_size) == (2, 2, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_precision_of_the_shell_does_not_win(make_record, tmp_path, monkeypatch, precision):
    from accelerate.utils.launch import prepare_multi_gpu_env

    plan = make_record("ddp", world_size=4, hosts=("node1", "node2"), precision=precision)
    quiet = compile_plan(plan, "{}\n", tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert compile_plan(plan, "{}\n", tmp_path) == quiet
    environment = prepare_multi_gpu_env(told(plan, tmp_path, 1))
    assert environment["ACCELERATE_MIXED_PRECISION"] == {"fp32": "no", "bf16": "bf16"}[precision]


@pytest.mark.parametrize("name", DEEPSPEED)
def test_accelerator_accepts_the_deepspeed_configuration(make_record, tmp_path, monkeypatch, name):
    """A program that uses Accelerator reads the compiled files too: it refuses a setting that is said in both."""
    from accelerate.commands.config import load_config_from_file
    from accelerate.utils import DeepSpeedPlugin

    plan = make_record(**STRATEGIES[name], precision="bf16")
    compiled(plan, tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    said = [*config.deepspeed_config, *(["mixed_precision"] if config.mixed_precision else [])]
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(said))  # as `accelerate launch` sets it
    plugin = DeepSpeedPlugin(hf_ds_config=config.deepspeed_config["deepspeed_config_file"])
    assert plugin.hf_ds_config.is_zero3() is (plan.strategy.zero_stage == 3)
    assert plugin.hf_ds_config.is_offload() is (
        "offload" in name and plan.strategy.zero_stage > 1
    )  # it looks at 2 and 3
    assert plugin.zero_stage == plan.strategy.zero_stage


@pytest.mark.parametrize(("world_size", "hosts"), [(2, ("localhost",)), (6, ("node1", "node2", "node3"))])
@pytest.mark.parametrize("name", SEVERAL)
def test_torchrun(make_record, tmp_path, name, world_size, hosts):
    plan = make_record(**STRATEGIES[name], world_size=world_size, hosts=hosts)
    check_torchrun(plan, compiled(plan, tmp_path).commands["torchrun"], tmp_path)


def check_torchrun(plan, commands, directory):
    from torch.distributed.run import config_from_args, parse_args

    hosts = plan.cluster.hosts
    assert len(commands) == len(hosts)
    for node, argv in enumerate(commands):
        arguments = parse_args(argv[argv.index("torchrun") + 1 :])
        config, _, command = config_from_args(arguments)
        assert (config.min_nodes, config.max_nodes) == (len(hosts), len(hosts))
        assert config.nproc_per_node * config.min_nodes == plan.batch.world_size
        assert command[-3:] == ["-m", "dsft.train", str(directory / "plan.json")]
        if len(hosts) > 1:
            assert arguments.node_rank == node
            assert (arguments.master_addr, arguments.master_port) == (hosts[0].name, port(plan))
        else:
            assert arguments.standalone


@pytest.mark.parametrize(("world_size", "hosts"), [(2, ("localhost",)), (6, ("node1", "node2", "node3"))])
@pytest.mark.parametrize("name", SEVERAL)
def test_deepspeed_launcher(make_record, tmp_path, name, world_size, hosts):
    plan = make_record(**STRATEGIES[name], world_size=world_size, hosts=hosts)
    (argv,) = compiled(plan, tmp_path).commands["deepspeed"]
    check_deepspeed_launcher(plan, argv, tmp_path)


def check_deepspeed_launcher(plan, argv, directory):
    from deepspeed.launcher.runner import fetch_hostfile, parse_args, parse_inclusion_exclusion

    hosts = plan.cluster.hosts
    arguments = parse_args(list(argv[argv.index("deepspeed") + 1 :]))
    pool = fetch_hostfile(arguments.hostfile)
    assert parse_inclusion_exclusion(pool, arguments.include, arguments.exclude) == {
        f"{host.user}@{host.name}" if host.user else host.name: list(host.devices or range(host.slots))
        for host in hosts
    }
    assert arguments.master_addr == ("127.0.0.1" if len(hosts) == 1 else hosts[0].name)
    assert arguments.master_port == port(plan)
    assert (arguments.module, arguments.user_script) == (True, "dsft.train")
    assert arguments.user_args == [str(directory / "plan.json")]


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=200,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(good())
def test_drawn_recipes(furnished, monkeypatch, recipe):
    loaded, directory = load_recipe(furnished.write("recipe.json", json.dumps(recipe))), furnished.folder / "build"
    plan = make_plan(loaded, versions={}, cwd=furnished.folder, memory=64 << 30)
    commands = compiled(plan, directory).commands
    for node in {0, len(plan.cluster.hosts) - 1}:
        check_accelerate(told(plan, directory, node), plan, directory, node)
    check_torchrun(plan, commands["torchrun"], directory)
    for argv in commands["deepspeed"]:  # none for slots of user@host, which its options cannot name
        check_deepspeed_launcher(plan, argv, directory)
    if plan.strategy.engine == "deepspeed":
        check_deepspeed(plan, directory, monkeypatch)
    else:
        assert not (directory / "deepspeed.json").exists()


def test_the_top_of_deepspeed_json_has_no_key_that_deepspeed_does_not_read(make_record):
    """It would pass it over in silence; inside its blocks it complains by itself."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read = set()

    class Recording(dict):
        def get(self, key, *default):
            read.add(key)
            return super().get(key, *default)

        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

    plan = make_record("deepspeed", world_size=1, zero_stage=3, optim="sgd", offload_optimizer="cpu")
    said = json.loads(compile_plan(plan, "{}\n", "/build").files["deepspeed.json"])
    DeepSpeedConfig(Recording(said))
    assert said.keys() - read == set()


@pytest.mark.parametrize("name", ["localhost", "two_nodes"])
def test_deepspeed_reads_the_hostfiles(name, pytestconfig):
    from deepspeed.launcher.runner import fetch_hostfile

    pool = fetch_hostfile(str(pytestconfig.rootpath / "hostfiles" / name))
    assert pool == {"localhost": {"localhost": 2}, "two_nodes": {"node1": 2, "node2": 2}}[name]
