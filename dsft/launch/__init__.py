"""Artifacts into running processes on this machine."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from dsft.compile import Artifacts
from dsft.compile.launchers.common import TRAIN, plan_path, visible_devices
from dsft.environment import clean
from dsft.errors import refused
from dsft.launch.supervise import Process, supervise
from dsft.plan.record import Plan


def launch(plan: Plan, artifacts: Artifacts, directory: str | Path) -> None:
    """Run the job compiled into `directory` on this machine, until it has ended.

    Raises DsftError: exit code 2 where the plan cannot be started from here, otherwise as `supervise` does.
    """
    supervise(processes(plan, artifacts, directory))


def dry_run(plan: Plan, artifacts: Artifacts, directory: str | Path) -> str:
    """What `launch` would start: a line a process, to be read or pasted into a shell."""
    lines = []
    for process in processes(plan, artifacts, directory):
        added = [f"{name}={value}" for name, value in process.environment.items() if os.environ.get(name) != value]
        lines.append(shlex.join(["env", *added, *process.argv] if added else process.argv) + "\n")
    return "".join(lines)


def processes(plan: Plan, artifacts: Artifacts, directory: str | Path) -> tuple[Process, ...]:
    """The processes that this machine starts for the plan."""
    _check_hosts(plan, artifacts)
    _check_devices(plan)
    environment = clean(os.environ)
    if plan.launcher == "local":
        argv = (sys.executable, "-m", TRAIN, plan_path(Path(directory)))
        devices = visible_devices(plan, plan.cluster.hosts[0])
        return ranks(argv, plan.batch.world_size, environment | devices)
    (argv,) = artifacts.commands[plan.launcher]
    # The programs of the Python that runs this, whether or not its environment is activated.
    path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath)))
    return (Process(argv[0], argv, {**environment, "PATH": path}),)


def ranks(argv: tuple[str, ...], world_size: int, environment: Mapping[str, str]) -> tuple[Process, ...]:
    """`argv` as `world_size` ranks that meet at a free port of this machine."""
    shared = {
        **environment,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    return tuple(
        Process(f"rank {rank} of {world_size}", argv, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    )


def _check_hosts(plan: Plan, artifacts: Artifacts) -> None:
    """Refuse a plan whose processes `dsft launch` cannot start from this machine, with what to run by hand."""
    hosts = plan.cluster.hosts
    if len(hosts) == 1 and not _is_this_machine(hosts[0].name):
        raise refused(
            "other-machine",
            f"the plan is for {hosts[0].name}, and this is {socket.gethostname()}",
            help=f"run it on {hosts[0].name}",
        )
    if len(hosts) > 1 and plan.launcher != "deepspeed":  # which starts the other nodes itself
        commands = artifacts.commands["torchrun" if plan.launcher == "local" else plan.launcher]
        lines = (f"\n    {host.name}: {shlex.join(argv)}" for host, argv in zip(hosts, commands))
        raise refused(
            "several-machines",
            f"launcher {plan.launcher!r} starts processes on this machine only, and the plan has {len(hosts)}",
            help="run on each machine" + "".join(lines),
        )


def _check_devices(plan: Plan) -> None:
    """Refuse GPUs chosen in the shell where DeepSpeed's launcher would take the first ones all the same."""
    host, visible = plan.cluster.hosts[0], os.environ.get("CUDA_VISIBLE_DEVICES")
    if plan.launcher != "deepspeed" or plan.cluster.device != "cuda" or host.devices is not None or not visible:
        return
    first = [str(device) for device in range(host.slots)]
    if visible.split(",")[: host.slots] != first:
        raise refused(
            "contradiction",
            f"CUDA_VISIBLE_DEVICES is {visible}, and DeepSpeed's launcher would take the GPUs {','.join(first)}",
            help='choose them in the recipe, as in "include": "localhost:2,3" in "cluster", or take another launcher',
        )


def _is_this_machine(name: str) -> bool:
    """Whether `name` is one of this machine's own addresses: only those can be bound."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
