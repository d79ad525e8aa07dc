"""Memory of one process of a training job, by part, from the sizes of the model and the way it is trained.

Every part is a short function that says where its formula comes from. Sizes are bytes. "Allocated" is what tensors take at
the worst moment, as torch.cuda.max_memory_allocated counts it; "reserved" adds what the caching allocator holds besides;
"device" adds what CUDA and NCCL take for themselves, as nvidia-smi shows it.

What is said of autograd below ("saves") was read off with torch.autograd.graph.saved_tensors_hooks on the models of
transformers 5, and agrees with section 4.1 of Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsft.plan import process
from dsft.plan.facts import Linear, ModelFacts
from dsft.plan.units import BF16, FP32, GIB
from dsft.plan.workload import ZERO_BUCKET, Workload

CONTEXT = GIB // 2  # CUDA's context and the kernels loaded into it: 0.4 to 0.6 GiB on A100 and H100, CUDA 12
COMMUNICATOR = GIB // 2  # NCCL's channels and buffers of one or two communicators

LAYER_NORM = {"bert", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "stablelm"}
NORMS = {"phi": 1, "gptj": 1, "falcon": 1, "gemma2": 4, "gemma3": 4, "gemma3_text": 4}  # in a layer; two in all others
QUERY_KEY_NORM = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"}
TANH_GELU = {"gpt2", "gptj", "phi", "gpt_neo"}  # written out in Python: three more tensors are saved
DROPOUT = {"bert", "gpt2"}  # train with dropout where config.json does not say otherwise
FP32_NORM = {"gemma", "gemma2", "gemma3", "gemma3_text"}  # RMSNorm multiplies by its weight before it rounds
SOFT_CAPPED = {"gemma2"}  # tanh of scores and logits
FUSED = {"gpt_neox", "phi3"}  # queries and keys are rotated copies of parts of one tensor, and the values keep it whole

ATTENTION_OUT = {"o_proj", "out_proj", "proj", "c_proj", "dense", "attn_out"}
MLP_OUT = {"down_proj", "fc2", "mlp_out", "dense_4h_to_h"}


@dataclass(frozen=True)
class Memory:
    """`parts` sum up to `device`: bytes of one process on its device at the worst moment. `host` and `disk` are of a machine."""

    parts: Mapping[str, int]
    moment: str  # the worst one: "forward" | "loss" | "backward" | "reduction" | "update"; on a CPU also those of `process.cpu_moments`
    allocated: int
    reserved: int
    device: int
    host: int
    disk: int

    @property
    def least(self) -> int:
        """Of the device, without what the allocator only caches: that it gives back before it fails."""
        return self.device - self.parts.get("allocator", 0)


def estimate(facts: ModelFacts, work: Workload) -> Memory:
    """What a process of `work` takes in training the model."""
    moments = _moments(facts, work)
    if work.device == "cpu":
        moments |= process.cpu_moments(facts, work, _lasting(facts, work))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: int(size) for name, size in moments[moment].items()}
    allocated = sum(parts.values())
    if work.device == "cpu":
        reserved = allocated
        parts["process"] = process.libraries(work)
    else:
        reserved = max(allocated, int(_reserved(moments)))
        parts["allocator"] = reserved - allocated
        parts["context"] = CONTEXT + (COMMUNICATOR if work.world_size > 1 else 0)
    device = sum(parts.values())
    beside = device * work.processes_per_node if work.device == "cpu" else host(facts, work)
    return Memory(parts, moment, allocated, reserved, device, beside, disk(work))


def _reserved(moments: Mapping[str, Mapping[str, float]]) -> float:
    """What the caching allocator holds: each part at its own highest.

    It keeps freed blocks by size and stream (PyTorch, "CUDA semantics", memory management): the blocks of the loss are
    cut up by the gradients that follow and are not whole when the next loss comes; FSDP gathers in a stream of its own.
    The update's temporaries are no part of it: they find the blocks of all activations free.
    """
    highest: dict[str, float] = {}
    for moment in moments.keys() - {"update"}:
        for name, size in moments[moment].items():
            highest[name] = max(highest.get(name, 0), size)
    return sum(highest.values())


def _moments(facts: ModelFacts, work: Workload) -> dict[str, dict[str, float]]:
    """The parts at the moments of an update that can be the worst: the end of the forward pass, of the loss, of the last
    layer's backward pass and of the first one's, and the optimizer's update."""
    always = _always(facts, work)
    gradient, kept = gradients(work), kept_gradients(work)
    saved, one_layer = activations(facts, work), layer_backward(facts, work)
    ready, cast, lasting = gathered(facts, work), casts(facts, work), lasting_casts(facts, work)
    scores = logits(facts, work)
    plain = scores * work.compute_bytes / work.logit_bytes  # not yet fp32
    moments = {
        "forward": {**always, "gradients": kept, "activations": saved, "logits": plain, "gathered": ready + cast},
        "loss": {**always, "gradients": kept, "activations": saved, "logits": scores, "gathered": ready + lasting},
        "backward": {
            **always,
            "gradients": kept,
            "activations": saved + one_layer,
            "gathered": ready + lasting,
            "buffers": layer_buffers(facts, work),
        },
        "reduction": {
            **always,
            "gradients": gradient,
            "gathered": ready,
            "buffers": reduction_buffers(facts, work),
        },
        "update": {**always, "gradients": gradient, "buffers": update_temporaries(facts, work)},
    }
    if work.engine == "deepspeed" and work.zero_stage != 1:
        # The first bucket is full, and as many of the last layers' activations are gone.
        left = max(0, 1 - work.zero_bucket / max(1, work.trained))
        buffers = {"buffers": reduction_buffers(facts, work)}
        moments["bucket"] = moments["backward"] | buffers | {"activations": saved * left + one_layer}
    return moments


