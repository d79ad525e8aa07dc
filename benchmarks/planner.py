"""The planner against published measurements: `python benchmarks/planner.py [CASES.json]`.

Prints predicted / measured for the memory of every case, grouped by source, and for its speed where that was measured.
Exit code 1 where a target is missed: median error within 8 %, nine of ten within 20 %, none that ran said not to fit.

A case says how a job was run, in its own words; any of them may be missing. What its framework does by that is stated
here: facts of the framework's source, not numbers to fit. The planner itself (dsft.plan.memory) knows no case.
measured.json was collected after the planner had been made; its first run gave a median error of 16.3 %, 56 % within 20 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsft.plan.cost import step_time
from dsft.plan.facts import Linear, ModelFacts
from dsft.plan.gpus import GPUS, Gpu
from dsft.plan.lora import lora_parameters
from dsft.plan.memory import Memory, activations, estimate, tokens
from dsft.plan.units import BF16, FP32, GIB
from dsft.plan.workload import Workload

MEASURED = Path(__file__).with_name("measured.json")
MEDIAN, WITHIN, SHARE = 0.08, 0.20, 0.90  # the targets
Case = dict[str, Any]


def main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no fault
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path, nargs="?", default=MEASURED, help="a JSON list of measured runs")
    parser.add_argument("--parts", action="store_true", help="print the parts of each prediction too")
    arguments = parser.parse_args()
    told = json.loads(arguments.cases.read_text())
    cases = [complete(case) for case in told if all(map(case.get, NEEDED))]
    rows = [(case, *predict(case)) for case in cases]
    errors, refused = report_memory(rows, arguments.parts)
    report_speed(rows)
    print()
    median = statistics.median(map(abs, errors))
    share = sum(abs(error) <= WITHIN for error in errors) / len(errors)
    print(f"{len(errors)} runs: median error {median:.1%} (target {MEDIAN:.0%})")
    print(f"within {WITHIN:.0%}: {share:.0%} (target {SHARE:.0%})")
    print(f"said not to fit, though they ran: {', '.join(refused) or 'none'}")
    return int(median > MEDIAN or share < SHARE or bool(refused))


def report_memory(rows, parts: bool) -> tuple[list[float], list[str]]:
    """Prints the table; the errors as predicted/measured - 1, and the ids of what was said not to fit."""
    errors, refused, source = [], [], None
    by_source: dict[str, list[float]] = {}
    for case, _, memory, predicted in rows:
        name = short_source(case["source"])
        if name != source:
            source = name
            print(f"\n{source}\n  {'GiB':>7} {'planner':>7} {'error':>7}  run")
        error = predicted / case["peak_gib"] - 1
        errors.append(error)
        by_source.setdefault(name, []).append(error)
        limit = capacity(case["gpu"])
        over = limit is not None and memory.least / GIB > limit
        if over:
            refused.append(case["id"])
        print(f"  {case['peak_gib']:7.2f} {predicted:7.2f} {error:+7.1%}  {case['id']}{'  > the GPU' if over else ''}")
        if parts:
            print("          " + ", ".join(f"{part} {size / GIB:.2f}" for part, size in memory.parts.items() if size))
    print("\nMedian of the errors, and worst, by source")
    for name, found in by_source.items():
        worst = max(found, key=abs)
        print(f"  {statistics.median(map(abs, found)):6.1%} {worst:+7.1%}  {len(found):3d}  {name}")
    return errors, refused


def report_speed(rows) -> None:
    """Prints measured and predicted tokens a second and GPU, and how often the order of two runs is predicted right."""
    speeds = []
    for case, work, _, _ in rows:
        gpu = gpu_of(case["gpu"])
        if case.get("tok_s_gpu") and gpu:
            seconds = step_time(facts_of(case), work, gpu, case["nodes"]).seconds
            update = tokens(work) * work.accumulation / work.tensor_parallel
            speeds.append((case["id"], case["tok_s_gpu"], update / seconds))
    if not speeds:
        return
    print(f"\nTokens a second and GPU\n  {'run':>7} {'planner':>7} {'ratio':>7}")
    for name, measured, predicted in speeds:
        print(f"  {measured:7.0f} {predicted:7.0f} {predicted / measured:7.2f}  {name}")
    ratios = sorted(predicted / measured for _, measured, predicted in speeds)
    pairs = [
        (one, two) for one, two in itertools.combinations(speeds, 2) if max(one[1], two[1]) > 1.1 * min(one[1], two[1])
    ]
    right = sum((one[1] > two[1]) == (one[2] > two[2]) for one, two in pairs)
    print(f"  median ratio {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    print(f"  pairs of runs that differ by a tenth: {len(pairs)}, in the right order {right / max(1, len(pairs)):.0%}")


def predict(case: Case) -> tuple[Workload, Memory, float]:
    """The case as the planner sees it, its memory, and the number to compare: GiB of the kind that was measured."""
    facts, work = translate(case)
    memory = estimate(facts, work)
    predicted = comparable(case["peak_kind"], memory)
    if "activation" in case["offload"]:
        idle = comparable(case["peak_kind"], estimate(facts, replace(work, rows=0)))  # all but activations
        predicted = max(idle, predicted - offloaded_activations(facts, work))
    if "use_cache" in said(case) and "dropped before" not in said(case):
        predicted += cached_keys(facts, work)
    return work, memory, predicted / GIB


def comparable(kind: str, memory: Memory) -> int:
    """Bytes of the kind that a case measured, the first that it names: what tensors take (active: with those freed but
    still in use by a stream), what the allocator holds, or all of the device. A stated size of the CUDA context is taken
    at its word."""
    first = re.search(r"alloc|active|reserved", kind.lower())
    if first:
        return memory.reserved if first[0] == "reserved" else memory.allocated
    stated = re.search(r"includes (\d+) MiB of CUDA context", kind)
    return memory.reserved + int(stated[1]) * 1024**2 if stated else memory.device


def offloaded_activations(facts: ModelFacts, work: Workload) -> float:
    """Bytes of saved tensors that wait on the CPU: of all layers but the five that are on their way (torchtune's
    `max_fwd_stash_size`, training/_activation_offloading.py)."""
    return max(0, 1 - 5 / facts.layers) * activations(facts, work)


def cached_keys(facts: ModelFacts, work: Workload) -> int:
    """Bytes of the keys and values of all layers, where the cache for generating stays on in training: transformers' own
    checkpointing turns it off, FSDP's does not (llama-cookbook, pull/165)."""
    return 2 * facts.layers * facts.kv_heads * facts.head_dim * tokens(work) * work.compute_bytes


