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
_LOOPBACK = ("localhost", "127.0.0.1")
_FORM = "a line is: HOST slots=PROCESSES, as in: node1 slots=8"


def plan_hosts(recipe: Recipe) -> tuple[Host, ...]:
    """All with the same slots, the processes on each. Raises DsftError for a hostfile with mistakes."""
    said = recipe.get("cluster", "processes_per_node")
    hostfile = recipe.get("cluster", "hostfile")
    if hostfile is None:
        return (Host("localhost", said or 1),)
    hosts = read_hostfile(Path(hostfile), recipe.where("cluster", "hostfile"))
    if said not in (None, hosts[0].slots):
        raise refused(
            "contradiction",
            f"processes_per_node is {said}, and the hostfile says slots={hosts[0].slots}",
            where=recipe.where("cluster", "processes_per_node"),
            help='remove "processes_per_node": the hostfile says it',
        )
    return hosts


def plan_cluster(recipe: Recipe, hosts: tuple[Host, ...]) -> Cluster:
    """Raises DsftError for more processes than the strategy can have."""
    slots = hosts[0].slots
    if recipe.get("strategy", "type") == "single" and len(hosts) * slots > 1:
        raise refused(
            "contradiction",
            f'"single" is one process, and the cluster has {len(hosts)}*{slots} = {len(hosts) * slots}',
            where=recipe.where("strategy", "type"),
            help='write "ddp", "fsdp" or "deepspeed", or make "processes_per_node" 1',
        )
    return Cluster(recipe.get("cluster", "device"), hosts, slots, recipe.get("cluster", "timeout_seconds"))


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
        match = _LINE.fullmatch(content)
        if not match:
            problems.append(Problem("hostfile-syntax", _not_a_host(content), where, _FORM))
            continue
        host = Host(match["name"], int(match["slots"]), match["user"])
        known_as = "localhost" if host.name.lower() in _LOOPBACK else host.name.lower()
        if known_as in seen:
            message = f"{host.name} is the same host as in line {seen[known_as]}"
            problems.append(Problem("hostfile-duplicate", message, where, "write each host once, with all its slots"))
        elif host.slots < 1:
            problems.append(Problem("out-of-range", f"{host.name} has no slots", where, "remove the line"))
        elif hosts and host.slots != hosts[0].slots:
            message = f"{host.name} has {host.slots} slots, and {hosts[0].name} has {hosts[0].slots}"
            problems.append(Problem("contradiction", message, where, "all machines need the same number of slots"))
        else:
            hosts.append(host)
        seen.setdefault(known_as, number)
    if not hosts and not problems:
        problems.append(Problem("hostfile-empty", f"{path} names no host", asked_by or Where(str(path)), _FORM))
    if problems:
        raise DsftError(problems)
    return tuple(hosts)


def _not_a_host(content: str) -> str:
    """What is wrong with a line."""
    name, *rest = content.split()
    if name.count(":") > 1:
        return "an IPv6 address, which launchers do not read alike: give the host a name"
    if not rest or not rest[0].startswith("slots"):
        return f"no slots=… behind {name}"
    if len(rest) > 1 and re.fullmatch("slots=[0-9]+", rest[0]):
        return f"{rest[1]!r} behind the slots, where nothing else is read"
    return "not a host and its slots"