def _always(facts: ModelFacts, work: Workload) -> dict[str, float]:
    return {
        "weights": weights(facts, work),
        "adapters": adapters(work),
        "optimizer": optimizer_state(work),
        "masters": masters(work),
        "bucket": lasting_bucket(facts, work),
    }


def _lasting(facts: ModelFacts, work: Workload) -> dict[str, float]:
    """What is there between updates too: DDP's buckets, and the sums of ZeRO-3 and of ZeRO-1 under bf16, are never given up."""
    never_freed = work.engine == "ddp" or work.zero_stage == 3 or bf16_optimizer(work)
    buffered = gradients(work) - computed_gradients(work) if never_freed else 0
    return {**_always(facts, work), "gradients": buffered}


# What is there all the time ------------------------------------------------------------------------------------------


def weight_shards(work: Workload) -> int:
    """Over how many ranks a weight is split. ZeRO stage 3 = FSDP (Rajbhandari et al. 2019, arXiv:1910.02054, section 5)."""
    whole = work.engine in ("single", "ddp") or (work.engine == "deepspeed" and work.zero_stage in (1, 2))
    return work.tensor_parallel * (1 if whole else work.shards)


def gradient_shards(work: Workload) -> int:
    """ZeRO stages 2 and 3, FSDP."""
    whole = work.engine in ("single", "ddp") or (work.engine == "deepspeed" and work.zero_stage == 1)
    return work.tensor_parallel * (1 if whole else work.shards)


def optimizer_shards(work: Workload) -> int:
    """ZeRO stages 1 to 3, FSDP."""
    return work.tensor_parallel * (1 if work.engine in ("single", "ddp") else work.shards)


def weights(facts: ModelFacts, work: Workload) -> float:
    """The model's weights, without adapters."""
    second = whole_weights(facts, work) / work.zero_hpz if work.zero_hpz > 1 else 0  # on the device in any case
    return second + (0 if work.offload_weights else whole_weights(facts, work) / weight_shards(work))


