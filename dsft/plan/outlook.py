"""What is expected of a way to do a job: memory, time, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsft.plan.cost import Cost, step_time
from dsft.plan.gpus import GPUS
from dsft.plan.memory import Memory, estimate
from dsft.plan.ways import Said, Way, open_ways
from dsft.plan.workload import Job, workload_of

RESERVE = 0.10  # of a device's memory, and of its machine's own, left free for what estimates miss
ALIKE = 0.10  # of an update's time: estimates do not tell smaller differences


@dataclass(frozen=True)
class Outlook:
    """A way, and what is expected of it."""

    way: Way
    memory: Memory
    cost: Cost | None  # None on a CPU, whose speed is not known
    lacks: str | None  # "device memory", of which a reserve stays free, or "host memory"; None where it fits

    @property
    def fits(self) -> bool:
        return self.lacks is None

    @property
    def seconds(self) -> float | None:
        """Of an update."""
        return self.cost.seconds if self.cost else None


def outlook(job: Job, way: Way) -> Outlook:
    work = workload_of(job, way)
    memory = estimate(job.facts, work)
    gpu = GPUS[job.cluster.gpu] if job.cluster.gpu else None
    cost = step_time(job.facts, work, gpu, len(job.cluster.hosts)) if gpu else None
    lacks = None
    if memory.device > job.capacity * (1 - RESERVE):
        lacks = "device memory"
    elif gpu and memory.host > host_memory(job) * (1 - RESERVE):
        lacks = "host memory"
    return Outlook(way, memory, cost, lacks)


def outlooks(job: Job, said: Said) -> list[Outlook]:
    """Of all ways that `said` allows."""
    return [outlook(job, way) for way in open_ways(said, job.cluster, job.global_batch_size)]


def host_memory(job: Job) -> float:
    """Bytes that the processes of a machine with GPUs may use of its own memory: what the recipe says, or what machines
    with as many such GPUs have."""
    if job.host_memory is not None:
        return job.host_memory
    return GPUS[job.cluster.gpu].machine.memory * job.cluster.processes_per_node


def fastest(outlooks: Iterable[Outlook]) -> Outlook | None:
    """Of all that fit and are about as fast as the fastest the first one, which is the simplest."""
    fitting = [each for each in outlooks if each.fits]
    if not fitting:
        return None
    least = min(each.seconds or 0.0 for each in fitting)
    return next(each for each in fitting if (each.seconds or 0.0) <= least * (1 + ALIKE))
