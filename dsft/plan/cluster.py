"""The machines: a hostfile in DeepSpeed's format, or this machine alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from dsft.errors import DsftError, Problem, Where, refused
from dsft.plan.attempt import Attempt
from dsft.plan.gpus import GPUS
from dsft.plan.record import Cluster, Host
from dsft.recipe.load import read_text
from dsft.recipe.record import Recipe

_LINE = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?(?P<name>[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?)"
    r"[ \t]+slots=(?P<slots>[0-9]{1,6})"
)
MOST_SLOTS = 1024  # as the schema has it of processes_per_node
_LOOPBACK = ("localhost", "127.0.0.1")
_FORM = "a line is: HOST slots=PROCESSES, as in: node1 slots=8"


def plan_hosts(recipe: Recipe) -> tuple[Host, ...]:
    """All with the same slots, the processes on each. Raises DsftError for a hostfile with mistakes, for machines or
    slots that it does not have, and for a recipe that says otherwise."""
    attempt = Attempt()
    hosts = attempt(_selected, recipe, attempt(_named, recipe))
    attempt(_check_reachable, recipe, hosts)
    attempt(_check_processes, recipe, hosts)
    attempt(_check_nodes, recipe, hosts)
    attempt.raise_problems()
    return hosts


def _named(recipe: Recipe) -> tuple[Host, ...]:
    """The hosts of the hostfile, or this machine."""
    hostfile = recipe.get("cluster", "hostfile")
    if hostfile is None:
        return (Host("localhost", recipe.get("cluster", "processes_per_node") or 1),)
    selects = recipe.said("cluster", "include") or recipe.said("cluster", "exclude")
    return read_hostfile(Path(hostfile), recipe.where("cluster", "hostfile"), alike=not selects)


def _selected(recipe: Recipe, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """The hosts and slots that `include` names, or those that `exclude` does not, in the hostfile's order."""
    include, exclude = recipe.get("cluster", "include"), recipe.get("cluster", "exclude")
    if not include and not exclude:
        return hosts
    field = "include" if include is not None else "exclude"
    where = recipe.where("cluster", field)
    if include is not None and exclude is not None:
        raise refused("said-twice", "both include and exclude are said", where=where, help="keep one of them")
    named = _slots(include or exclude, {host.name: host.slots for host in hosts}, where)
    chosen = []
    for host in hosts:
        if include is not None:
            devices = named.get(host.name, frozenset())
        else:
            devices = frozenset(range(host.slots)) - named.get(host.name, frozenset())
        if devices:
            chosen.append(dataclasses.replace(host, slots=len(devices), devices=tuple(sorted(devices))))
    if not chosen:
        raise refused("selection-empty", f"{field} leaves no slot of any machine", where=where)
    for host in chosen:
        if host.slots != chosen[0].slots:
            raise refused(
                "contradiction",
                f"{host.name} is left with {host.slots} slots, and {chosen[0].name} with {chosen[0].slots}",
                where=where,
                help="all machines need the same number of slots",
            )
    return tuple(chosen)


def _check_reachable(recipe: Recipe, hosts: tuple[Host, ...]) -> None:
    """Every machine connects to the first by its name in the hostfile."""
    itself = [host.name for host in hosts if host.name.lower() == "localhost" or host.name.startswith("127.")]
    if itself and len(hosts) > 1:
        raise refused(
            "contradiction",
            f"{itself[0]} is each machine itself, and the hostfile has {len(hosts)}",
            where=recipe.where("cluster", "hostfile"),
            help="name the machine as the others reach it",
        )


def _check_processes(recipe: Recipe, hosts: tuple[Host, ...]) -> None:
    if recipe.get("cluster", "hostfile") is None:
        return
    said = recipe.get("cluster", "processes_per_node")
    if said not in (None, hosts[0].slots):
        by = "the selection leaves" if _selects(recipe) else "the hostfile says"
        raise refused(
            "contradiction",
            f"processes_per_node is {said}, and {by} slots={hosts[0].slots}",
            where=recipe.where("cluster", "processes_per_node"),
            help='remove "processes_per_node": the hostfile says it',
        )


def _check_nodes(recipe: Recipe, hosts: tuple[Host, ...]) -> None:
    nodes, hostfile = recipe.get("cluster", "nodes"), recipe.get("cluster", "hostfile")
    if nodes not in (None, len(hosts)):
        names = "the selection leaves" if _selects(recipe) else "the hostfile names"
        named = f"{names} {len(hosts)}" if hostfile else "without a hostfile there is this machine alone"
        help = 'remove "nodes": the hostfile says it' if hostfile else 'name them in a file, and the file in "hostfile"'
        raise refused(
            "contradiction", f"nodes is {nodes}, and {named}", where=recipe.where("cluster", "nodes"), help=help
        )