def whole_weights(facts: ModelFacts, work: Workload) -> float:
    if work.full:
        return facts.parameters * work.trained_bytes
    matrices = matrix_parameters(facts)
    per_matrix = quantized_bytes(work) if work.quantized else work.frozen_bytes
    return matrices * per_matrix + (facts.parameters - matrices) * work.frozen_bytes


def quantized_bytes(work: Workload) -> float:
    """Bytes of a 4-bit weight: one fp32 scale per 64 of them; or that scale in 8 bits, and one fp32 per 256 scales.

    Dettmers et al. 2023 (QLoRA, arXiv:2305.14314), section 3, "Double Quantization".
    """
    scale = FP32 / 64 if work.quantized == "nf4" else 1 / 64 + FP32 / (64 * 256)
    return 0.5 + scale


def matrix_parameters(facts: ModelFacts) -> int:
    """Weights inside the decoder layers, which but for the norms are matrices: those that are quantized, or cast."""
    return facts.parameters - facts.embedding_parameters - facts.head_parameters


def adapters(work: Workload) -> float:
    """LoRA's own weights (Hu et al. 2021, arXiv:2106.09685)."""
    return 0 if work.full or work.offload_weights else work.trained * work.trained_bytes / weight_shards(work)


def optimizer_state(work: Workload) -> float:
    """AdamW: two moments a weight. Adafactor: sums of rows and columns, next to nothing. 8-bit Adam: a byte each, and one
    fp32 scale for each block of 2048 (Dettmers et al. 2021, arXiv:2110.02861)."""
    if work.offload_optimizer:
        return 0
    per_weight = {"adamw": 2 * work.moment_bytes, "adam8bit": 2 * (1 + FP32 / 2048), "sgd": 0, "adafactor": 0}
    return work.trained * per_weight[work.optimizer] / optimizer_shards(work)


def masters(work: Workload) -> float:
    """The copy of the trained weights that DeepSpeed's optimizer updates, under fp32 too."""
    return 0 if work.offload_optimizer else work.trained * work.master_bytes / optimizer_shards(work)


# Gradients -----------------------------------------------------------------------------------------------------------


def gradients(work: Workload) -> float:
    """All gradients, as they are when the optimizer takes them."""
    if work.engine == "fsdp" and work.accumulation > 1 and not work.reduce_every_pass:
        # Their sum is whole (FSDP2's set_requires_gradient_sync, FSDP1's no_sync).
        return work.trained * work.gradient_bytes / work.tensor_parallel
    if work.offload_optimizer and work.zero_stage != 1 and not (work.zero_stage == 2 and sums_in_fp32(work)):
        return 0  # on their way to the host; but ZeRO-2 sums in fp32 on the device (`_build_compact_grad_partition_buffer`)
    copies = 1 if work.engine != "ddp" or work.bucket_views else 2  # DDP's buckets are a second copy where not views
    return copies * work.trained * work.gradient_bytes / gradient_shards(work) + computed_gradients(work)


def computed_gradients(work: Workload) -> float:
    """ZeRO-1 under bf16 keeps what the backward pass computed beside the fp32 sum, whole, until the update (DeepSpeed,
    runtime/bf16_optimizer.py: `immediate_grad_update` is off)."""
    return work.trained * work.compute_bytes / work.tensor_parallel if bf16_optimizer(work) else 0


