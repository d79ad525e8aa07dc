"""Time of an update, estimated from floating point operations, bytes of memory and bytes sent. For comparing ways to do
the same job: the order is worth more than the seconds, which leave out kernels' start, loading of data, and imbalance."""

from __future__ import annotations

from dataclasses import dataclass

from dsft.plan.facts import ModelFacts
from dsft.plan.gpus import Gpu
from dsft.plan.memory import (
    BF16,
    Workload,
    layer_saved,
    optimizer_shards,
    tokens,
    weight_shards,
    whole_weights,
)

# Of the data sheet's dense peak, in the matrix products of whole training steps: PaLM reports 46 % (Chowdhery et al. 2022,
# arXiv:2204.02311, table 3), Megatron-LM 52 % (Narayanan et al. 2021, arXiv:2104.04473), torchtitan about 40 %.
ACHIEVED = 0.5
ATTENTION_ACHIEVED = 0.35  # FlashAttention-2 on an H100 (Shah et al. 2024, arXiv:2407.08608, section 1)
LINK = 0.75  # of a link's rate, that NCCL's collectives reach with large messages (nccl-tests, "busbw")
LATENCY = 30e-6  # seconds of a collective, besides its bytes
EXPOSED = 0.25  # of the shorter of computing and communicating: what does not overlap
TOUCHED = 4  # a saved activation is written, read again, and has a gradient that is written and read
HOST_BANDWIDTH = 100e9  # bytes a second that a machine's memory gives an optimizer on its CPUs: an assumption
CPU_UPDATE = (
    208  # bytes that torch's AdamW on a CPU moves for a weight: some twenty passes over it and its state, measured
)


@dataclass(frozen=True)
class Cost:
    """Of one update. `seconds` is all of it; the others overlap. `flops` and `sent` are of one process."""

    seconds: float
    compute: float
    communication: float
    optimizer: float
    offload: float
    flops: float
    sent: float  # bytes


def step_time(facts: ModelFacts, work: Workload, gpu: Gpu, nodes: int) -> Cost:
    """What an update of `work` costs on `gpu`, its processes spread over `nodes` machines.

    seconds = longer + EXPOSED x shorter of (compute, communication), + optimizer + offload
    """
    matrices, attention = matrix_flops(facts, work), attention_flops(facts, work)
    flops = work.accumulation * (matrices + attention)
    peak = gpu.flops if work.compute_bytes == BF16 else gpu.flops_fp32
    arithmetic = (matrices / ACHIEVED + attention / ATTENTION_ACHIEVED) / peak
    compute = work.accumulation * (arithmetic + touched_bytes(facts, work) / gpu.bandwidth)
    collectives = sent(facts, work, nodes)
    total = sum(size for _, size, _ in collectives)
    waiting = LATENCY * sum(count for _, _, count in collectives)
    communication = waiting + sum(size / (LINK * rate(link, work, gpu, nodes)) for link, size, _ in collectives)
    optimizer, offload = optimizer_time(work, gpu), offload_time(facts, work, gpu)
    longer, shorter = max(compute, communication), min(compute, communication)
    seconds = longer + EXPOSED * shorter + optimizer + offload
    return Cost(seconds, compute, communication, optimizer, offload, flops, total)


def matrix_flops(facts: ModelFacts, work: Workload) -> float:
    """Of the matrix products in one forward and backward pass of one process.

    A matrix of n weights takes 2n a token forward, 2n for the gradient of its input, and 2n for its own where it is
    trained (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Checkpointing repeats the layers' forward pass, selective
    checkpointing every second matrix of it.
    """
    positions = tokens(work) if work.logit_positions is None else work.logit_positions
    head = positions * facts.vocab * facts.hidden
    layers = tokens(work) * (facts.active_parameters - facts.embedding_parameters - facts.head_parameters)
    again = {"none": 0, "selective": layers, "full": 2 * layers}[work.checkpointing]
    own = 2 * (layers + head) if work.full else 6 * tokens(work) * work.trained
    return (4 * (layers + head) + own + again) / work.tensor_parallel


def attention_flops(facts: ModelFacts, work: Workload) -> float:
    """Of causal attention in one forward and backward pass: 2 x length x width a token and layer forward, which is half of
    the whole square; 2.5 times that backward (Dao 2023, arXiv:2307.08691, section 4.1)."""
    forward = tokens(work) * facts.layers * 2 * work.length * facts.heads * facts.head_dim
    return forward * (3.5 + (work.checkpointing == "full")) / work.tensor_parallel


