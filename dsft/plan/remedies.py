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
    """More GPUs, fewer processes on each, a shorter length, LoRA: what would do, and by which way."""
    for cluster in _larger(job.cluster):
        way = _fitting(dataclasses.replace(job, cluster=cluster), said)
        if way:
            yield (
                f"{count(len(cluster.hosts), 'machine', 'machines')} with {cluster.processes_per_node} {cluster.gpu} each",
                way,
            )
            break
    fewer = _fewer_processes(job, said)
    if fewer:
        processes, gib, way = fewer
        whole = (
            f', and "memory_gib": {gib} in "cluster", for it to be a whole machine' if job.host_memory is None else ""
        )
        yield f"{count(processes, 'process', 'processes')} on each machine{whole}", way
    shorter = _shorter(job, said)
    if shorter:
        yield f'"max_length": {shorter[0]}', shorter[1]
    if job.method.type == "full":
        way = _fitting(dataclasses.replace(job, method=LORA), said)
        if way:
            yield '"method": {"type": "lora"}', way


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
    """The most on each machine that fit, where its own memory is what is lacking: each process loads the model there.
    With the memory of the same machine in GiB: with fewer GPUs, less is taken to be there."""
    ways = open_ways(said, job.cluster, job.global_batch_size)
    if not any(outlook(job, way).lacks == "host memory" for way in ways):
        return None
    gib = int(host_memory(job) // GIB)
    memory = gib * GIB if job.host_memory is None else job.host_memory
    for processes in range(job.cluster.processes_per_node - 1, 0, -1):
        smaller = dataclasses.replace(job.cluster, processes_per_node=processes)
        way = _fitting(dataclasses.replace(job, cluster=smaller, host_memory=memory), said)
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