def bf16_optimizer(work: Workload) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer in place of the one of ZeRO-1 (engine.py, `_do_optimizer_sanity_check`).
    It reduces in buckets of `ZERO_BUCKET` that no key changes."""
    return work.zero_stage == 1 and sums_in_fp32(work) and not work.offload_optimizer


def sums_in_fp32(work: Workload) -> bool:
    """Whether what DeepSpeed computes in bf16 it sums in fp32: `grad_accum_dtype`, as the compiler writes it."""
    return work.compute_bytes == BF16 and work.gradient_bytes == FP32


def kept_gradients(work: Workload) -> float:
    """Those that are there while a pass begins: the sum of the passes before; DDP's buckets; DeepSpeed's flat buffers."""
    if work.accumulation > 1 or work.engine == "ddp":
        return gradients(work)
    return gradients(work) - computed_gradients(work) if work.engine == "deepspeed" else 0


# Activations ---------------------------------------------------------------------------------------------------------


def tokens(work: Workload) -> int:
    """Of a pass in one process."""
    return work.rows * work.length // work.context_parallel


def activations(facts: ModelFacts, work: Workload) -> float:
    """What the forward pass keeps for the backward pass, of all layers and the last norm."""
    residual = residual_bytes(work)
    per_layer = {"none": layer_saved, "selective": selective_saved, "full": input_saved}[work.checkpointing]
    # The last norm's input; for gradients of the head what goes into it, and of an RMSNorm's weight the normalized values.
    inputs = 0 if not work.full else 1 if facts.model_type in LAYER_NORM else 2
    top = facts.hidden * (work.norm_bytes + inputs * residual) / work.tensor_parallel
    copies = expert_copies(facts, work) if work.checkpointing == "none" else 0
    return copies + tokens(work) * (dropout_saved(facts, work) + facts.layers * per_layer(facts, work) + top)


def expert_copies(facts: ModelFacts, work: Workload) -> float:
    """Of all layers: peft adds an adapter's product to the experts' weights, and autograd keeps the sum (peft,
    tuners/lora/layer.py, `ParamWrapper`)."""
    if not work.expert_adapters:
        return 0
    idle = facts.parameters - facts.active_parameters
    return idle * facts.experts / max(1, facts.experts - facts.experts_per_token) * work.adapter_bytes


def input_saved(facts: ModelFacts, work: Workload) -> float:
    """Bytes per token of a checkpointed layer: its input (Chen et al. 2016, arXiv:1604.06174)."""
    return facts.hidden * residual_bytes(work) / work.tensor_parallel


def residual_bytes(work: Workload) -> int:
    """Of the sum that runs through the layers: it begins with the embedding, of which autocast makes no copy."""
    return (work.trained_bytes if work.full else work.frozen_bytes) if work.autocast else work.compute_bytes


def selective_saved(facts: ModelFacts, work: Workload) -> float:
    """Bytes per token under torchtitan's selective checkpointing by operator: the layer's input, the attention's output,
    and the output of every second matrix product, in the order of their call (torchtitan, parallelize.py, `_save_list`)."""
    width = {name: heads * facts.head_dim for name, heads in (("q", facts.heads), ("k", facts.kv_heads))}
    outputs = [width["q"], width["k"], width["k"], facts.hidden, *[facts.ffn] * (2 if facts.gated else 1), facts.hidden]
    kept = sum(outputs[::2]) + width["q"]
    return input_saved(facts, work) + (work.compute_bytes * kept + FP32 * facts.heads) / work.tensor_parallel


def layer_saved(facts: ModelFacts, work: Workload) -> float:
    """Bytes per token of a layer without checkpointing."""
    if work.compiled:
        split = compiled_saved(facts, work)
    else:
        split = norms_saved(facts, work) + mlp_saved(facts, work) + 2 * dropout_saved(facts, work)
        split += attention_saved(facts, work) + work.saved_bytes
    inputs = linear_inputs_saved(facts, work)
    # Behind a split norm the whole rows are collected for the matrices, and those are what is saved.
    collected = (1 - 1 / work.tensor_parallel) * 2 * facts.hidden * work.compute_bytes
    return (split + inputs) / work.tensor_parallel + collected


def compiled_saved(facts: ModelFacts, work: Workload) -> float:
    """Under torch.compile: the residual twice, and what goes in and out of matrices and attention. What lies between is
    fused and made again in the backward pass (the min-cut partitioner of AOTAutograd)."""
    gates = 2 if facts.gated else 1
    return work.compute_bytes * (2 * facts.hidden + gates * facts.ffn) + attention_saved(facts, work)


def norms_saved(facts: ModelFacts, work: Workload) -> float:
    """RMSNorm of transformers, torchtitan and litgpt: the input in fp32 (a copy, unless the residual is that already), and
    for the gradient of its weight the normalized values. LayerNorm is one operation: its input."""
    residual = residual_bytes(work)
    count = NORMS.get(facts.model_type, 2)
    if facts.model_type in LAYER_NORM:
        return count * facts.hidden * residual
    normalized = work.norm_bytes if facts.model_type in FP32_NORM else residual
    per_value = work.norm_bytes + (normalized if work.full else 0)
    saved = count * facts.hidden * per_value
    if facts.model_type in QUERY_KEY_NORM:
        saved += (facts.heads + facts.kv_heads) * facts.head_dim * per_value
    return saved


def attention_saved(facts: ModelFacts, work: Workload) -> float:
    """Queries, keys, values (after rotation) and the output; one fp32 per head and token for the softmax' sum.

    Eager attention saves the softmax in fp32 and its copy in the dtype of the values, each heads x length per token;
    with dropout a mask, and the product. FlashAttention: Dao et al. 2022, arXiv:2205.14135.
    """
    query = facts.heads * facts.head_dim
    key = query if work.repeated_heads or work.attention == "eager" else facts.kv_heads * facts.head_dim
    saved = work.compute_bytes * (2 * query + 2 * key)
    if facts.model_type in FUSED:
        copied = query if work.device == "cpu" else 0  # the output, which sdpa on a CPU lays out as the queries are
        saved += work.compute_bytes * (query + key + copied)
    if work.attention != "eager":
        return saved + FP32 * facts.heads + window_mask_saved(facts, work)
    copy = work.compute_bytes if work.compute_bytes != FP32 or facts.model_type in DROPOUT else 0
    mask = 1 if facts.model_type in DROPOUT else 0
    capped = work.compute_bytes if facts.model_type in SOFT_CAPPED else 0
    return saved + facts.heads * work.length * (FP32 + copy + mask + capped)


def window_mask_saved(facts: ModelFacts, work: Workload) -> float:
    """Rows as long as a sliding window, or longer, take sdpa a mask, which each such layer turns into values of its own (torch,
    `convert_boolean_attn_mask`); FlashAttention knows windows. Here the mean of all layers."""
    if work.attention != "sdpa" or facts.window is None or work.length < facts.window:
        return 0
    return facts.windowed_layers / facts.layers * work.length * work.compute_bytes


def mlp_saved(facts: ModelFacts, work: Workload) -> float:
    """Inside the feed-forward block: the activation function's input; with a gate also what is multiplied. The input of
    the last matrix is counted with the matrices'."""
    values = 3 if facts.gated else 4 if facts.model_type in TANH_GELU else 1
    # What experts return is multiplied by the router's weights.
    return (values * facts.ffn + facts.experts_per_token * facts.hidden) * work.compute_bytes


