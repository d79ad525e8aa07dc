"""Every way to start a job brings up the planned processes, from any working directory.

The compiled commands run as they stand; in place of `dsft.train` stands a module of that name that writes down what it
was started with.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsft.compile import compile_plan, write
from dsft.compile.launchers.common import port
from dsft.environment import clean
from dsft.errors import DsftError
from dsft.launch import dry_run, launch, processes
from dsft.plan.record import Host

PROBE = """
import json, os, sys, pathlib
path = pathlib.Path(os.environ["PROBE_OUT"], os.environ.get("RANK", "none"))
path.write_text(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}))
"""

# What a shell may still hold from another job; none of it may reach this one's processes.
STRAY = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "ACCELERATE_MIXED_PRECISION": "fp16", "PET_NNODES": "3"}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """A folder to be in, the stand-in for dsft.train on the path, and where it writes."""
    package = tmp_path / "probe" / "dsft" / "train"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PROBE)
    for name in ("out", "elsewhere", "home"):
        (tmp_path / name).mkdir()
    for name in (*STRAY, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(package.parent.parent))
    monkeypatch.setenv("PROBE_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def _compiled(plan, folder: Path):
    artifacts = compile_plan(plan, "{}\n", folder / "a build")
    write(artifacts, folder / "a build")
    return artifacts, folder / "a build"


def _started(folder: Path) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "out").iterdir())}


def _check(folder: Path, world_size: int) -> dict[str, str]:
    """Exactly the planned ranks, each with its place in the world; returns rank 0's environment."""
    started = _started(folder)
    assert list(started) == [str(rank) for rank in range(world_size)]
    for rank, one in started.items():
        environment = one["environment"]
        assert (environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == (rank, str(world_size))
        assert environment["MASTER_ADDR"] in ("127.0.0.1", "localhost")
        assert environment.get("ACCELERATE_MIXED_PRECISION") != "fp16" and "PET_NNODES" not in environment
        assert environment["MASTER_PORT"] == started["0"]["environment"]["MASTER_PORT"] != STRAY["MASTER_PORT"]
        assert one["argv"] == [str(folder / "a build" / "plan.json")]
        assert one["cwd"] == str(folder / "elsewhere")
    return started["0"]["environment"]


def _run_script(folder: Path, launcher: str, *arguments: str) -> subprocess.Popen:
    environment = {**clean(os.environ), **STRAY, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen([folder / "a build" / "launch" / f"{launcher}.sh", *arguments], env=environment)


def _with_a_free_port(plan):
    """The plan under a name whose port (it follows from the name) nobody uses now."""
    for number in range(100):
        named = dataclasses.replace(plan, name=f"tiny-{number}")
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port(named))) != 0:
                return named
    raise AssertionError("no free port")


@pytest.mark.parametrize("world_size", [1, 3])
def test_local(make_record, probe, monkeypatch, world_size):
    for name, value in STRAY.items():
        monkeypatch.setenv(name, value)
    plan = make_record("ddp", world_size=world_size)
    launch(plan, *_compiled(plan, probe))
    environment = _check(probe, world_size)
    assert environment["LOCAL_WORLD_SIZE"] == str(world_size)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_launch_with_another_launcher(make_record, probe, monkeypatch, launcher):
    for name, value in STRAY.items():
        monkeypatch.setenv(name, value)
    plan = make_record("ddp", launcher=launcher)
    launch(plan, *_compiled(plan, probe))
    _check(probe, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "precision"), [("ddp", "bf16"), ("fsdp", "fp32"), ("deepspeed", "bf16")])
