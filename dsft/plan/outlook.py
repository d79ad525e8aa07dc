"""What is expected of a way to do a job: memory, time, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsft.plan import cost
from dsft.plan.gpus import GPUS
from dsft.plan.memory import Memory, estimate
from dsft.plan.ways import Said, Way, open_ways
from dsft.plan.workload import Job, workload_of

RESERVE = 0.10  # of a device's memory, left free for what estimates miss
ALIKE = 0.10  # of an update's time: estimates do not tell smaller differences
# Times its GPUs' memory: as much as machines have at most (DGX H100: 2048 GB to 640); auto goes no further.
HOST_PER_GPU = 4


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


def outlook(job: Job, way: Way) -> Outlook:
    work = workload_of(job, way)
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


def outlooks(job: Job, said: Said) -> list[Outlook]:
    """Of all ways that `said` allows."""
    return [outlook(job, way) for way in open_ways(said, job.cluster, job.global_batch_size)]


def host_memory(job: Job) -> int:
    if job.host_memory is not None:
        return job.host_memory
    return HOST_PER_GPU * job.capacity * job.cluster.processes_per_node


def fastest(outlooks: Iterable[Outlook]) -> Outlook | None:
    """Of all that fit and are about as fast as the fastest the first one, which is the simplest."""
    fitting = [each for each in outlooks if each.fits]
    if not fitting:
        return None
    least = min(each.seconds or 0.0 for each in fitting)
    return next(each for each in fitting if (each.seconds or 0.0) <= least * (1 + ALIKE))
