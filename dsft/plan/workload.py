"""What the memory and the time of a training process depend on, and what dsft.train's ways are in these terms."""

from __future__ import annotations

from dataclasses import dataclass

from dsft.plan import record
from dsft.plan.facts import ModelFacts
from dsft.plan.lora import adapted_names, adapts_experts, lora_parameters
from dsft.plan.units import BF16, FP32
from dsft.plan.ways import Way

ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's default reduce_bucket_size
ZERO_LIVE = 1_000_000_000  # elements: DeepSpeed's default stage3_max_live_parameters
ZERO_GROUP = 1_000_000_000  # elements: DeepSpeed's default sub_group_size


@dataclass(frozen=True)
class Workload:
    """All that the memory and the time of a process depend on, besides the model."""

    engine: str  # "single" | "ddp" | "fsdp" | "deepspeed"
    zero_stage: int | None = None  # deepspeed
    world_size: int = 1
    processes_per_node: int = 1
    shards: int = 1  # ranks over which one copy is split: all, or under hybrid sharding those of a node
    device: str = "cuda"  # or "cpu"

    rows: int = 1  # of one pass of one process
    length: int = 1  # tokens of a row, padding included
    accumulation: int = 1

    trained: int = 0  # parameters
    full: bool = True  # all weights are trained; else adapters beside frozen weights
    targets: tuple[str, ...] = ()  # linear layers with an adapter
    rank: int = 0
    dropout: bool = False  # on the adapters' inputs
    expert_adapters: bool = False  # on experts that are kept as one parameter
    frozen_bytes: int = BF16  # of a weight that is not trained
    trained_bytes: int = FP32
    gradient_bytes: int = FP32
    master_bytes: int = 0  # the optimizer's own copy of a trained weight
    moment_bytes: int = FP32
    optimizer: str = "adamw"  # "adamw" | "sgd" | "adafactor" | "adam8bit"
    weight_decay: bool = False
    compute_bytes: int = BF16  # of an activation
    autocast: bool = False  # weights are cast in the forward pass, and the residual stream is fp32
    adapter_bytes: int = BF16  # that adapters compute in, and keep a copy of their input in

    attention: str = "sdpa"  # "eager" | "sdpa" | "flash"
    checkpointing: str = "none"  # "full": a layer keeps its input; "selective": see `selective_saved`

    reshard: bool = True  # fsdp: weights are dropped between forward and backward
    reduce_every_pass: bool = False  # fsdp: else gradients stay whole until the last pass (no_sync)
    zero_bucket: int = ZERO_BUCKET
    zero_live: int = ZERO_LIVE
    zero_group: int = ZERO_GROUP
    zero_hpz: int = 1  # ranks over which stage 3 splits a second copy of the weights, for the backward pass; 1: none
    overlap_comm: bool = True  # else computing waits for each collective, as by default in DeepSpeed below stage 3
    communication_bytes: int = BF16  # deepspeed: of a gradient on its way
    offload_optimizer: bool = False
    offload_weights: bool = False
    foreach: bool = True  # the optimizer updates all parameters at once, with temporaries of their size
    checkpoints: int = 0  # whole ones on disk at the same time

    # What dsft.train does not do, and programs do whose memory was published (benchmarks/planner.py).
    tensor_parallel: int = 1  # with sequence parallelism: between the matrices every tensor is split too
    context_parallel: int = 1
    logit_positions: int | None = None  # per pass; None: all tokens
    logit_bytes: int = 12  # per logit when the loss is worst; see `logits`
    quantized: str | None = None  # the frozen matrices: "nf4" | "nf4-double"
    repeated_heads: bool = False  # grouped keys and values are copied to the width of the queries
    compiled: bool = False
    norm_bytes: int = FP32  # that RMSNorm computes in
    saved_bytes: int = 0  # per token and layer: what a framework keeps besides what is counted here
    split_root: bool = False  # fsdp: embeddings and head are sharded apart, not as one
    bucket_views: bool = True  # ddp: gradients are views of the buckets that are sent


@dataclass(frozen=True)
class Job:
    """What all ways to do a job have in common. `capacity`: bytes of memory that one process may use; `host_memory`: bytes
    that the processes of a machine may use besides that of GPUs, None where the recipe does not say; `checkpoints`: that
    are on disk at the same time."""

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


def workload_of(job: Job, way: Way) -> Workload:
    """What dsft.train does, in the terms of the estimate.

    What is trained is fp32 under every engine, and so are gradients and moments; frozen weights are bf16 under bf16.
    bf16 is autocast for one process and DDP, FSDP's mixed precision (weights cast as they are gathered), and DeepSpeed's
    bf16 weights with fp32 masters.
    """
    bf16, full = job.training.precision == "bf16", job.method.type == "full"
    deepspeed = way.strategy.engine == "deepspeed"
    targets = () if full else adapted_names(job.facts, job.method.target_modules)
    trained = job.facts.parameters if full else lora_parameters(job.facts, job.method.r, job.method.target_modules)
    compute = BF16 if bf16 else FP32
    autocast = bf16 and way.strategy.engine in ("single", "ddp")
    zero = way.strategy.config.get("zero_optimization", {}) if deepspeed else {}
    return Workload(
        engine=way.strategy.engine,
        zero_stage=way.strategy.zero_stage,
        world_size=way.batch.world_size,
        processes_per_node=job.cluster.processes_per_node,
        shards=job.cluster.processes_per_node if way.strategy.hybrid_shard else way.batch.world_size,
        device=job.cluster.device,
        rows=way.batch.per_device,
        length=job.data.max_length,
        accumulation=way.batch.accumulation,
        trained=trained,
        full=full,
        targets=targets,
        rank=job.method.r or 0,
        dropout=bool(job.method.lora_dropout),
        expert_adapters=not full and adapts_experts(job.facts, job.method.target_modules),
        frozen_bytes=compute,
        trained_bytes=compute if deepspeed else FP32,
        master_bytes=FP32 if deepspeed else 0,
        optimizer=job.training.optim,
        weight_decay=job.training.weight_decay > 0,
        compute_bytes=compute,
        autocast=autocast,
        adapter_bytes=compute,
        attention={"eager": "eager", "flash_attention_2": "flash"}.get(job.model.attn_implementation, "sdpa"),
        checkpointing="full" if way.gradient_checkpointing else "none",
        reshard=way.strategy.reshard_after_forward is not False,
        reduce_every_pass=True,
        zero_bucket=int(zero.get("reduce_bucket_size", ZERO_BUCKET)),
        zero_live=int(zero.get("stage3_max_live_parameters", ZERO_LIVE)),
        zero_group=int(zero.get("sub_group_size", ZERO_GROUP)),
        zero_hpz=min(int(zero.get("zero_hpz_partition_size", 1)), way.batch.world_size),
        overlap_comm=bool(zero.get("overlap_comm", way.strategy.zero_stage not in (1, 2))),
        communication_bytes=FP32,  # as the compiler writes communication_data_type
        offload_optimizer=way.strategy.offload_optimizer == "cpu" or bool(way.strategy.cpu_offload),
        offload_weights=way.strategy.offload_param == "cpu" or bool(way.strategy.cpu_offload),
        foreach=job.cluster.device == "cuda",
        checkpoints=job.checkpoints,
    )
