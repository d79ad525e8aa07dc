"""DeepSpeed's launcher, once on the head: it starts the other nodes itself (pdsh), and its hostfile."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dsft.compile.launchers.common import TRAIN, plan_path, port
from dsft.plan.record import Host, Plan

HOSTFILE = "hostfile"


def files(plan: Plan, directory: Path, engine: ModuleType) -> dict[str, str]:
    lines = (f"{_name(host)} slots={max(host.devices or (host.slots - 1,)) + 1}" for host in plan.cluster.hosts)
    return {HOSTFILE: "".join(f"{line}\n" for line in lines)}


def commands(plan: Plan, directory: Path) -> tuple[tuple[str, ...], ...]:
    hosts = plan.cluster.hosts
    if len(hosts) > 1:
        head = ("--master_addr", hosts[0].name)
    else:
        # One machine needs no ssh: without these two DeepSpeed asks the host for its address over ssh.
        head = ("--no_ssh_check", "--master_addr", "127.0.0.1")
    if any(host.devices not in (None, tuple(range(host.slots))) for host in hosts):
        if any(host.user for host in hosts):
            return ()  # --include parts hosts by @, and could not name user@host
        named = (f"{host.name}:{','.join(map(str, host.devices))}" for host in hosts)
        head = ("--include", "@".join(named), *head)
    # The rank is in the environment; DeepSpeed would also add a --local_rank argument.
    options = ("--master_port", str(port(plan)), "--no_local_rank", "--module")
    return (("deepspeed", "--hostfile", str(directory / HOSTFILE), *head, *options, TRAIN, plan_path(directory)),)


def _name(host: Host) -> str:
    return f"{host.user}@{host.name}" if host.user else host.name
