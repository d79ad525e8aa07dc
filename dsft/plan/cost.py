"""Time of an update, estimated from floating point operations, bytes of memory and bytes sent. For comparing ways to do
the same job: the order is worth more than the seconds, which leave out kernels' start, loading of data, and imbalance.

Times are seconds, sizes bytes, rates a second; what a function counts is of one process and, where it does not say of a
pass, of one update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsft.plan.facts import ModelFacts
from dsft.plan.gpus import Gpu
from dsft.plan.memory import (
    bf16_optimizer,
    layer_saved,
    masters,
    optimizer_shards,
    optimizer_state,
    sums_in_fp32,
    tokens,
    weight_shards,
    whole_weights,
)
from dsft.plan.units import BF16
from dsft.plan.workload import Workload

# Of the data sheet's dense peak, in the matrix products of whole training steps: PaLM reports 46 % (Chowdhery et al.
# 2022, arXiv:2204.02311, table 3), Megatron-LM up to 52 % (Narayanan et al. 2021, arXiv:2104.04473, table 1),
# torchtitan 58 % on A100 and 33 to 39 % on H100 (docs/performance.md of 2024-07 and of 2024-12).
ACHIEVED = 0.5
ATTENTION_ACHIEVED = 0.35  # of the same peak: FlashAttention-2 on an H100 (Shah et al. 2024, arXiv:2407.08608)
LINK = 0.75  # of a link's rate, that NCCL's collectives reach with large messages (nccl-tests, "busbw")
LATENCY = 30e-6  # seconds of a collective, besides its bytes: an assumption
EXPOSED = 0.25  # of what can go beside computing: what does not; an assumption
BACKWARD = 2 / 3  # of a pass' computing
TOUCHED = 4  # a saved activation is written, read again, and has a gradient that is written and read
HOST_BANDWIDTH = 100e9  # bytes a second that a machine's memory gives an optimizer on its CPUs: an assumption
# Bytes that an update on a CPU moves for a weight. torch's AdamW, measured: some twenty passes over it and its state.
# SGD without momentum reads the weight and its gradient, and writes the weight, all fp32.
CPU_ADAMW, CPU_SGD = 208, 12


@dataclass(frozen=True)
class Cost:
    """Of one update, in seconds but for the last two. `flops` and `sent` are of one process."""

    compute: float
    communication: float
    hidden: float  # of the communication: what goes on beside computing
    optimizer: float
    offload: float
    flops: float
    sent: float  # bytes

    @property
    def seconds(self) -> float:
        return self.compute + self.communication - self.hidden + self.optimizer + self.offload


class Sent(NamedTuple):
    """What one process sends in collectives of one kind, in one update."""

    link: str  # "all" ranks, those "inside" a machine, or "between" machines
    size: float  # bytes of all of them
    count: int
    beside: float = 1.0  # of the update's computing: the part that goes on meanwhile


def step_time(facts: ModelFacts, work: Workload, gpu: Gpu, nodes: int) -> Cost:
    """What an update of `work` costs on `gpu`, its processes spread over `nodes` machines.

    seconds = compute + communication - hidden + optimizer + offload
    """
    flops = work.accumulation * (matrix_flops(facts, work) + attention_flops(facts, work))
    compute = work.accumulation * pass_time(facts, work, gpu)
    collectives = sent(facts, work, nodes)
    times = [collective_time(each, work, gpu, nodes) for each in collectives]
    beside = sum(min(time, each.beside * compute) for time, each in zip(times, collectives, strict=True))
    return Cost(
        compute=compute,
        communication=sum(times),
        hidden=(1 - EXPOSED) * min(beside, compute),
        optimizer=optimizer_time(work, gpu),
        offload=offload_time(facts, work, gpu),
        flops=flops,
        sent=sum(each.size for each in collectives),
    )


# Computing -----------------------------------------------------------------------------------------------------------


def pass_time(facts: ModelFacts, work: Workload, gpu: Gpu) -> float:
    """Seconds of a forward and backward pass: operations at the share of the peak that they reach, then what is
    elementwise at the memory's bandwidth."""
    peak = gpu.flops if work.compute_bytes == BF16 else gpu.flops_fp32
    operations = matrix_flops(facts, work) / ACHIEVED + attention_flops(facts, work) / ATTENTION_ACHIEVED
    return operations / peak + touched_bytes(facts, work) / gpu.bandwidth