def dropout_saved(facts: ModelFacts, work: Workload) -> float:
    """The mask behind a block or the embedding."""
    return facts.hidden * mask_bytes(work) if facts.model_type in DROPOUT else 0


def mask_bytes(work: Workload) -> int:
    """Of a value that dropout may drop; on a CPU the mask is of the values' dtype."""
    return work.compute_bytes if work.device == "cpu" else 1


def linear_inputs_saved(facts: ModelFacts, work: Workload) -> float:
    """A matrix that is trained, or has an adapter, saves its input; a frozen one does not.

    Matrices with the same input share it, unless each makes a copy: autocast casts for every matrix; an adapter of
    another dtype casts, and one with dropout has its own values and a mask. The output of the attention is
    saved by the attention already.
    """
    if work.full:
        inputs = [(_source(facts, linear), linear.inputs) for linear in facts.linears]
        if not work.autocast:
            inputs = list(dict.fromkeys(inputs))
        router = facts.hidden if facts.experts else 0
        width = sum(inputs for source, inputs in inputs if source != "attention") + router + expert_inputs(facts)
        return work.compute_bytes * width
    adapted = [linear for linear in facts.linears if linear.name in work.targets]
    down = work.rank * len(adapted) * work.adapter_bytes
    if work.expert_adapters:
        down += work.compute_bytes * expert_inputs(facts)
    if work.autocast or work.dropout or work.adapter_bytes != work.compute_bytes:
        each = work.adapter_bytes + (mask_bytes(work) if work.dropout else 0)
        return down + each * sum(linear.inputs for linear in adapted)
    shared = {(_source(facts, linear), linear.inputs) for linear in adapted}
    return down + work.compute_bytes * sum(inputs for source, inputs in shared if source != "attention")


