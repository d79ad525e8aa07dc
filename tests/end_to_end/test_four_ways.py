"""Every way to start a compiled job trains the same: accelerate, deepspeed, torchrun and dsft launch."""

from __future__ import annotations

import os
import shutil
import socket

import pytest
import ssh
from jobs import metrics

pytestmark = pytest.mark.slow


# What a shell may still hold of another job.
STRAY = {
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_OFFLOAD_PARAMS": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "PET_NNODES": "3",
    "WORLD_SIZE": "9",
    "RANK": "7",
    "LOCAL_RANK": "3",
    "MASTER_PORT": "1",
}


def unavailable(reason: str):
    """What this test needs is not there: a gap in CI, a choice elsewhere."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def ssh_environment(shop, tmp_path_factory) -> dict[str, str]:
    """The environment of a machine that reaches itself over ssh without a password."""
    if not (ssh.find_sshd() and shutil.which("ssh") and shutil.which("ssh-keygen")):
        unavailable("deepspeed asks localhost over ssh first: apt-get install openssh-server openssh-client")
    programs = ssh.install(tmp_path_factory.mktemp("ssh"))
    return shop.environment | {"PATH": f"{programs}{os.pathsep}{shop.environment['PATH']}"}


def check(shop, launched, name: str, engine: str):
    """The job trained as the one that `dsft launch` ran."""
    ours, theirs = metrics(shop.output(name)), metrics(launched(engine).output)
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in theirs]
    assert [entry["update"] for entry in ours] == [0, 1, 2, 3, 4, 4]
    for mine, other in zip(ours, theirs):
        for key in mine.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-6), key


@pytest.mark.parametrize(
    ("engine", "launcher"),
    [("ddp", "local"), ("ddp", "torchrun"), ("ddp", "accelerate"), ("ddp", "deepspeed"), ("zero2", "torchrun")],
)
def test_compiled_script(shop, launched, engine, launcher):
    """launch/*.sh as written, from a shell that holds settings of another job; deepspeed's goes without ssh."""
    name = f"{engine}-{launcher}-script"
    build = shop.compile(name, engine)
    shop.done(build / "launch" / f"{launcher}.sh", env=shop.environment | STRAY)
    check(shop, launched, name, engine)


@pytest.mark.parametrize("engine", ["fsdp", "zero2"])
def test_accelerate_launch(shop, launched, engine):
    name = f"{engine}-accelerate"
    shop.compile(name, engine)
    command = f"accelerate launch --config_file build/{name}/accelerate.yaml -m dsft.train build/{name}/plan.json"
    shop.done(*command.split())
    check(shop, launched, name, engine)


@pytest.mark.parametrize("engine", ["zero2"])
def test_deepspeed(shop, launched, ssh_environment, engine):
    """With a hostfile alone, DeepSpeed asks the machine for its name and address over ssh, and always takes one port."""
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", 29500)) == 0:
            unavailable("port 29500, which deepspeed takes where none is given, is in use")
    name = f"{engine}-deepspeed"
    shop.compile(name, engine)
    command = f"deepspeed --hostfile hostfiles/localhost --module dsft.train build/{name}/plan.json"
    result = shop.run(*command.split(), env=ssh_environment)
    assert result.returncode == 0, result.stdout + result.stderr
    check(shop, launched, name, engine)
