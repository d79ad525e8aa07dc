"""torchrun, once on every node."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dsft.compile.launchers.common import TRAIN, plan_path, port
from dsft.plan.record import Plan


def files(plan: Plan, directory: Path, engine: ModuleType) -> dict[str, str]:
    return {}


def commands(plan: Plan, directory: Path) -> tuple[tuple[str, ...], ...]:
    hosts = plan.cluster.hosts
    processes = ("--nproc-per-node", str(plan.cluster.processes_per_node))
    train = ("-m", TRAIN, plan_path(directory))
    if len(hosts) == 1:
        return (("torchrun", "--standalone", *processes, *train),)
    head = ("--master-addr", hosts[0].name, "--master-port", str(port(plan)))
    return tuple(
        ("torchrun", "--nnodes", str(len(hosts)), "--node-rank", str(rank), *processes, *head, *train)
        for rank in range(len(hosts))
    )