def expert_inputs(facts: ModelFacts) -> int:
    """Of the experts that a token passes, trained or adapted: their copies of it, and the products. transformers 5 keeps
    experts as one parameter, not as linear layers."""
    return facts.experts_per_token * facts.hidden + facts.ffn if facts.experts else 0


def _source(facts: ModelFacts, linear: Linear) -> str:
    """Where a matrix' input comes from: matrices of the same source share one tensor."""
    if linear.name in MLP_OUT or (linear.name == "c_proj" and linear.inputs == facts.ffn):
        return "product"
    if linear.name in ATTENTION_OUT:
        return "attention"
    return "mlp" if any(word in linear.name for word in ("gate", "up", "fc", "h_to_4h")) else "norm"


def layer_backward(facts: ModelFacts, work: Workload) -> float:
    """While one layer goes backward: what it makes again if it was checkpointed, and the gradients of its values: those
    of the feed-forward block's widest tensors (product, gate, up) and of four of the residual's width live at once.
    Compiled code writes them over saved values that it has read for the last time: one of each width is left."""
    again = 0.0
    if work.checkpointing != "none":
        again = layer_saved(facts, work) - (selective_saved(facts, work) if work.checkpointing == "selective" else 0)
    width = (facts.ffn + facts.hidden) if work.compiled else (3 if facts.gated else 2) * facts.ffn + 4 * facts.hidden
    values = width * work.compute_bytes
    if work.attention == "eager":
        values = max(values, facts.heads * work.length * (FP32 + work.compute_bytes))  # of scores and softmax
    # Of adapted experts their gradient, and what is made again.
    experts = expert_copies(facts, work) / facts.layers * (1 if work.checkpointing == "none" else 2)
    dequantized = max(linear.inputs * linear.outputs for linear in facts.linears) if work.quantized else 0
    made = experts + dequantized * work.compute_bytes
    return tokens(work) * (again + values / work.tensor_parallel) + made


def logits(facts: ModelFacts, work: Workload) -> float:
    """The output head and the loss: `logit_bytes` for every logit.

    With the loss in fp32, as here: the log-probabilities that the forward pass saves, their gradient and the logits'
    gradient, 4 each, make 12. A loop that still holds the model's bf16 logits then has 2 more. Soft-capping saves its tanh.
    """
    positions = tokens(work) if work.logit_positions is None else work.logit_positions
    capped = work.compute_bytes if facts.model_type in SOFT_CAPPED else 0
    return positions * facts.vocab * (work.logit_bytes + capped) / work.tensor_parallel


# What strategies need besides ----------------------------------------------------------------------------------------


def casts(facts: ModelFacts, work: Workload) -> float:
    """The copy that autocast makes of every trained matrix in the forward pass, and keeps until its end (torch.amp,
    "cache_enabled")."""
    if not (work.autocast and work.full):
        return 0
    return work.compute_bytes * (matrix_parameters(facts) + (facts.head_parameters or facts.embedding_parameters))


def lasting_casts(facts: ModelFacts, work: Workload) -> float:
    """Those that the backward pass needs: all, or of checkpointed layers one layer's."""
    if work.checkpointing == "none":
        return casts(facts, work)
    matrices = matrix_parameters(facts)
    return casts(facts, work) - work.compute_bytes * (matrices - matrices / facts.layers) if casts(facts, work) else 0