def matrix_flops(facts: ModelFacts, work: Workload) -> float:
    """Operations of the matrix products in one forward and backward pass.

    A matrix of n weights takes 2n a token forward, 2n for the gradient of its input, and 2n for its own where it is
    trained (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Checkpointing repeats the layers' forward pass,
    selective checkpointing every second matrix of it.
    """
    positions = tokens(work) if work.logit_positions is None else work.logit_positions
    head = positions * facts.vocab * facts.hidden
    layers = tokens(work) * (facts.active_parameters - facts.embedding_parameters - facts.head_parameters)
    again = {"none": 0, "selective": layers, "full": 2 * layers}[work.checkpointing]
    own = 2 * (layers + head) if work.full else 6 * tokens(work) * work.trained
    return (4 * (layers + head) + own + again) / work.tensor_parallel


def attention_flops(facts: ModelFacts, work: Workload) -> float:
    """Operations of causal attention in one forward and backward pass: 2 x length x width a token and layer forward,
    which is half of the whole square; 2.5 times that backward (Dao 2023, arXiv:2307.08691, section 4.1)."""
    forward = tokens(work) * facts.layers * 2 * work.length * facts.heads * facts.head_dim
    return forward * (3.5 + (work.checkpointing == "full")) / work.tensor_parallel


def touched_bytes(facts: ModelFacts, work: Workload) -> float:
    """Bytes that everything but the matrices moves in a pass: what is elementwise is bound by the memory's bandwidth.
    Checkpointing repeats the forward half of them."""
    again = 1.5 if work.checkpointing != "none" else 1
    return TOUCHED * again * tokens(work) * facts.layers * layer_saved(facts, work)


# Communicating -------------------------------------------------------------------------------------------------------


def collective_time(each: Sent, work: Workload, gpu: Gpu, nodes: int) -> float:
    """Seconds of its bytes at the share of the link's rate that is reached, and of its starts."""
    return each.size / (LINK * rate(each.link, work, gpu, nodes)) + LATENCY * each.count


def rate(link: str, work: Workload, gpu: Gpu, nodes: int) -> float:
    """Bytes a second of one process on a link. A ring over machines enters and leaves each by all of its GPUs' shares
    of the network at once."""
    if link == "between":
        return gpu.machine.network
    if link == "inside" or nodes == 1:
        return gpu.inside
    return min(gpu.inside, gpu.machine.network * work.processes_per_node)


def sent(facts: ModelFacts, work: Workload, nodes: int) -> list[Sent]:
    """What one process sends in an update.

    A ring over n ranks sends (n - 1)/n of the data in an all-gather or a reduce-scatter, twice that in an all-reduce
    (Rajbhandari et al. 2019, arXiv:1910.02054, section 7).
    """
    found = tensor_parallel_sent(facts, work) if work.tensor_parallel > 1 else []
    if work.engine == "single" or replicas(work) == 1:
        return found
    if work.engine == "ddp":
        return [*found, *ddp_sent(facts, work)]
    if work.engine == "deepspeed" and work.zero_stage in (1, 2):
        return [*found, *zero_sent(facts, work)]
    return [*found, *sharded_sent(facts, work, nodes)]


def tensor_parallel_sent(facts: ModelFacts, work: Workload) -> list[Sent]:
    """A layer gathers or scatters its tokens four times forward, as often backward, and forward again where it is
    recomputed (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2)."""
    each = tokens(work) * facts.hidden * work.compute_bytes * ring(work.tensor_parallel)
    count = work.accumulation * facts.layers * (12 if work.checkpointing == "full" else 8)
    return [Sent("inside", count * each, count)]


def ddp_sent(facts: ModelFacts, work: Workload) -> list[Sent]:
    """Gradients are all-reduced, once an update, beside the last backward pass."""
    size = 2 * ring(replicas(work)) * gradient_size(work)
    return [Sent("all", size, groups(facts), BACKWARD / work.accumulation)]


def zero_sent(facts: ModelFacts, work: Workload) -> list[Sent]:
    """ZeRO 1 and 2: gradients are all-reduced, though a rank needs but its part (stage_1_and_2.py,
    `allreduce_and_scatter`; bf16_optimizer.py), in stage 2 in every pass; updated weights are gathered.

    The backward pass waits for each bucket (`average_tensor`, on the stream that computes) unless `overlap_comm` is on;
    ZeRO-1 under bf16 reduces behind it.
    """
    reductions = 1 if work.zero_stage == 1 else work.accumulation
    whole = ring(replicas(work))
    overlaps = work.overlap_comm and not bf16_optimizer(work)
    beside = BACKWARD * reductions / work.accumulation if overlaps else 0.0
    updated = work.trained / work.tensor_parallel * work.compute_bytes
    return [
        Sent("all", whole * 2 * reductions * gradient_size(work), reductions * groups(facts), beside),
        Sent("all", whole * updated, groups(facts), 0.0),
    ]


