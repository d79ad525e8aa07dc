"""Which way to do a job: of all that the recipe leaves open, the fastest that fits in memory.

A way is a strategy, gradient checkpointing on or off, and a division of the global batch: it changes the cost and not
the result. What it needs and how long it takes is estimated (dsft.plan.memory, dsft.plan.cost); where the model's files
or the kind of GPU are not known, nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dsft.errors import Problem, Where, refused
from dsft.plan import cost, record
from dsft.plan.batch import divisions
from dsft.plan.describe import batch_line, count, gib, strategy_name
from dsft.plan.facts import ModelFacts
from dsft.plan.gpus import GPUS
from dsft.plan.memory import Memory, estimate, workload_of
from dsft.recipe.record import Recipe, Unusable

RESERVE = 0.10  # of a device's memory, left free for what estimates miss
DOUBT = 1.20  # a way that the recipe spells out is refused only above this part of the memory: estimates err
ALIKE = 0.10  # of an update's time: estimates do not tell smaller differences
HOST_PER_GPU = (
    4  # times its GPUs' memory: as much as machines have at most (DGX H100: 2048 GB to 640); auto goes no further
)
MOST_GPUS, MOST_MACHINES = 8, 1024  # in a machine, in a cluster: as far as is looked for what would fit
LORA = record.Method("lora", 16, 32.0, 0.0, "all-linear")  # the schema's defaults


@dataclass(frozen=True)
class Way:
    strategy: record.Strategy
    gradient_checkpointing: bool
    batch: record.Batch


@dataclass(frozen=True)
class Job:
    """What all ways have in common. `capacity`: bytes of memory that one process may use; `host_memory`: bytes that the
    processes of a machine may use besides that of GPUs, None where the recipe does not say; `checkpoints`: that are on
    disk at the same time."""

    facts: ModelFacts
    model: record.Model
    data: record.Data
    method: record.Method
    training: record.Training
    cluster: record.Cluster
    global_batch_size: int
    capacity: int
    host_memory: int | None
    checkpoints: int


@dataclass(frozen=True)
class Outlook:
    """A way, and what is expected of it."""

    way: Way
    memory: Memory
    seconds: float | None  # of an update; None on a CPU, whose speed is not known
    lacks: str | None  # "device memory", of which a reserve stays free, or "host memory"; None where it fits

    @property
    def fits(self) -> bool:
        return self.lacks is None


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


def open_ways(recipe: Recipe, cluster: record.Cluster, batches: tuple[record.Batch, ...]) -> list[Way]:
    """All that the recipe allows. Of one thing that it says there is one."""
    automatic = recipe.get("strategy", "type") == "auto"
    strategies = every_strategy(cluster) if automatic else (_said_strategy(recipe),)
    said = recipe.get("model", "gradient_checkpointing")
    return list(_ways(strategies, (False, True) if said == "auto" else (said,), batches))


def every_way(job: Job) -> list[Way]:
    """All that there are; none where the batch cannot be divided over the processes."""
    return list(_ways(every_strategy(job.cluster), (False, True), _batches(job)))


def _batches(job: Job) -> tuple[record.Batch, ...]:
    return divisions(job.global_batch_size, len(job.cluster.hosts) * job.cluster.processes_per_node)


def every_strategy(cluster: record.Cluster) -> tuple[record.Strategy, ...]:
    """What makes sense on the cluster, the simplest first, offloading last."""
    machines, processes = len(cluster.hosts), len(cluster.hosts) * cluster.processes_per_node
    if processes == 1:
        strategies = [_strategy("single")]
    else:
        strategies = [_strategy("ddp"), _zero(1), _zero(2), _fsdp(reshard_after_forward=False)]
        if machines > 1 and cluster.processes_per_node > 1:
            strategies.append(_fsdp(hybrid_shard=True))  # between far machines no weights travel
        strategies += [_fsdp(), _zero(3)]
    if cluster.device == "cuda":
        strategies += [_zero(2, offload_optimizer="cpu"), _fsdp(cpu_offload=True)]
        strategies.append(_zero(3, offload_optimizer="cpu", offload_param="cpu"))
    return tuple(strategies)


def outlook(job: Job, way: Way) -> Outlook:
    model = dataclasses.replace(job.model, gradient_checkpointing=way.gradient_checkpointing)
    work = workload_of(
        job.facts, model, job.data, job.method, way.strategy, way.batch, job.training, job.cluster, job.checkpoints
    )
    memory = estimate(job.facts, work)
    seconds = None
    if job.cluster.gpu:
        seconds = cost.step_time(job.facts, work, GPUS[job.cluster.gpu], len(job.cluster.hosts)).seconds
    lacks = None
    if memory.device > job.capacity * (1 - RESERVE):
        lacks = "device memory"
    elif job.cluster.gpu and memory.host > host_memory(job):
        lacks = "host memory"
    return Outlook(way, memory, seconds, lacks)


def host_memory(job: Job) -> int:
    return job.host_memory or HOST_PER_GPU * job.capacity * job.cluster.processes_per_node


def fastest(outlooks: Iterable[Outlook]) -> Outlook | None:
    """Of all that fit and are about as fast as the fastest the first one, which is the simplest."""
    fitting = [each for each in outlooks if each.fits]
    if not fitting:
        return None
    least = min(each.seconds or 0.0 for each in fitting)
    return next(each for each in fitting if (each.seconds or 0.0) <= least * (1 + ALIKE))


def choose(job: Job, ways: list[Way], *, asked_for: bool, where: Where, warn: Callable[[Problem], None]) -> Choice:
    """The way to go. `asked_for`: the recipe names the strategy, at `where`.

    Raises DsftError where none fits, with what would; warns where one does, but leaves less than the reserve.
    """
    outlooks = [outlook(job, way) for way in ways]
    best = fastest(outlooks)
    if best:
        return Choice(best.way, best, _reason(best, outlooks))
    least, message, needed = _nearest(job, outlooks)
    would_fit = list(remedies(job))
    help = f"this would fit: {'; or '.join(would_fit)}" if would_fit else "a smaller model or larger machines would fit"
    # A CPU job may be compiled on another machine than it runs on, and it can swap.
    if job.cluster.gpu and needed > (DOUBT if asked_for else 1.0):
        raise refused("does-not-fit", message, where=where, help=help)
    warn(Problem("memory-tight", message, where, help, severity="warning"))
    return Choice(least.way, least, "it needs least, and none leaves the reserve free" if len(ways) > 1 else None)


def _nearest(job: Job, outlooks: list[Outlook]) -> tuple[Outlook, str, float]:
    """The way that is nearest to fitting; what it lacks; the part of the memory there that it needs."""
    on_device = [each for each in outlooks if each.lacks == "host memory"]
    if on_device:
        least = min(on_device, key=lambda each: each.memory.host)
        needed, there = least.memory.host, host_memory(job)
        said = "the recipe says" if job.host_memory else f"{HOST_PER_GPU} times its GPUs' memory would be"
        lacking = f"needs about {gib(needed)} of each machine's own memory; {said} {gib(there)}"
    else:
        least = min(outlooks, key=lambda each: each.memory.device)
        needed, there = least.memory.device, job.capacity
        device = job.cluster.gpu or "this machine"
        lacking = (
            f"needs about {gib(needed)} a process; {device} has {gib(there)}, of which {RESERVE:.0%} should stay free"
        )
    return least, f"{strategy_name(least.way.strategy)} {lacking}", needed / there


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


def remedies(job: Job) -> Iterator[str]:
    """What would fit, each found by the same planner."""
    here = fastest(outlook(job, way) for way in every_way(job))
    if here:
        recomputed = " with gradient checkpointing" if here.way.gradient_checkpointing else ""
        yield f"{strategy_name(here.way.strategy)}{recomputed}, {batch_line(here.way.batch)}"
        return
    larger = next((cluster for cluster in _larger(job.cluster) if _fits(job, cluster=cluster)), None)
    if larger:
        yield f"{count(len(larger.hosts), 'machine', 'machines')} with {larger.processes_per_node} {larger.gpu} each"
    length = _longest(job)
    if length:
        yield f'"max_length": {length}'
    if job.method.type == "full" and _fits(job, method=LORA):
        yield '"method": {"type": "lora"}'


def _fits(job: Job, **changes) -> bool:
    """Of the batch's divisions two are enough: one row a pass needs least, unless a single pass saves the gradients of
    the passes before."""
    changed = dataclasses.replace(job, **changes)
    batches = _batches(changed)
    ways = _ways(every_strategy(changed.cluster), (False, True), batches[:1] + batches[1:][-1:])
    return any(outlook(changed, way).fits for way in ways)


def _larger(cluster: record.Cluster) -> Iterator[record.Cluster]:
    """The machine with more GPUs, up to eight; then more such machines."""
    if cluster.device == "cpu":
        return
    host, processes = cluster.hosts[0], cluster.processes_per_node
    if len(cluster.hosts) == 1:
        for more in range(processes + 1, MOST_GPUS + 1):
            yield dataclasses.replace(cluster, processes_per_node=more)
        processes = max(processes, MOST_GPUS)
    for machines in range(len(cluster.hosts) + 1, MOST_MACHINES + 1):
        yield dataclasses.replace(cluster, hosts=(host,) * machines, processes_per_node=processes)


def _longest(job: Job) -> int | None:
    """The longest max_length that fits, a multiple of 64; None where not even 64 tokens do."""
    fitting, too_long = 0, -(-job.data.max_length // 64)  # in units of 64 tokens
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if _fits(job, data=dataclasses.replace(job.data, max_length=middle * 64)):
            fitting = middle
        else:
            too_long = middle
    return fitting * 64 or None


def _ways(
    strategies: tuple[record.Strategy, ...], checkpointing: tuple[bool, ...], batches: tuple[record.Batch, ...]
) -> Iterator[Way]:
    """In the order they are preferred where time does not tell: on the device before offloaded, activations kept before
    recomputed, simple strategies first, large passes first."""
    for offloaded in (False, True):
        for recomputed in checkpointing:
            for strategy in strategies:
                if _offloads(strategy) == offloaded:
                    yield from (Way(strategy, recomputed, batch) for batch in batches)


def _offloads(strategy: record.Strategy) -> bool:
    return bool(strategy.cpu_offload) or "cpu" in (strategy.offload_optimizer, strategy.offload_param)


def _said_strategy(recipe: Recipe) -> record.Strategy:
    if not recipe.sound("strategy"):
        raise Unusable
    fields = [field.name for field in dataclasses.fields(record.Strategy) if field.name not in ("engine", "config")]
    said = {field: recipe.get("strategy", field) for field in fields}
    return _strategy(recipe.get("strategy", "type"), **said, config=recipe.get("strategy", "config") or {})


def _strategy(engine: str, **said) -> record.Strategy:
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(record.Strategy))
    return record.Strategy(**{**nothing, "config": {}, **said, "engine": engine})


def _zero(stage: int, **said: str) -> record.Strategy:
    return _strategy(
        "deepspeed", **({"zero_stage": stage, "offload_optimizer": "none", "offload_param": "none"} | said)
    )


def _fsdp(**said: bool) -> record.Strategy:
    return _strategy("fsdp", **({"reshard_after_forward": True, "cpu_offload": False, "hybrid_shard": False} | said))
