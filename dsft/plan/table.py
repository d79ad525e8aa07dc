"""The alternatives of a job side by side, as text and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from dsft.plan.choose import Comparison
from dsft.plan.describe import MOMENTS, count, shown_size, strategy_name
from dsft.plan.outlook import RESERVE, Outlook, fastest

HEAD = ("strategy", "recompute", "rows x passes", "memory", "part", "s/update", "host memory", "")


def table(comparison: Comparison) -> str:
    """What fits and what does not, one line a strategy; the parts of the memory and the reason of the choice."""
    job, choice = comparison.job, comparison.choice
    facts, cluster = job.facts, job.cluster
    machines = count(len(cluster.hosts), "machine", "machines")
    processes = count(cluster.processes_per_node, "process", "processes")
    work = f"{job.method.type}, {job.training.precision}, {job.global_batch_size} rows of up to {job.data.max_length} tokens"
    lines = [
        f"{facts.architecture}, {facts.parameters / 1e9:.2f} billion parameters; {work}",
        f"{machines} with {processes} each on {cluster.gpu or 'cpu'}; {shown_size(job.capacity)} a process, {RESERVE:.0%} to stay free",
        "",
    ]
    rows = [
        HEAD,
        *(_row(each, job.capacity, bool(choice) and each == choice.outlook) for each in best_of_each(comparison)),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    for row in rows:
        cells = (
            text.ljust(width) if at < 3 else text.rjust(width) for at, (text, width) in enumerate(zip(row[:7], widths))
        )
        mark = "> " if row[7] == "chosen" else "  "
        lines.append((mark + "  ".join(cells) + ("" if row[7] == "chosen" else f"  {row[7]}")).rstrip())
    if choice:
        parts = ", ".join(f"{name} {shown_size(size)}" for name, size in _largest_first(choice.outlook))
        lines += ["", f"Memory of a process under the line marked >, {MOMENTS[choice.outlook.memory.moment]}: {parts}."]
        if choice.reason:
            lines.append(f"Chosen: {choice.reason}.")
    lines.append("All of this is estimated; docs/planner.md says how and how well.")
    return "\n".join(lines)


def best_of_each(comparison: Comparison) -> Iterator[Outlook]:
    """Of each strategy the way that would be taken: the fastest that fits, or what needs least; and the one chosen."""
    by_strategy: dict[str, list[Outlook]] = {}
    for each in comparison.outlooks:
        by_strategy.setdefault(strategy_name(each.way.strategy), []).append(each)
    chosen = comparison.choice and comparison.choice.outlook
    for name, outlooks in by_strategy.items():
        best = fastest(outlooks) or min(outlooks, key=lambda each: each.memory.device)
        if chosen and strategy_name(chosen.way.strategy) == name:
            yield chosen
            if best == chosen:
                continue
        yield best
    if chosen and strategy_name(chosen.way.strategy) not in by_strategy:
        yield chosen  # one that only a recipe asks for


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Every way, with bytes and seconds."""
    job, choice = comparison.job, comparison.choice
    return {
        "model": dataclasses.asdict(job.facts),
        "cluster": dataclasses.asdict(job.cluster),
        "capacity_bytes": job.capacity,
        "reserve": RESERVE,
        "alternatives": [_data(each) for each in comparison.outlooks],
        "chosen": _data(choice.outlook) if choice else None,
        "reason": choice.reason if choice else None,
    }


def _data(outlook: Outlook) -> dict[str, Any]:
    memory = outlook.memory
    return {
        **dataclasses.asdict(outlook.way),
        "memory": dict(memory.parts),
        "moment": memory.moment,
        "device_bytes": memory.device,
        "host_bytes": memory.host,
        "disk_bytes": memory.disk,
        "seconds_per_update": outlook.seconds,
        "cost": dataclasses.asdict(outlook.cost) if outlook.cost else None,
        "fits": outlook.fits,
        "lacks": outlook.lacks,
    }


def _row(outlook: Outlook, capacity: int, chosen: bool) -> tuple[str, ...]:
    way, memory = outlook.way, outlook.memory
    return (
        strategy_name(way.strategy),
        "yes" if way.gradient_checkpointing else "no",
        f"{way.batch.per_device} x {way.batch.accumulation}",
        shown_size(memory.device),
        f"{memory.device / capacity:.0%}",
        "" if outlook.seconds is None else f"{outlook.seconds:.2f}",
        shown_size(memory.host) if memory.host else "",
        "chosen" if chosen else _lack(outlook, capacity),
    )


def _lack(outlook: Outlook, capacity: int) -> str:
    if outlook.lacks == "device memory" and outlook.memory.device <= capacity:
        return f"leaves less than {RESERVE:.0%} free"
    return f"too little {outlook.lacks}" if outlook.lacks else ""


def _largest_first(outlook: Outlook) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in outlook.memory.parts.items() if size), key=lambda item: -item[1])
