"""Which way to do a job: of all that the recipe leaves open, the fastest that fits in memory.

What it needs and how long it takes is estimated (dsft.plan.memory, dsft.plan.cost); where the model's files or the kind
of GPU are not known, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsft.errors import Problem, Where, refused
from dsft.plan.describe import shown_size, strategy_name
from dsft.plan.outlook import ALIKE, RESERVE, Outlook, fastest, host_memory, outlooks
from dsft.plan.remedies import MOST_MACHINES, remedies
from dsft.plan.ways import Said, Way
from dsft.plan.workload import Job

DOUBT = 1.20  # a way that the recipe spells out is refused only where what it needs at least is above this part of the memory: estimates err


@dataclass(frozen=True)
class Choice:
    """The way taken; what is expected of it, where that is known; why that one, where there are several."""

    way: Way
    outlook: Outlook | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Every way to do a job, and the one that its recipe gets; None where what it says does not fit."""

    job: Job
    outlooks: tuple[Outlook, ...]
    choice: Choice | None


def choose(job: Job, said: Said, *, where: Where, warn: Callable[[Problem], None]) -> Choice:
    """The way to go, of those that the recipe has `said` or left open; `where` it says the strategy.

    Raises DsftError where none fits, with what would; warns where one does, but leaves less than the reserve.
    """
    possible = outlooks(job, said)
    best = fastest(possible)
    if best:
        return Choice(best.way, best, _reason(best, possible))
    least, message, needed = _nearest(job, possible)
    help = _help(job, said, least)
    # What this machine has says little of a CPU job, which may run on another one.
    if (job.cluster.gpu or job.host_memory is not None) and needed > (DOUBT if said.strategy else 1.0):
        raise refused("does-not-fit", message, where=where, help=help)
    warn(Problem("memory-tight", message, where, help, severity="warning"))
    return Choice(least.way, least, "it needs least, and none leaves the reserve free" if len(possible) > 1 else None)


def _help(job: Job, said: Said, least: Outlook) -> str:
    would_fit = list(remedies(job, said))
    machines = f"up to {MOST_MACHINES} such machines, " if job.cluster.gpu else ""
    help = f"nothing that was tried would fit: {machines}shorter rows, LoRA; take a smaller model"
    if would_fit:
        help = f"this would fit: {'; or '.join(would_fit)}"
    if least.lacks == "host memory" and job.host_memory is None:
        help = f'if the machines have more, say it in "cluster.memory_gib"; {help}'
    return help


def _nearest(job: Job, outlooks: list[Outlook]) -> tuple[Outlook, str, float]:
    """The way that is nearest to fitting; what it lacks; the part of the memory there that it needs."""
    on_device = [each for each in outlooks if each.lacks == "host memory"]
    if on_device:
        least = min(on_device, key=lambda each: each.memory.host)
        needed = surely = least.memory.host
        there = host_memory(job)
        gpus = f"machines with {job.cluster.processes_per_node} {job.cluster.gpu} are taken to have"
        has = f"{'the recipe says' if job.host_memory is not None else gpus} {shown_size(there)}"
        lacking = f"needs about {shown_size(needed)} of each machine's own memory; {has}, of which {RESERVE:.0%} should stay free"
    else:
        least = min(outlooks, key=lambda each: each.memory.device)
        needed, surely, there = least.memory.device, least.memory.least, job.capacity
        has = f"{job.cluster.gpu} has {shown_size(there)}"
        if not job.cluster.gpu:
            says = "this machine has" if job.host_memory is None else "the recipe says"
            has = f"{says} {shown_size(there)} for each"
        cached = f" ({shown_size(surely)} without what the allocator keeps for later)" if surely < needed else ""
        lacking = f"needs about {shown_size(needed)} a process{cached}; {has}, of which {RESERVE:.0%} should stay free"
    return least, f"{strategy_name(least.way.strategy)} {lacking}", surely / there


def _reason(best: Outlook, outlooks: list[Outlook]) -> str | None:
    """Why `best`, in what the recipe leaves open."""
    names = dict.fromkeys(strategy_name(each.way.strategy) for each in outlooks)
    if len(names) == 1:
        kept = [each for each in outlooks if not each.way.gradient_checkpointing]
        if best.way.gradient_checkpointing and kept:
            return "activations are recomputed, since kept they do not fit"
        return None
    fitting = {strategy_name(each.way.strategy) for each in outlooks if each.fits}
    too_large = [name for name in names if name not in fitting]
    rule = "the simplest that fits" if best.seconds is None else f"within {ALIKE:.0%} of the fastest that fits"
    return rule + (f"; too large: {'; '.join(too_large)}" if too_large else "")
