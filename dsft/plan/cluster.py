"""The machines: a hostfile in DeepSpeed's format, or this machine alone."""

from __future__ import annotations

import re
from pathlib import Path

from dsft.errors import DsftError, Problem, Where, refused
from dsft.plan.record import Cluster, Host
from dsft.recipe.load import read_text
from dsft.recipe.record import Recipe

_LINE = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?(?P<name>[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?)"
    r"[ \t]+slots=(?P<slots>[0-9]{1,6})"
)
_LOOPBACK = re.compile(r"localhost|127\.0\.0\.1")


def plan_cluster(recipe: Recipe) -> Cluster:
    """Raises DsftError for a hostfile with mistakes, machines of unequal size, or more processes than `single` has."""
    said = recipe.get("cluster", "processes_per_node")
    hostfile = recipe.get("cluster", "hostfile")
    if hostfile is None:
        hosts = (Host("localhost", said or 1),)
    else:
        hosts = read_hostfile(Path(hostfile), recipe.where("cluster", "hostfile"))
        if said not in (None, hosts[0].slots):
            raise refused(
                "contradiction",
                f"processes_per_node is {said}, and the hostfile says slots={hosts[0].slots}",
                where=recipe.where("cluster", "processes_per_node"),
                help='remove "processes_per_node": the hostfile says it',
            )
    world_size = len(hosts) * hosts[0].slots
    if recipe.get("strategy", "type") == "single" and world_size > 1:
        raise refused(
            "contradiction",
            f'"single" is one process, and the cluster has {len(hosts)}*{hosts[0].slots} = {world_size}',
            where=recipe.where("strategy", "type"),
            help='write "ddp", "fsdp" or "deepspeed", or make "processes_per_node" 1',
        )
    return Cluster(recipe.get("cluster", "device"), hosts, hosts[0].slots, recipe.get("cluster", "timeout_seconds"))


def read_hostfile(path: Path, asked_by: Where | None = None) -> tuple[Host, ...]:
    """The hosts in a hostfile, all with the same slots. Raises DsftError with every wrong line."""
    text = read_text(path, str(path), what="hostfile", asked_by=asked_by)
    hosts: list[Host] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}  # host -> the line that says it
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = Where(str(path), number, line.index(content) + 1, line, len(content))
        host = _host(content)
        if isinstance(host, str):
            problems.append(
                Problem("hostfile-syntax", host, where, "write: host slots=processes, as in: node1 slots=8")
            )
            continue
        canonical = (
            _LOOPBACK.sub("localhost", host.name.lower())
            if _LOOPBACK.fullmatch(host.name.lower())
            else host.name.lower()
        )
        if canonical in seen:
            problems.append(
                Problem(
                    "hostfile-duplicate",
                    f"{host.name} is the same host as in line {seen[canonical]}",
                    where,
                    "write each host once, with all its slots",
                )
            )
        elif host.slots < 1:
            problems.append(
                Problem(
                    "out-of-range", f"{host.name} has no slots", where, "write at least slots=1, or remove the line"
                )
            )
        elif hosts and host.slots != hosts[0].slots:
            problems.append(
                Problem(
                    "contradiction",
                    f"{host.name} has {host.slots} slots, and {hosts[0].name} has "
                    f"{hosts[0].slots}: all machines need as many",
                    where,
                )
            )
        else:
            hosts.append(host)
        seen.setdefault(canonical, number)
    if not hosts and not problems:
        problems.append(
            Problem(
                "hostfile-empty",
                f"{path} names no host",
                asked_by or Where(str(path)),
                "write a line for each machine: node1 slots=8",
            )
        )
    if problems:
        raise DsftError(problems)
    return tuple(hosts)


def _host(content: str) -> Host | str:
    """The host that a line says, or what is wrong with the line."""
    match = _LINE.fullmatch(content)
    if match:
        return Host(match["name"], int(match["slots"]), match["user"])
    name, _, rest = content.partition(" ")
    if name.count(":") > 1:
        return "an IPv6 address; launchers take it in different ways, so give the host a name"
    if re.fullmatch(r"\s*slots=[0-9]+\s+\S.*", rest):
        return f"more than slots=… behind {name}: nothing else is read"
    if "slots" not in rest:
        return f"no slots=… behind {name}"
    return "not a host and its slots"
