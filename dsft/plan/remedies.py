"""What would fit where a job does not: each found by the planner that refused it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dsft.plan import record
from dsft.plan.describe import batch_line, count, strategy_name
from dsft.plan.outlook import fastest, host_memory, outlook
from dsft.plan.units import GIB
from dsft.plan.ways import Said, Way, open_ways
from dsft.plan.workload import Job

MOST_GPUS, MOST_MACHINES = 8, 1024  # in a machine, in a cluster: as far as is looked for what would fit
LORA = record.Method("lora", 16, 32.0, 0.0, "all-linear")  # the schema's defaults
ANY = Said()


def remedies(job: Job, said: Said) -> Iterator[str]:
    """What to change, as little as possible: with all else as `said` where that fits, else with the way that does."""
    way = _fitting(job, ANY)
    if way:
        yield way_line(way)
        return
    for wanted in (said, ANY) if said != ANY else (said,):
        found = list(_changes(job, wanted))
        if found:
            yield from (f"{change} with {way_line(way)}" if wanted != said else change for change, way in found)
            return


def way_line(way: Way) -> str:
    recomputed = ", gradient checkpointing" if way.gradient_checkpointing else ""
    return f"{strategy_name(way.strategy)}{recomputed}, {batch_line(way.batch)}"


def _changes(job: Job, said: Said) -> Iterator[tuple[str, Way]]:
    """More GPUs, fewer processes on each, a shorter length, LoRA or a smaller rank of it: what would do, and by which way."""
    more = _more_gpus(job, said)
    if more:
        yield more
    fewer = _fewer_processes(job, said)
    if fewer:
        processes, gib, way = fewer
        assumed = job.host_memory is None and job.cluster.device == "cuda"
        whole = f', and "memory_gib": {gib} in "cluster", for it to be a whole machine' if assumed else ""
        yield f"{count(processes, 'process', 'processes')} on each machine{whole}", way
    shorter = _shorter(job, said)
    if shorter:
        yield f'"max_length": {shorter[0]}', shorter[1]
    if job.method.type == "lora":
        smaller = _smaller_rank(job, said)
        if smaller:
            yield f'"r": {smaller[0]}', smaller[1]
    else:
        way = _fitting(dataclasses.replace(job, method=LORA), said)
        if way:
            yield '"method": {"type": "lora"}', way


def _more_gpus(job: Job, said: Said) -> tuple[str, Way] | None:
    """The fewest that fit with the batch as it is; or, where none divides it, with a larger batch."""
    larger = [dataclasses.replace(job, cluster=cluster) for cluster in _larger(job.cluster)]
    doubled = [each for each in larger if len(each.cluster.hosts).bit_count() == 1]
    for each in (*larger, *(_divisible(each, said) for each in doubled)):
        way = _fitting(each, said)
        if way:
            machines = count(len(each.cluster.hosts), "machine", "machines")
            text = f"{machines} with {each.cluster.processes_per_node} {each.cluster.gpu} each"
            batch = each.global_batch_size
            return text + (f' and "global_batch_size": {batch}' if batch != job.global_batch_size else ""), way
    return None


def _divisible(job: Job, said: Said) -> Job:
    """The job with the next larger batch that its processes can divide."""
    part = len(job.cluster.hosts) * job.cluster.processes_per_node * (said.per_device or 1) * (said.accumulation or 1)
    both = said.per_device and said.accumulation
    return dataclasses.replace(job, global_batch_size=part if both else -(-job.global_batch_size // part) * part)


def _smaller_rank(job: Job, said: Said) -> tuple[int, Way] | None:
    """LoRA's r halved until it fits."""
    r = job.method.r // 2
    while r:
        way = _fitting(dataclasses.replace(job, method=dataclasses.replace(job.method, r=r)), said)
        if way:
            return r, way
        r //= 2
    return None


def _fitting(job: Job, said: Said) -> Way | None:
    """The way to take, if any fits. Of the batch's divisions two tell whether one does: one row a pass needs least, unless
    a single pass saves FSDP the gradients of the passes before."""
    ways = list(open_ways(said, job.cluster, job.global_batch_size))
    least = [way for way in ways if 1 in (way.batch.per_device, way.batch.accumulation)] or ways
    if not any(outlook(job, way).fits for way in least):
        return None
    return fastest(outlook(job, way) for way in ways).way


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


def _fewer_processes(job: Job, said: Said) -> tuple[int, int, Way] | None:
    """The most on each machine that fit, where its own memory is what is lacking: each process loads the model there, and on
    CPUs has all else there too. With the memory of the same machine in GiB: with fewer GPUs, less is taken to be there."""
    ways = open_ways(said, job.cluster, job.global_batch_size)
    before, on_cpu = job.cluster.processes_per_node, job.cluster.device == "cpu"
    if not on_cpu and not any(outlook(job, way).lacks == "host memory" for way in ways):
        return None
    memory = job.capacity * before if on_cpu else host_memory(job)
    gib = int(memory // GIB)
    if job.host_memory is None and not on_cpu:
        memory = gib * GIB
    for processes in range(before - 1, 0, -1):
        cluster = dataclasses.replace(job.cluster, processes_per_node=processes)
        capacity = memory // processes if on_cpu else job.capacity
        way = _fitting(dataclasses.replace(job, cluster=cluster, capacity=capacity, host_memory=memory), said)
        if way:
            return processes, gib, way
    return None


def _shorter(job: Job, said: Said) -> tuple[int, Way] | None:
    """The longest max_length that fits, a multiple of 64, and its way; None where not even 64 tokens do."""
    longest = min(job.data.max_length - 1, job.facts.max_positions or job.data.max_length)
    fitting, found, too_long = 0, None, longest // 64 + 1  # in units of 64 tokens
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        way = _fitting(dataclasses.replace(job, data=dataclasses.replace(job.data, max_length=middle * 64)), said)
        if way:
            fitting, found = middle, way
        else:
            too_long = middle
    return (fitting * 64, found) if found else None
