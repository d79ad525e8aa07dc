"""The planner against published measurements: `python benchmarks/planner.py CASES.json`.

Prints predicted / measured for the memory of every case, grouped by source, and for its speed where that was measured.
Exit code 1 where a target is missed: median error within 8 %, nine of ten within 20 %, none that ran said not to fit.

A case says how a job was run; what its framework does by that is stated here, in `TRANSLATIONS`: facts of the framework's
source, not numbers to fit. The planner itself (dsft.plan.memory) knows no case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsft.plan.cost import step_time
from dsft.plan.facts import Linear, ModelFacts
from dsft.plan.gpus import GPUS, Gpu
from dsft.plan.lora import lora_parameters
from dsft.plan.memory import BF16, FP32, GIB, Memory, Workload, estimate, tokens

MEDIAN, WITHIN, SHARE = 0.08, 0.20, 0.90  # the targets
Case = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path, help="a JSON list of measured runs")
    parser.add_argument("--parts", action="store_true", help="print the parts of each prediction too")
    arguments = parser.parse_args()
    cases = json.loads(arguments.cases.read_text())
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
        over = limit is not None and memory.device / GIB > limit
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
    return work, memory, comparable(case["peak_kind"], memory) / GIB


def comparable(kind: str, memory: Memory) -> int:
    """Bytes of the kind that a case measured. A stated size of the CUDA context is taken at its word."""
    if "allocated" in kind or kind.startswith("peak active"):
        return memory.allocated
    if "reserved" in kind:
        return memory.reserved
    stated = re.search(r"includes (\d+) MiB of CUDA context", kind)
    return memory.reserved + int(stated[1]) * 1024**2 if stated else memory.device


# From a case to the planner's terms ----------------------------------------------------------------------------------


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
    head = 0 if model["tied"] or family == "bert" else embedding
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
        tied=model["tied"],
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
    said = f"{model['name']} {model.get('arch', '')} {model.get('mlp', '')}".lower()
    for word, family in FAMILIES.items():
        if word in said:
            return family
    return "llama"


FAMILIES = {"bert": "bert", "gpt2": "gpt2", "gpt-2": "gpt2", "opt-": "opt", "bloom": "bloom", "not gated": "gpt_neox"}
FAMILIES |= {"neox": "gpt_neox", "pythia": "gpt_neox", "falcon": "gpt_neox", "qwen3": "qwen3", "gemma-2-": "gemma2"}
FAMILIES |= {"gemma2-": "gemma2", "gemma-3-": "gemma3"}
GATED = {"llama", "qwen3", "gemma2", "gemma3"}


def general(case: Case, facts: ModelFacts) -> Workload:
    """What follows from a case's own words, by the ways of transformers and PyTorch."""
    method, precision, optimizer = case["method"], case["precision"].lower(), case["optimizer"].lower()
    engine, stage = engine_of(case["engine"])
    full, deepspeed = method["type"] == "full", engine == "deepspeed"
    quantized = None if "nf4" not in precision else "nf4-double" if re.search(r"dq|double", precision) else "nf4"
    pure = re.search(r"pure|true|all states bf16", precision) is not None
    plain = re.match(r"fp32|32-true", precision) is not None and re.search(r"bf16|fp16|mixed", precision) is None
    mixed = not pure and not plain
    targets = targets_of(method, facts)
    rank = method.get("r") or 0
    stored = FP32 if plain or (mixed and full and not deepspeed) else BF16
    at_once = re.search(r"in.backward|in.bwd", optimizer) is not None  # no more than one layer's gradients are there
    paged = "paged" in optimizer  # state in managed memory, which is not PyTorch's allocator's
    offload = (case["offload"] or "").lower()
    data_parallel = case["gpus"] // (case["tp"] * case["pp"])
    per_node = case["gpus"] // case["nodes"]
    return Workload(
        engine=engine,
        zero_stage=stage,
        world_size=case["gpus"],
        processes_per_node=per_node,
        shards=per_node if re.search(r"hsdp|hybrid", case["engine"].lower()) else data_parallel,
        tensor_parallel=case["tp"],
        context_parallel=case["cp"],
        rows=case["micro_batch"],
        length=case["seq"],
        accumulation=case["grad_accum"] or 1,
        logit_positions=0 if facts.model_type == "bert" else case["seq"] if case["pp"] > 1 else None,
        # transformers: the output object holds the logits while the loss goes backward.
        logit_bytes=14,
        trained=facts.parameters if full else lora_parameters(facts, rank, targets),
        full=full,
        targets=targets,
        rank=rank,
        frozen_bytes=stored,
        trained_bytes=stored if full or pure or deepspeed else FP32,
        gradient_bytes=0 if at_once else BF16 if pure or (deepspeed and mixed) else FP32,
        master_bytes=(BF16 if pure else FP32) if deepspeed else 0,
        moment_bytes=BF16 if pure else FP32,
        optimizer="sgd" if paged else optimizer_of(optimizer),
        compute_bytes=FP32 if plain else BF16,
        autocast=mixed and engine in ("single", "ddp"),
        adapter_bytes=FP32 if "adapter fp32" in precision else BF16,
        quantized=quantized,
        attention="eager" if "eager" in case["attention"] else "flash" if "flash" in case["attention"] else "sdpa",
        # A mask for padding takes transformers off the kernels that know grouped heads.
        repeated_heads=case["packed"] is False,
        checkpointing=(case["activation_checkpointing"] or "none").split(" ")[0],
        compiled=bool(case["compiled"]),
        bucket_views=False,  # PyTorch's default
        offload_weights="param" in offload,
        offload_optimizer=bool(offload),
    )