def gathered(facts: ModelFacts, work: Workload) -> float:
    """Weights that are whole for computing. FSDP: embeddings and head, the layer at work and the next one; without
    resharding all. ZeRO-3: all, up to stage3_max_live_parameters."""
    root = root_parameters(facts, work)
    # FSDP makes a copy in one process too, where it computes in another dtype.
    casts_whole = work.engine == "fsdp" and work.compute_bytes != (
        work.trained_bytes if work.full else work.frozen_bytes
    )
    if weight_shards(work) == work.tensor_parallel and not work.offload_weights and not casts_whole:
        return 0
    per_weight = whole_weights(facts, work) / facts.parameters if work.quantized else work.compute_bytes
    if work.engine == "deepspeed":
        return min(facts.parameters, max(work.zero_live, root)) * per_weight
    layers = 2 if work.reshard else facts.layers
    return (root * work.compute_bytes + layers * facts.layer_parameters * per_weight) / work.tensor_parallel


def root_parameters(facts: ModelFacts, work: Workload) -> int:
    """What is in no layer, and FSDP gathers and reduces at once."""
    outside = (facts.embedding_parameters, facts.head_parameters)
    return max(outside) if work.split_root else sum(outside)


def layer_buffers(facts: ModelFacts, work: Workload) -> float:
    """What gradients pass through while a layer goes backward. FSDP: whole as computed, and once more in the dtype that is
    summed. ZeRO-1 and 2: the bucket that they will be copied to."""
    if work.engine == "fsdp":
        return fsdp_buffers(facts, work, facts.layer_parameters)
    return staging_bucket(work) if work.device == "cuda" else 0


def reduction_buffers(facts: ModelFacts, work: Workload) -> float:
    """What gradients pass through when they are summed over the ranks.

    FSDP: those of the root. ZeRO-1: a flat bucket. ZeRO-2: a bucket, flat, and in the dtype that is sent (DeepSpeed,
    stage_1_and_2.py, `allreduce_bucket`). ZeRO-3: a second bucket, whose parts are put together for each rank
    (comm/coalesced_collectives.py). DDP's buckets are the gradients.
    """
    if work.engine == "fsdp":
        return fsdp_buffers(facts, work, root_parameters(facts, work))
    if work.engine != "deepspeed":
        return 0
    cast = work.communication_bytes if work.communication_bytes != work.compute_bytes else 0
    flat = {1: work.gradient_bytes, 2: work.compute_bytes + cast, 3: work.communication_bytes}[work.zero_stage or 3]
    bucket = ZERO_BUCKET if bf16_optimizer(work) else work.zero_bucket
    return staging_bucket(work) + min(bucket, work.trained) * flat


def fsdp_buffers(facts: ModelFacts, work: Workload, parameters: int) -> float:
    trained = parameters if work.full else work.trained / facts.layers
    return trained * (work.compute_bytes + work.gradient_bytes) / work.tensor_parallel


def staging_bucket(work: Workload) -> float:
    """ZeRO-1's and 2's, to which gradients are copied: it is there from the start of the backward pass to its end, and
    under `overlap_comm` there are two (stage_1_and_2.py, `setup_buckets`). On a CPU ZeRO-1's gradients move to it;
    BF16_Optimizer has none."""
    buckets = (2 if work.overlap_comm else 1) * bucket_elements(work)
    if work.zero_stage == 2:
        return buckets * work.compute_bytes
    if work.zero_stage == 1 and work.device == "cuda" and not bf16_optimizer(work):
        return buckets * work.gradient_bytes
    return 0