def _selects(recipe: Recipe) -> bool:
    return any(recipe.get("cluster", field) for field in ("include", "exclude"))


def _slots(text: str, known: Mapping[str, int], where: Where) -> dict[str, frozenset[int]]:
    """The slots named in `text`, DeepSpeed's "host:0,1@host2": a host alone means all of its slots."""
    named: dict[str, frozenset[int]] = {}
    problems: list[Problem] = []
    unknown: list[str] = []
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if not name or colon and not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", numbers):
            help = "HOST for all of its slots, HOST:0,1 for some of them, more hosts behind an @"
            problems.append(Problem("selection-syntax", f'"{part}" does not name a host and its slots', where, help))
            continue
        if name not in known:
            unknown.append(name)
            continue
        slots = frozenset(int(number) for number in numbers.split(",")) if colon else frozenset(range(known[name]))
        absent = sorted(slot for slot in slots if slot >= known[name])
        if absent:
            has = "0" if known[name] == 1 else f"0 to {known[name] - 1}"
            problems.append(Problem("selection-slot", f"{name} has no slot {absent[0]}", where, f"{name} has {has}"))
        named[name] = named.get(name, frozenset()) | slots
    if unknown:
        is_none = "is none" if len(unknown) == 1 else "are none"
        message = f"{_few(unknown)} {is_none} of the hosts"
        problems.append(Problem("selection-host", message, where, f"known are {_few(list(known))}"))
    if problems:
        raise DsftError(problems)
    return named


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def plan_cluster(recipe: Recipe, hosts: tuple[Host, ...]) -> Cluster:
    """Raises DsftError for more processes than the strategy can have, and for slots that the launcher cannot name."""
    attempt = Attempt()
    attempt(_check_single, recipe, hosts)
    attempt(_check_launcher, recipe, hosts)
    attempt.raise_problems()
    device, timeout, gpu = (recipe.get("cluster", field) for field in ("device", "timeout_seconds", "gpu"))
    return Cluster(device, hosts, hosts[0].slots, timeout, gpu)


def _check_single(recipe: Recipe, hosts: tuple[Host, ...]) -> None:
    slots = hosts[0].slots
    if recipe.get("strategy", "type") == "single" and len(hosts) * slots > 1:
        raise refused(
            "contradiction",
            f'"single" is one process, and the cluster has {len(hosts)}*{slots} = {len(hosts) * slots}',
            where=recipe.where("strategy", "type"),
            help='write "ddp", "fsdp" or "deepspeed", or make "processes_per_node" 1',
        )


def _check_launcher(recipe: Recipe, hosts: tuple[Host, ...]) -> None:
    some_slots = any(host.devices not in (None, tuple(range(host.slots))) for host in hosts)
    if recipe.get("launcher", "type") == "deepspeed" and some_slots and any(host.user for host in hosts):
        raise refused(
            "incompatible",
            "DeepSpeed's launcher cannot select slots of USER@HOST",
            where=recipe.where("launcher", "type"),
            help="leave the user out of the hostfile and name it in ~/.ssh/config, or take another launcher",
        )


def check_precision(recipe: Recipe) -> None:
    """Raises DsftError for a GPU without the precision."""
    gpu = recipe.get("cluster", "gpu")
    if gpu and not GPUS[gpu].bf16 and recipe.get("training", "precision") == "bf16":
        raise refused(
            "precision-device",
            f"{gpu} does not compute in bf16",
            where=recipe.where("training", "precision"),
            help='write "precision": "fp32", or take a newer GPU (fp16 is not offered: it overflows without loss scaling)',
        )


def read_hostfile(path: Path, asked_by: Where | None = None, *, alike: bool = True) -> tuple[Host, ...]:
    """The hosts in a hostfile, all with the same slots if they are to be `alike`. Raises DsftError with every wrong line."""
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
        elif host.slots > MOST_SLOTS:
            message = f"{host.name} has {host.slots} slots: at most {MOST_SLOTS} processes on a machine"
            problems.append(Problem("out-of-range", message, where, "a slot is a GPU, or a process on CPUs"))
        elif alike and hosts and host.slots != hosts[0].slots:
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