# From a case to the planner's terms ----------------------------------------------------------------------------------


NEEDED = ("peak_gib", "seq", "model")  # without these there is nothing to compare
TEXTS = ("id", "source", "engine", "gpu", "precision", "optimizer", "attention", "offload", "peak_kind")
COUNTS = {"gpus": 1, "tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}


def complete(case: Case) -> Case:
    """The case with a value for all that is read from it."""
    case = {**case, **{name: str(case.get(name) or "") for name in TEXTS}}
    case |= {name: case.get(name) or least for name, least in COUNTS.items()}
    checkpointing = str(case.get("activation_checkpointing") or "none").lower()
    # Unsloth's checkpoints are on the CPU.
    moved = " activations" if re.search(r"offload|unsloth", checkpointing) else ""
    case |= {"offload": case["offload"].lower() + moved, "activation_checkpointing": checkpointing}
    case["flags"] = case.get("flags") or []
    case["gpus"] = max(case["gpus"], case["tp"] * case["pp"] * case["cp"])
    case["nodes"] = case.get("nodes") or -(-case["gpus"] // 8)
    method = case.get("method") or {}
    method = method if isinstance(method, dict) else {"type": method}
    case["method"] = {**method, "type": str(method.get("type") or "full").lower()}
    model = dict(case["model"])
    model["heads"] = model.get("heads") or max(1, model["hidden"] // 128)
    model["kv_heads"] = model.get("kv_heads") or model["heads"]
    model["params"] = model.get("params") or llama_parameters(model)
    return case | {"model": model}


def llama_parameters(model: dict[str, Any]) -> int:
    """Of a model whose case does not say: matrices and embeddings, as a Llama has them."""
    hidden, head_dim = model["hidden"], model.get("head_dim") or model["hidden"] // model["heads"]
    attention = 2 * hidden * head_dim * (model["heads"] + model["kv_heads"])
    blocks = 3 * hidden * model["ffn"] * (model.get("experts") or 1)
    return model["layers"] * (attention + blocks) + hidden * model["vocab"] * (1 if model.get("tied") else 2)


def said(case: Case) -> str:
    """All that a case says of the way of training, but its source: a page holds many ways."""
    told = {name: value for name, value in case.items() if name not in ("id", "source", "model", "gpu", "peak_kind")}
    return re.sub(r"\b(no|not|without) \w+", "", json.dumps(told).lower())


def translate(case: Case) -> tuple[ModelFacts, Workload]:
    facts = facts_of(case)
    work = general(case, facts)
    for word, change in TRANSLATIONS.items():
        if word in case["source"]:
            return change(case, facts, work)
    return facts, work


def facts_of(case: Case) -> ModelFacts:
    """The model as transformers names its parts; of a pipeline the stage with the embedding, or the head."""
    model = case["model"]
    hidden, ffn, vocab, layers = model["hidden"], model["ffn"], model["vocab"], -(-model["layers"] // case["pp"])
    head_dim = model.get("head_dim") or hidden // model["heads"]
    query, key = model["heads"] * head_dim, model["kv_heads"] * head_dim
    experts, chosen = model.get("experts") or 0, model.get("experts_per_token") or 0
    family = model_type(model)
    gated = family in GATED
    shapes = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    if gated and not experts:
        shapes |= {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
    elif not experts:
        shapes |= {"fc1": (hidden, ffn), "fc2": (ffn, hidden)}
    embedding = vocab * hidden
    head = 0 if model.get("tied") or family == "bert" else embedding
    layer = (model["params"] - embedding - head) // model["layers"]
    if case["pp"] > 1:
        embedding, head = max(embedding, head), 0
    parameters = layers * layer + embedding + head if case["pp"] > 1 else model["params"]
    idle = (experts - chosen) * 3 * hidden * ffn * layers
    return ModelFacts(
        model_type=family,
        architecture="",
        decoder_layer=None,
        layers=layers,
        hidden=hidden,
        heads=model["heads"],
        kv_heads=model["kv_heads"],
        head_dim=head_dim,
        ffn=ffn * (chosen or 1),
        gated=gated,
        experts=experts,
        experts_per_token=chosen,
        vocab=vocab,
        tied=bool(model.get("tied")),
        max_positions=None,
        parameters=parameters,
        active_parameters=parameters - idle,
        layer_parameters=layer,
        embedding_parameters=embedding,
        head_parameters=head,
        linears=tuple(Linear(name, *shape, layers, False) for name, shape in shapes.items()),
        dtype=None,
        stored_bytes=None,
        chat_template=None,
    )


def model_type(model: dict[str, Any]) -> str:
    """A family with the same kind of layers: what a case does not say is a Llama's."""
    words = f"{model.get('name')} {model.get('arch', '')} {model.get('mlp', '')}".lower()
    for word, family in FAMILIES.items():
        if word in words:
            return family
    return "llama"


FAMILIES = {"bert": "bert", "gpt2": "gpt2", "gpt-2": "gpt2", "opt-": "opt", "bloom": "bloom", "not gated": "bloom"}
FAMILIES |= {"neox": "gpt_neox", "pythia": "gpt_neox", "falcon": "bloom", "qwen3": "qwen3", "gemma-2-": "gemma2"}
FAMILIES |= {"gemma2-": "gemma2", "gemma-3-": "gemma3", "phi-1": "phi", "phi-2": "phi", "gpt-j": "gptj"}
FAMILIES |= {"olmo-2": "olmo2", "mpt-": "bloom"}
FAMILIES |= {"santacoder": "gpt_bigcode", "starcoder": "gpt_bigcode"}
GATED = {"llama", "qwen3", "gemma2", "gemma3", "olmo2"}


def general(case: Case, facts: ModelFacts) -> Workload:
    """What follows from a case's own words, by the ways of transformers and PyTorch."""
    method, precision, optimizer = case["method"], case["precision"].lower(), case["optimizer"].lower()
    data_parallel = max(1, case["gpus"] // (case["tp"] * case["pp"]))
    engine, stage = engine_of(case["engine"], data_parallel)
    full, deepspeed = method["type"] == "full", engine == "deepspeed"
    pure = re.search(r"pure|true|all states bf16", precision) is not None
    pure |= full and re.match(r"bf16 (weights|params)(?!.*(fp32|mixed|autocast|amp))", precision) is not None
    plain = re.match(r"fp32|32-true", precision) is not None and re.search(r"bf16|fp16|mixed", precision) is None
    mixed = not pure and not plain
    targets, rank = targets_of(method, facts), method.get("r") or 0
    # peft's prepare_model_for_kbit_training casts what is not quantized to fp32; else frozen weights are bf16.
    upcast = re.search(r"kbit|other weights fp32", precision) is not None
    stored = FP32 if plain or upcast or (mixed and full and not deepspeed) else BF16
    offload_weights, offload_optimizer = offload_of(case["offload"], engine)
    per_node = max(1, case["gpus"] // case["nodes"])
    work = Workload(
        engine=engine,
        zero_stage=stage,
        world_size=case["gpus"],
        processes_per_node=per_node,
        shards=per_node if re.search(r"hsdp|hybrid", case["engine"].lower()) else data_parallel,
        reshard=re.search(r"shard.grad.op", case["engine"].lower()) is None,
        tensor_parallel=case["tp"],
        context_parallel=case["cp"],
        rows=case["micro_batch"],
        length=case["seq"],
        accumulation=case.get("grad_accum") or 1,
        logit_positions=0 if facts.model_type == "bert" else case["seq"] if case["pp"] > 1 else None,
        # transformers: the output object holds the logits while the loss goes backward.
        logit_bytes=14,
        trained=facts.parameters if full else lora_parameters(facts, rank, targets),
        full=full,
        targets=targets,
        rank=rank,
        dropout=re.search(r"dropout\D{0,3}0?\.\d*[1-9]", said(case)) is not None,
        frozen_bytes=1 if re.search(r"(int8|8-?bit) (base|weight)|load_in_8bit", precision) else stored,
        trained_bytes=stored if full or pure or deepspeed else FP32,
        gradient_bytes=BF16 if pure or (deepspeed and mixed) else FP32,
        master_bytes=(BF16 if pure else FP32) if deepspeed else 0,
        moment_bytes=BF16 if pure else FP32,
        compute_bytes=FP32 if plain else BF16,
        # With frozen weights in bf16 so are the residual stream and what adapters add to it.
        autocast=mixed and engine in ("single", "ddp") and stored == FP32,
        adapter_bytes=FP32 if "adapter fp32" in precision and not autocasts(precision) else BF16,
        quantized=quantized_of(method, precision),
        attention="eager" if "eager" in case["attention"] else "flash" if "flash" in case["attention"] else "sdpa",
        # A mask for padding takes transformers off the kernels that know grouped heads.
        repeated_heads=case.get("packed") is False,
        checkpointing=checkpointing_of(case["activation_checkpointing"]),
        compiled=bool(case.get("compiled")),
        bucket_views="no_shard" in case["engine"].lower(),  # DDP's default makes none
        overlap_comm=stage not in (1, 2) or "overlap_comm" in said(case),
        offload_weights=offload_weights,
        offload_optimizer=offload_optimizer,
    )
    return with_loss(said(case), facts, with_optimizer(optimizer, work))


def with_optimizer(name: str, work: Workload) -> Workload:
    """Paged state is managed memory, not PyTorch's allocator's; a step in the backward pass (LOMO: always) leaves no more
    than one layer's gradients; a fused step has no temporaries; Lion, momentum and Muon keep one moment of two; GaLore
    and APOLLO keep theirs of a low rank."""
    kinds = {r"8-?bit": "adam8bit", r"adafactor|galore|apollo": "adafactor", r"sgd(?!.*momentum)|lomo": "sgd"}
    kind = next((kind for pattern, kind in kinds.items() if re.search(pattern, name)), "adamw")
    if re.search(r"in.backward|in.bwd|lomo", name):
        work = replace(work, gradient_bytes=0, foreach=False)
    if re.search(r"lion|momentum|muon", name):
        work = replace(work, moment_bytes=work.moment_bytes // 2)
    return replace(work, optimizer="sgd" if "paged" in name else kind, foreach=work.foreach and "fused" not in name)


def with_loss(words: str, facts: ModelFacts, work: Workload) -> Workload:
    """Kernels for the loss. Liger and cut cross-entropy make the logits by chunks of as many values as the tokens have
    hidden ones, rounded up to a power of two, and keep the hidden states' gradient (Liger, fused_linear_cross_entropy.py):
    counted as chunks of bf16 logits with one byte more. By chunks that all stay (torchtune, modules/loss): bf16 logits,
    fp32 log-probabilities and the gradient in bf16; compiled, each gradient takes the place of its logits. A kernel
    behind transformers' fp32 copy of the logits writes the gradient over that copy: 2 + 4 + 2. Before 4.46 transformers'
    output object held that copy; a loop may drop it."""
    if re.search(r"liger|fused linear|cut.cross|unsloth", words):
        chunk = min(tokens(work), 2 * tokens(work) * facts.hidden // facts.vocab)
        return replace(work, logit_positions=chunk, logit_bytes=3)
    if re.search(r"chunk|linear.?cross", words):  # eight chunks
        return replace(work, logit_bytes=2 + 2 / 8 if work.compiled else 8)
    kept = {r"fused cross|fused ce\b": 8, r"dropped before": 12, r"fp32 logits": 16}
    size = next((size for way, size in kept.items() if re.search(way, words)), work.logit_bytes)
    return replace(work, logit_bytes=size)


def engine_of(words: str, data_parallel: int) -> tuple[str, int | None]:
    """`fsdp1`, `fsdp2+tp`, `deepspeed zero3`, ... as an engine and a ZeRO stage. NO_SHARD is FSDP's name for DDP;
    Megatron's distributed optimizer is ZeRO 1. What is not known keeps a copy on every GPU."""
    words = words.lower()
    stage = re.search(r"(?:zero|stage)[- _]?(\d)", words)
    if "no_shard" in words:
        return "ddp", None
    if "fsdp" in words or "hsdp" in words or "fully shard" in words:
        return "fsdp", None
    if "deepspeed" in words or stage:
        return "deepspeed", int(stage[1]) if stage else 3
    if "megatron" in words or "nemo" in words:
        return "deepspeed", 1
    return ("ddp" if "ddp" in words or data_parallel > 1 else "single"), None


def offload_of(words: str, engine: str) -> tuple[bool, bool]:
    """Whether weights and optimizer are in the host's memory. FSDP offloads all or nothing."""
    kinds = re.sub(r"activations?", "", words)
    all_of_it = engine == "fsdp" and re.search(r"param|grad|optim|weight|true|cpu_offload", kinds) is not None
    weights = all_of_it or re.search(r"param|weight", kinds) is not None
    return weights, weights or re.search(r"optim|true", kinds) is not None


def quantized_of(method: dict[str, Any], precision: str) -> str | None:
    """Four bits a weight. GPTQ's scales, 16 bits and a 4-bit zero for 128 weights, are as small as double-quantized ones."""
    four = r"nf4|fp4|4-?bit|int4|gptq|awq"
    if method["type"] == "full" or not (method["type"].startswith("q") or re.search(four, precision)):
        return None
    return "nf4-double" if re.search(r"dq|double|nested|gptq|awq|int4", precision) else "nf4"


def checkpointing_of(words: str) -> str:
    if "select" in words or "sac" in words:
        return "selective"
    return "none" if re.match(r"none|no\b|off|false|disabled", words) else "full"


def autocasts(precision: str) -> bool:
    return re.search(r"(?<!no )\bautocast\b", precision) is not None


def targets_of(method: dict[str, Any], facts: ModelFacts) -> tuple[str, ...]:
    names = tuple(linear.name for linear in facts.linears)
    targets = method.get("targets") or ()
    words = re.findall(r"[\w-]+", targets if isinstance(targets, str) else " ".join(map(str, targets)))
    if any(word.startswith("all") for word in words):
        return names
    if method["type"] != "full" and "ora" in method["type"] and not words:
        words = ["q_proj", "v_proj"]  # peft's for a Llama
    found = {name for word in words for name in TARGETS.get(word.rpartition(".")[2], (word,))}
    return tuple(name for name in names if name in found)


QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
TARGETS = {"query": QKV[:1], "q": QKV[:1], "key": QKV[1:2], "k": QKV[1:2], "value": QKV[2:], "v": QKV[2:]}
TARGETS |= dict.fromkeys(("c_attn", "qkv_proj", "query_key_value", "W_pack", "qkv"), QKV)
TARGETS |= dict.fromkeys(("proj", "projection", "output_proj", "out_proj", "o", "dense"), ("o_proj",))
TARGETS |= dict.fromkeys(("attn", "attention"), (*QKV, "o_proj"))
TARGETS |= {"mlp": MLP, "c_proj": ("o_proj", "down_proj", "fc2"), "w2": ("down_proj",), "gate_up_proj": MLP[:2]}
TARGETS |= {"w1": MLP[:2], "w3": MLP[:2], "dense_h_to_4h": ("fc1",), "dense_4h_to_h": ("fc2",), "c_fc": ("fc1",)}


# What frameworks do --------------------------------------------------------------------------------------------------


def torchtitan(case: Case, facts: ModelFacts, work: Workload) -> tuple[ModelFacts, Workload]:
    """train.py frees the logits before it goes backward. Since bbb1b616e (2025-04) the loss is compiled: bf16 logits and
    their bf16 gradient are all there is. Since 83e694105 (2025-07) embeddings and head are sharded apart."""
    months = ["".join(found) for found in re.findall(r"(202\d)-?([01]\d)", case["source"])]
    month = max(months, default="202401" if "pull/165" in case["source"] else "202512")
    logit_bytes = 4 if month >= "202504" and work.compiled else 12
    return facts, replace(work, logit_bytes=logit_bytes, split_root=month > "202507")


def litgpt(case: Case, facts: ModelFacts, work: Workload) -> tuple[ModelFacts, Workload]:
    """litgpt/model.py, lora.py, utils.py: one matrix for queries, keys and values; keys and values copied to all heads
    where they are grouped, and otherwise views that keep the whole product; adapters in bf16 with dropout 0.05, whose
    zero padding keeps their output; the loss in bf16 by chunks: logits, log-probabilities and their gradient; no shared
    weight where transformers ties embeddings."""
    model, older = case["model"], "resource-tables" in case["source"]  # RMSNorm wholly in fp32 came after that table
    query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    linears = [li for li in facts.linears if li.name not in ("q_proj", "k_proj", "v_proj")]
    linears.insert(0, Linear("attn", facts.hidden, query + 2 * key, facts.layers, False))
    grouped = facts.kv_heads != facts.heads
    saved = 0 if grouped else BF16 * (query + key)  # the product is there whole, for the values' sake
    targets = tuple(name for name in work.targets if name not in ("q_proj", "k_proj", "v_proj"))
    adapted = {"q_proj": query, "k_proj": key, "v_proj": key}.items()
    if any(name in work.targets for name, _ in adapted):
        targets = ("attn", *targets)
        if not all(name in work.targets for name, _ in adapted):
            saved += BF16 * sum(width for name, width in adapted if name in work.targets)
    if work.quantized:
        # bitsandbytes up to 0.42 hangs the inputs of 4-bit matrices on the autograd node, where they stay as long as the
        # loss does: in litgpt's loop until the next forward pass is done, beside its own.
        passes = 1 if older else 2  # there only the first pass has the longest row
        saved += passes * BF16 * (2 * facts.hidden + facts.ffn)
    if work.full and not older:
        saved += 2 * (FP32 - BF16) * facts.hidden  # the normalized values too
    untied = facts.vocab * facts.hidden if model.get("tied") else 0
    facts = replace(
        facts,
        model_type="bloom" if not facts.gated else facts.model_type,
        linears=tuple(linears),
        parameters=facts.parameters + untied,
        head_parameters=facts.head_parameters + untied,
    )
    return facts, replace(
        work,
        trained=facts.parameters if work.full else work.trained,
        targets=targets,
        dropout=not work.full,
        adapter_bytes=BF16,
        repeated_heads=grouped,
        saved_bytes=saved,
        norm_bytes=BF16 if older else FP32,
        logit_bytes=6,
        accumulation=work.accumulation if case.get("grad_accum") else 2,
    )


def peft(case: Case, facts: ModelFacts, work: Workload) -> tuple[ModelFacts, Workload]:
    """method_comparison: prompt tuning puts 200 virtual tokens before each row. The documents' runs are of examples/sft,
    with a LoRA dropout of 0.1, on transformers before 4.46, whose output object held fp32 logits."""
    if case["method"]["type"] == "prompt tuning":
        work = replace(work, length=work.length + 200)
    if "docs/source/accelerate" in case["source"]:
        work = replace(work, dropout=True, logit_bytes=16)
    return facts, work


def torchtune(case: Case, facts: ModelFacts, work: Workload) -> tuple[ModelFacts, Workload]:
    """recipes: `dtype: bf16` is all of it, optimizer too; fused AdamW; NF4 by torchao, double-quantized; embeddings and
    head sharded apart (custom_sharded_layers); the loss by chunks, as all configs have it since 30b8519e8 (2024-09).
    Behind a plain loss the model gives fp32 logits: these, the log-probabilities and the gradient; compiled, the first,
    their gradient, and that in bf16."""
    if re.search(r"plain cross|(?<!linear)crossentropyloss|(un|not |no )chunked", json.dumps(case["flags"]).lower()):
        work = replace(work, logit_bytes=10 if work.compiled else 12)
    else:
        work = with_loss("chunked", facts, work)
    if work.compute_bytes == BF16:
        states = {"frozen_bytes": BF16, "trained_bytes": BF16, "moment_bytes": BF16, "adapter_bytes": BF16}
        work = replace(work, **states, gradient_bytes=min(work.gradient_bytes, BF16), autocast=False)
    return facts, replace(work, foreach=False, split_root=True, quantized="nf4-double" if work.quantized else None)


def transformers_2022(case: Case, facts: ModelFacts, work: Workload) -> tuple[ModelFacts, Workload]:
    """AdamW of then updates one parameter at a time."""
    return facts, replace(work, foreach=False)


TRANSLATIONS: dict[str, Callable[[Case, ModelFacts, Workload], tuple[ModelFacts, Workload]]] = {
    "torchtitan": torchtitan,
    "litgpt": litgpt,
    "torchtune": torchtune,
    "huggingface/peft": peft,
    "docs/source/performance.mdx": transformers_2022,
}


def short_source(source: str) -> str:
    return source.split(" (")[0].split(" — ")[0][:100]


def gpu_of(words: str) -> Gpu | None:
    """The row of the planner's table for a case's words; of the same name the size they say, or else the largest."""
    stated = stated_size(words)
    found = []
    for key, gpu in GPUS.items():
        name, _, size = key.removeprefix("rtx-").partition("-")
        named = re.search(rf"(?<![a-z0-9])(rtx)?{name}(?![a-z0-9])", words.lower())
        if named and (stated is None or not size or stated == int(size.removesuffix("gb"))):
            found.append(gpu)
    return max(found, key=lambda gpu: gpu.memory, default=None)


def stated_size(words: str) -> int | None:
    size = re.search(r"(\d+) ?gi?b?\b", words.lower())
    return int(size[1]) if size else None


def capacity(words: str) -> float | None:
    """GiB that a process can use; None where the case does not say which GPU."""
    gpu, stated = gpu_of(words), stated_size(words)
    return gpu.memory / GIB if gpu else float(stated) if stated else None


if __name__ == "__main__":
    raise SystemExit(main())