def touched_bytes(facts: ModelFacts, work: Workload) -> float:
    """Bytes that everything but the matrices moves in a pass: what is elementwise is bound by the memory's bandwidth."""
    again = 1.5 if work.checkpointing != "none" else 1
    return TOUCHED * again * tokens(work) * facts.layers * layer_saved(facts, work)


def sent(facts: ModelFacts, work: Workload, nodes: int) -> list[tuple[str, float, int]]:
    """What one process sends in an update: (link, bytes, number of collectives).

    A ring over n ranks sends (n - 1)/n of the data in an all-gather or a reduce-scatter, twice that in an all-reduce
    (Rajbhandari et al. 2019, section 7). Gradients travel once an update, but where they are
    sharded in every pass; weights in every pass under FSDP and ZeRO-3, forward and backward. `link`: "all" ranks, those "inside" a machine, or "between".
    """
    passes, trained = work.accumulation, work.trained / work.tensor_parallel
    gradients = trained * work.gradient_bytes
    weights = facts.parameters * work.compute_bytes if work.full else whole_weights(facts, work)
    weights /= work.tensor_parallel
    ranks = work.world_size // work.tensor_parallel
    found: list[tuple[str, float, int]] = []
    if work.tensor_parallel > 1:
        # Korthikanti et al. 2022, section 4.2: four a layer forward, as many backward, and again where it is recomputed.
        each = tokens(work) * facts.hidden * work.compute_bytes * (work.tensor_parallel - 1) / work.tensor_parallel
        count = passes * facts.layers * (12 if work.checkpointing == "full" else 8)
        found.append(("inside", count * each, count))
    if work.engine == "single" or ranks == 1:
        return found
    ring = (work.shards - 1) / work.shards
    everywhere = (ranks - 1) / ranks
    layers = facts.layers + 1
    if work.engine == "ddp":
        return [*found, ("all", 2 * everywhere * gradients, layers)]
    if work.engine == "deepspeed" and work.zero_stage in (1, 2):
        # All-reduced, though a rank needs but its part (stage_1_and_2.py, `allreduce_and_scatter`; bf16_optimizer.py).
        reductions = 1 if work.zero_stage == 1 else passes
        updated = trained * work.compute_bytes
        return [*found, ("all", everywhere * (2 * reductions * gradients + updated), (reductions + 1) * layers)]
    gathers = passes * (2 if work.reshard else 1)
    reductions = passes if work.engine == "deepspeed" or work.reduce_every_pass else 1
    link = "inside" if nodes > 1 and work.shards <= work.processes_per_node else "all"
    found.append((link, ring * (gathers * weights + reductions * gradients), (gathers + reductions) * layers))
    if work.shards < ranks:
        copies = ranks // work.shards
        found.append(("between", 2 * (copies - 1) / copies * gradients / work.shards, layers))
    return found


def rate(link: str, work: Workload, gpu: Gpu, nodes: int) -> float:
    """Bytes a second of one process on a link. A ring over machines enters and leaves each by all of its GPUs' shares of
    the network at once."""
    if link == "between":
        return gpu.between
    if link == "inside" or nodes == 1:
        return gpu.inside
    return min(gpu.inside, gpu.between * work.processes_per_node)


def optimizer_time(work: Workload, gpu: Gpu) -> float:
    """Every byte of weights, gradients and state is read once and written once."""
    if work.offload_optimizer:
        return 0.0
    moments = 2 * work.moment_bytes if work.optimizer == "adamw" else 2
    per_weight = work.trained_bytes + work.gradient_bytes + work.master_bytes + moments
    return 2 * per_weight * work.trained / optimizer_shards(work) / gpu.bandwidth


def offload_time(facts: ModelFacts, work: Workload, gpu: Gpu) -> float:
    """Over PCIe: gradients down (where they are summed there, in every pass) and weights up once an update; offloaded weights up in every forward and backward pass.
    The optimizer on the CPUs is bound by the machine's memory, which its processes share."""
    seconds = 0.0
    if work.offload_optimizer:
        own = work.trained / optimizer_shards(work)
        down = 1 if work.engine == "deepspeed" and work.zero_stage != 3 else work.accumulation
        seconds += own * (down * work.gradient_bytes + work.compute_bytes) / gpu.host
        seconds += own * CPU_UPDATE * work.processes_per_node / HOST_BANDWIDTH
    if work.offload_weights:
        passes = 2 * work.accumulation
        seconds += passes * whole_weights(facts, work) / weight_shards(work) / gpu.host
    return seconds