def engine_of(said: str) -> tuple[str, int | None]:
    """`fsdp1`, `fsdp2+tp`, `deepspeed zero3`, ... as an engine and a ZeRO stage."""
    said = said.lower()
    stage = re.search(r"zero[- ]?(\d)", said)
    if "deepspeed" in said:
        return "deepspeed", int(stage[1]) if stage else 3
    if "fsdp" in said or "hsdp" in said:
        return "fsdp", None
    return ("ddp" if "ddp" in said else "single"), None


def optimizer_of(said: str) -> str:
    if "8bit" in said or "8-bit" in said:
        return "adam8bit"
    return "adafactor" if "adafactor" in said else "sgd" if "sgd" in said else "adamw"


def targets_of(method: dict[str, Any], facts: ModelFacts) -> tuple[str, ...]:
    names = tuple(linear.name for linear in facts.linears)
    targets = method.get("targets")
    if targets == "all-linear":
        return names
    if "lora" in method["type"] and not targets:
        targets = ("q_proj", "v_proj")  # peft's for a Llama
    words = {"query": "q_proj", "q": "q_proj", "k": "k_proj", "key": "k_proj", "v": "v_proj", "value": "v_proj"}
    words |= {"proj": "o_proj", "projection": "o_proj"}
    found = {words.get(target, target) for target in targets or ()}
    if "mlp" in found:
        found |= {"gate_proj", "up_proj", "down_proj", "fc1", "fc2"}
    return tuple(name for name in names if name in found)


# What frameworks do --------------------------------------------------------------------------------------------------


def torchtitan(case: Case, facts: ModelFacts, work: Workload) -> tuple[ModelFacts, Workload]:
    """train.py frees the logits before it goes backward. From 2025 on the loss is compiled (components/loss.py): then
    bf16 logits and their bf16 gradient are all there is; and embeddings and head are sharded apart (parallelize.py)."""
    later = "202412" not in case["source"] and "pull/165" not in case["source"]
    logit_bytes = 4 if later and work.compiled else 12
    return facts, replace(work, logit_bytes=logit_bytes, split_root=later, foreach="fused" not in case["optimizer"])


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
    untied = facts.vocab * facts.hidden if model["tied"] else 0
    facts = replace(
        facts,
        model_type="gpt_neox" if not facts.gated else facts.model_type,
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
        accumulation=work.accumulation if case["grad_accum"] else 2,
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
    """modules/loss: cross entropy by chunks in fp32: bf16 logits and their gradient, fp32 log-probabilities."""
    return facts, replace(work, logit_bytes=8)


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


def gpu_of(said: str) -> Gpu | None:
    """The row of the planner's table for a case's words, or None."""
    words = said.lower().replace(" ", "-")
    names = {"h100-96gb": "h100-96gb", "h100": "h100-80gb", "a100": "a100-80gb", "v100": "v100-16gb"}
    return GPUS.get(words.replace("gb-class", "gb")) or GPUS.get(names.get(words, ""))


def capacity(said: str) -> float | None:
    """GiB that a process can use; None where the case does not say which GPU."""
    gpu = gpu_of(said)
    stated = re.match(r"(\d+)GB class", said)
    return gpu.memory / GIB if gpu else float(stated[1]) * 1e9 / GIB if stated else None


if __name__ == "__main__":
    raise SystemExit(main())
