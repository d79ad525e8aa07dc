"""torchrun, once on every node."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dsft.compile.launchers.common import TRAIN, on_devices, plan_path, port
from dsft.plan.record import Plan


def files(plan: Plan, directory: Path, engine: ModuleType) -> dict[str, str]:
    return {}


def commands(plan: Plan, directory: Path) -> tuple[tuple[str, ...], ...]:
    hosts = plan.cluster.hosts
    processes = ("--nproc-per-node", str(plan.cluster.processes_per_node))
    train = ("-m", TRAIN, plan_path(directory))
    if len(hosts) == 1:
        return ((*on_devices(plan, hosts[0]), "torchrun", "--standalone", *processes, *train),)
    head = ("--master-addr", hosts[0].name, "--master-port", str(port(plan)))
    nodes = ("--nnodes", str(len(hosts)))
    return tuple(
        (*on_devices(plan, host), "torchrun", *nodes, "--node-rank", str(rank), *processes, *head, *train)
        for rank, host in enumerate(hosts)
    )