def lasting_bucket(facts: ModelFacts, work: Workload) -> float:
    """ZeRO-3's, which is made once (DeepSpeed, stage3.py, `bucket.buffer`). ZeRO-1 and 2 with the optimizer in host memory
    have room for the gradient of the largest weight (stage_1_and_2.py, `temp_grad_buffer_for_gpu_offload`), of which a CPU
    gives no page before it is written to."""
    if work.zero_stage == 3:
        return bucket_elements(work) * work.communication_bytes
    if work.zero_stage is None or not work.offload_optimizer or work.device == "cpu":
        return 0
    return largest_trained(facts, work) * work.compute_bytes


def largest_trained(facts: ModelFacts, work: Workload) -> int:
    """Elements of the largest weight, or of the largest half of an adapter."""
    if work.full:
        matrices = (linear.inputs * linear.outputs for linear in facts.linears)
        return max(facts.embedding_parameters, facts.head_parameters, *matrices)
    widths = (max(linear.inputs, linear.outputs) for linear in facts.linears if linear.name in work.targets)
    return work.rank * max(widths, default=0)


def bucket_elements(work: Workload) -> int:
    """Of a fixed size; a CPU only gives the pages of it that are written to."""
    return work.zero_bucket if work.device == "cuda" else min(work.zero_bucket, work.trained)


def update_temporaries(facts: ModelFacts, work: Workload) -> float:
    """torch's optimizers over all parameters at once ("foreach", the default on GPUs) need one more tensor of their size;
    over one at a time, of the largest one's. SGD only where decay is added to the gradients. DeepSpeed hands over an fp32
    copy of the gradients, stage 3 in groups."""
    if work.offload_optimizer:
        return 0
    own = work.trained / optimizer_shards(work)
    largest = max(facts.embedding_parameters, facts.head_parameters) if work.full else 0
    bytes_each = work.moment_bytes if work.optimizer == "adamw" or work.weight_decay else 0
    if work.engine == "deepspeed":
        at_once = min(own, work.zero_group) if work.zero_stage == 3 else own
        return at_once * (FP32 if work.master_bytes == FP32 else work.gradient_bytes)
    return (own if work.foreach else min(own, largest)) * bytes_each


# The machine besides the device --------------------------------------------------------------------------------------


def host(facts: ModelFacts, work: Workload) -> int:
    """Resident memory of a machine's processes beside the GPUs: every process loads the whole model before it is spread,
    and DeepSpeed casts it there; the main one collects a whole checkpoint, or the result and, of a whole model, what it
    reads back of it; what is offloaded stays. A CPU is the device itself."""
    cast = work.trained * work.trained_bytes if work.engine == "deepspeed" and work.trained_bytes == BF16 else 0
    loading = work.processes_per_node * (process.loaded(facts, work) + cast)
    checkpoint = process.checkpoint_bytes(work) if work.checkpoints else 0
    result = work.trained * FP32 * (2 if work.full else 1)
    kept = work.processes_per_node * (process.libraries(work) + offloaded(facts, work))
    return int(kept + max(loading, checkpoint, result))


def offloaded(facts: ModelFacts, work: Workload) -> float:
    """Of one process: weights; optimizer state, masters and the gradients that they take."""
    kept = 0.0
    if work.offload_weights:
        kept += whole_weights(facts, work) / weight_shards(work)
        kept += 0 if work.full else work.trained * work.trained_bytes / weight_shards(work)
    if work.offload_optimizer:
        moments = 2 * work.moment_bytes if work.optimizer == "adamw" else 0
        # ZeRO-3 sums gradients in one buffer, and hands them to the optimizer in another (stage3.py,
        # `grad_partitions_flat_buffer`, `subgroup_gradient_buffer`).
        gradients = FP32 * (2 if work.zero_stage == 3 else 1)
        kept += work.trained * (moments + work.master_bytes + gradients) / optimizer_shards(work)
    return kept


def disk(work: Workload) -> int:
    """The checkpoints that are there at the same time, and the result: an adapter, or the whole model in fp32."""
    return work.checkpoints * process.checkpoint_bytes(work) + work.trained * FP32