def test_accelerate_script_tells_the_engine(make_record, probe, engine, precision):
    _compiled(make_record(engine, precision=precision), probe)
    assert _run_script(probe, "accelerate").wait() == 0
    environment = _check(probe, 2)
    assert environment.get("ACCELERATE_USE_FSDP") == ("true" if engine == "fsdp" else None)
    assert environment.get("ACCELERATE_USE_DEEPSPEED") == ("true" if engine == "deepspeed" else None)
    if engine == "fsdp":
        assert (environment["FSDP_VERSION"], environment["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")
    if engine == "deepspeed":
        assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(probe / "a build" / "deepspeed.json")
    else:
        assert environment["ACCELERATE_MIXED_PRECISION"] == {"fp32": "no", "bf16": "bf16"}[precision]


@pytest.mark.slow
def test_accelerate_starts_one_process(make_record, probe):
    """Alone, a process gets no rank from accelerate; it is all there is."""
    _compiled(make_record("single", world_size=1), probe)
    assert _run_script(probe, "accelerate").wait() == 0
    ((name, one),) = _started(probe).items()
    assert name == "none" and "WORLD_SIZE" not in one["environment"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_scripts_of_several_nodes_meet(make_record, probe, launcher):
    plan = make_record("ddp", world_size=4, hosts=("localhost", "localhost"))
    _compiled(_with_a_free_port(plan), probe)
    nodes = [_run_script(probe, launcher, node) for node in ("0", "1")]
    assert [node.wait() for node in nodes] == [0, 0]
    started = {rank: one["environment"] for rank, one in _started(probe).items()}
    assert {rank: e["LOCAL_RANK"] for rank, e in started.items()} == {"0": "0", "1": "1", "2": "0", "3": "1"}
    assert {e["WORLD_SIZE"] for e in started.values()} == {"4"}


@pytest.mark.parametrize("launcher", ["local", "torchrun", "accelerate", "deepspeed"])
def test_dry_run_shows_what_would_start(make_record, probe, launcher):
    plan = make_record("ddp", launcher=launcher)
    artifacts, directory = _compiled(plan, probe)
    lines = dry_run(plan, artifacts, directory).splitlines()
    assert not _started(probe)
    if launcher != "local":
        assert [shlex.split(line)[-len(artifacts.commands[launcher][0]) :] for line in lines] == [
            list(artifacts.commands[launcher][0])
        ]
    else:
        for process in [subprocess.Popen(line, shell=True) for line in lines]:
            assert process.wait() == 0
        _check(probe, 2)


@pytest.mark.parametrize("launcher", ["local", "torchrun", "accelerate"])
def test_several_machines_are_refused_with_the_commands(make_record, probe, launcher):
    plan = make_record("ddp", world_size=4, hosts=("node1", "node2"), launcher=launcher)
    artifacts, directory = _compiled(plan, probe)
    with pytest.raises(DsftError) as caught:
        launch(plan, artifacts, directory)
    assert caught.value.exit_code == 2
    for host, argv in zip(("node1", "node2"), artifacts.commands["torchrun" if launcher == "local" else launcher]):
        assert f"{host}: {shlex.join(argv)}" in str(caught.value)


def test_a_plan_for_another_machine_is_refused(make_record, probe):
    plan = make_record("ddp", hosts=("192.0.2.1",))  # kept free for documentation: nobody's address
    artifacts, directory = _compiled(plan, probe)
    with pytest.raises(DsftError, match="192.0.2.1") as caught:
        launch(plan, artifacts, directory)
    assert caught.value.exit_code == 2
    assert not _started(probe)


@pytest.mark.parametrize(
    ("visible", "taken"), [("2,3", False), ("1", False), ("GPU-5a", False), ("0,1,2", True), ("", True)]
)
def test_gpus_chosen_in_the_shell_are_not_passed_over(make_record, probe, monkeypatch, visible, taken):
    """DeepSpeed's launcher counts from 0, whatever CUDA_VISIBLE_DEVICES says; the others leave it to the shell."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = make_record("ddp", launcher="deepspeed", device="cuda")
    if taken:
        assert processes(plan, *_compiled(plan, probe))
    else:
        with pytest.raises(DsftError, match=f"CUDA_VISIBLE_DEVICES is {visible}, .* would take the GPUs 0,1"):
            processes(plan, *_compiled(plan, probe))
    for launcher in ("local", "torchrun", "accelerate"):
        plan = make_record("ddp", launcher=launcher, device="cuda")
        started = processes(plan, *_compiled(plan, probe))
        assert {process.environment["CUDA_VISIBLE_DEVICES"] for process in started} == {visible}


def test_gpus_chosen_in_the_recipe_are_taken(make_record, probe, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for launcher in ("local", "torchrun", "accelerate", "deepspeed"):
        plan = make_record("ddp", launcher=launcher, device="cuda")
        hosts = (Host("localhost", 2, devices=(2, 3)),)
        plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, hosts=hosts))
        for process in processes(plan, *_compiled(plan, probe)):
            said = {"CUDA_VISIBLE_DEVICES=2,3", "localhost:2,3"} & set(process.argv)
            assert said or process.environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_environment_keeps_what_is_the_users():
    mine = {"PATH": "/bin", "HF_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO", "DS_BUILD_OPS": "0"}
    assert clean({**mine, **STRAY, "DS_ACCELERATOR": "cuda", "FSDP_VERSION": "1"}) == mine