def sharded_sent(facts: ModelFacts, work: Workload, nodes: int) -> list[Sent]:
    """FSDP and ZeRO 3: weights are gathered in every pass, forward and, where they were dropped since, backward;
    gradients are reduced to shards in every pass, or once where they stay whole until the last. Copies that are split
    inside machines all-reduce their shards of gradients between them, once an update. With a second copy, of hpZ, the
    backward pass gathers from the near ranks that share it (Wang et al. 2023, arXiv:2306.10209, section 3.2)."""
    again = work.accumulation if work.reshard else 0
    gathers = work.accumulation + (again if work.zero_hpz == 1 else 0)
    reductions = work.accumulation if work.engine == "deepspeed" or work.reduce_every_pass else 1
    size = ring(work.shards) * (gathers * gathered_size(facts, work) + reductions * gradient_size(work))
    link = "inside" if nodes > 1 and work.shards <= work.processes_per_node else "all"
    beside = 1.0 if work.overlap_comm else 0.0
    found = [Sent(link, size, (gathers + reductions) * groups(facts), beside)]
    if work.zero_hpz > 1:
        near = "inside" if work.zero_hpz <= work.processes_per_node else "all"
        found.append(
            Sent(near, again * ring(work.zero_hpz) * gathered_size(facts, work), again * groups(facts), beside)
        )
    if work.shards < replicas(work):
        copies = replicas(work) // work.shards
        found.append(Sent("between", 2 * ring(copies) * gradient_size(work) / work.shards, groups(facts)))
    return found


def ring(ranks: int) -> float:
    """Of the data, what a rank sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def replicas(work: Workload) -> int:
    """Ranks that see other rows."""
    return work.world_size // work.tensor_parallel


def groups(facts: ModelFacts) -> int:
    """Of weights that travel together: the layers, and what is in none."""
    return facts.layers + 1


def gradient_size(work: Workload) -> float:
    """Bytes of all gradients as they are summed."""
    return work.trained * work.gradient_bytes / work.tensor_parallel


def gathered_size(facts: ModelFacts, work: Workload) -> float:
    """Bytes of all weights as they are gathered: trained in the dtype that is computed in, frozen as stored."""
    whole = facts.parameters * work.compute_bytes if work.full else whole_weights(facts, work)
    return whole / work.tensor_parallel


# Updating ------------------------------------------------------------------------------------------------------------


def optimizer_time(work: Workload, gpu: Gpu) -> float:
    """Seconds of the update on the GPU: every byte of a process' weights, gradients, masters and state is read once and
    written once. SGD, which has no momentum here, has no state."""
    if work.offload_optimizer:
        return 0.0
    own = work.trained / optimizer_shards(work)
    held = own * (work.trained_bytes + work.gradient_bytes) + masters(work) + optimizer_state(work)
    return 2 * held / gpu.bandwidth


def offload_time(facts: ModelFacts, work: Workload, gpu: Gpu) -> float:
    """Seconds over PCIe and on the CPUs."""
    seconds = 0.0
    if work.offload_optimizer:
        seconds += offloaded_update_time(work, gpu)
    if work.offload_weights:
        # In every pass up for the forward and up for the backward pass.
        seconds += 2 * work.accumulation * whole_weights(facts, work) / weight_shards(work) / gpu.host
    return seconds


def offloaded_update_time(work: Workload, gpu: Gpu) -> float:
    """Seconds of: gradients down; the update, bound by the machine's memory, which its processes share; updated weights
    up."""
    own = work.trained / optimizer_shards(work)
    moved = own * (gradient_moves(work) * work.gradient_bytes + work.compute_bytes)
    update = own * (CPU_SGD if work.optimizer == "sgd" else CPU_ADAMW)
    return moved / gpu.host + update * work.processes_per_node / HOST_BANDWIDTH


def gradient_moves(work: Workload) -> int:
    """How often an update moves all gradients between GPU and host. FSDP: down, in every pass. ZeRO-3 fetches their sum
    in every pass and puts it back, and once more hands it down at the end (stage3.py, `partition_grads`). ZeRO-2 does so
    only without a sum on the GPU (stage_1_and_2.py, `async_accumulate_grad_in_cpu_via_gpu`); ZeRO-1 sums there."""
    if work.engine == "fsdp":
        return work.accumulation
    if work.zero_stage == 3:
        return 2 * work.accumulation + 1
    return 2 * work.accumulation - 1 if work.zero_stage == 2 and not sums_in_fp32(work) else 1
