"""The parts of the memory estimate: against papers, against PyTorch itself, and against each other."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.plan import memory
from dsft.plan.describe import MOMENTS
from dsft.plan.facts import read_facts
from dsft.plan.lora import adapted_names, lora_parameters
from dsft.plan.memory import estimate
from dsft.plan.units import BF16, FP32, GIB
from dsft.plan.workload import Workload

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4,
    "n_positions": 256, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
}  # fmt: skip
# Three layers of each family that is built its own way.
_OF_LLAMA = LLAMA | {"head_dim": 16, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DECODERS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": _OF_LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": _OF_LLAMA | _EXPERTS | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    "gemma": _OF_LLAMA | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
    "gemma2": _OF_LLAMA | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
    "gemma3_text": _OF_LLAMA | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
    "phi": _OF_LLAMA | {"model_type": "phi", "architectures": ["PhiForCausalLM"]},
    "phi3": _OF_LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
    "gpt_neox": _OF_LLAMA | {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
}
STAGES = [("deepspeed", stage) for stage in (1, 2, 3)]
ENGINES = [("single", None), ("ddp", None), ("fsdp", None), *STAGES]


@pytest.fixture(scope="module")
def facts_of(tmp_path_factory):
    def read(config: dict):
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        return read_facts(str(folder))

    return read


@pytest.fixture(scope="module")
def facts(facts_of):
    return facts_of(LLAMA)


def full(facts, engine: str = "single", stage: int | None = None, **changes) -> Workload:
    world = changes.pop("world_size", 1 if engine == "single" else 8)
    deepspeed = engine == "deepspeed"
    values = {
        "engine": engine, "zero_stage": stage, "world_size": world, "processes_per_node": world, "shards": world,
        "trained": facts.parameters, "trained_bytes": BF16 if deepspeed else FP32, "master_bytes": FP32 if deepspeed else 0,
        "rows": 2, "length": 64,
    }  # fmt: skip
    return Workload(**values | changes)


def lora(
    facts, engine: str = "single", stage: int | None = None, r: int = 4, targets="all-linear", **changes
) -> Workload:
    adapted = {"trained": lora_parameters(facts, r, targets), "targets": adapted_names(facts, targets), "rank": r}
    return full(facts, engine, stage, **{"full": False, **adapted} | changes)


# Against papers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_as_its_paper_has_it(facts, stage, gigabytes):
    """Rajbhandari et al. 2019, figure 1: 7.5 billion parameters on 64 ranks; 16 bytes each, gradients of 2 among them."""
    large = dataclasses.replace(facts, parameters=7_500_000_000)
    work = full(large, "deepspeed", stage, world_size=64, gradient_bytes=BF16)
    states = memory.weights(large, work) + memory.gradients(work) + memory.optimizer_state(work) + memory.masters(work)
    assert states / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_four_bit_weights_as_qlora_has_them():
    """Dettmers et al. 2023, section 3: the scales take 0.5 bits a weight, quantized themselves 0.127."""
    for kind, bits in (("nf4", 4.5), ("nf4-double", 4.127)):
        assert 8 * memory.quantized_bytes(Workload("single", quantized=kind)) == pytest.approx(bits, abs=5e-4)


def test_eager_attention_as_its_paper_has_it(facts):
    """Korthikanti et al. 2022, section 4.1: 5as/h bytes a value of scores, softmax and dropout in 16 bits; here the softmax
    is fp32 and nothing is dropped: 4 and a copy of 2 a score."""
    flash, eager = (full(facts, attention=kind) for kind in ("sdpa", "eager"))
    repeated = BF16 * 2 * (facts.heads - facts.kv_heads) * facts.head_dim
    scores = memory.attention_saved(facts, eager) - memory.attention_saved(facts, flash) - repeated + FP32 * facts.heads
    assert scores == facts.heads * eager.length * (4 + 2)


# Against PyTorch -----------------------------------------------------------------------------------------------------


def on_cpu(facts, method: str, number: int = FP32, **changes) -> Workload:
    """As a model works all of whose weights are of `number` bytes."""
    made = {"full": full, "lora": lora}[method]
    values = {"frozen_bytes": number, "trained_bytes": number, "adapter_bytes": number, "compute_bytes": number}
    return made(facts, rows=2, length=96, device="cpu", **values | changes)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_checkpointed_activations_are_what_autograd_saves(facts_of, config, method):
    facts = facts_of(config)
    work = on_cpu(facts, method, checkpointing="full")
    assert saved_bytes(config, work) == pytest.approx(memory.activations(facts, work), rel=0.04)


@pytest.mark.parametrize("number", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", DECODERS)
def test_activations_are_what_autograd_saves(facts_of, family, method, number):
    facts = facts_of(DECODERS[family])
    work = on_cpu(facts, method, number, attention="eager" if family == "gemma2" else "sdpa")
    work = dataclasses.replace(work, expert_adapters=bool(facts.experts and method == "lora"))
    assert saved_bytes(DECODERS[family], work) == pytest.approx(memory.activations(facts, work), rel=0.06)


@pytest.mark.parametrize("window", [16, 96])
def test_rows_longer_than_a_window_have_a_mask_in_each_layer(facts_of, window):
    """Heads and widths small, so that the mask weighs: 96 values a token, of three layers each."""
    config = DECODERS["llama"] | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config |= {"sliding_window": window}
    facts = facts_of(config)
    work = on_cpu(facts, "lora", FP32)
    assert facts.windowed_layers == facts.layers
    assert saved_bytes(config, work) == pytest.approx(memory.activations(facts, work), rel=0.04)


def test_dropout_on_adapters_saves_a_mask(facts_of):
    """And its own values. The first layer, whose input has no gradient, needs no mask: the 4 % too much of three layers."""
    facts = facts_of(LLAMA)
    work = on_cpu(facts, "lora", dropout=True)
    assert saved_bytes(LLAMA, work) == pytest.approx(memory.activations(facts, work), rel=0.05)
    masks = memory.activations(facts, work) - memory.activations(facts, dataclasses.replace(work, device="cuda"))
    assert masks == 192 * 3 * 3 * (5 * 64 + 176 + 64)  # tokens, layers, 4 bytes less 1, inputs of seven matrices


def saved_bytes(config: dict, work: Workload) -> int:
    """Bytes of all tensors that a forward pass up to the last norm keeps for its backward pass, each storage once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation=work.attention)
    model.to(torch.float32 if work.compute_bytes == FP32 else torch.bfloat16)
    if not work.full:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=work.rank,
            target_modules="all-linear",
            lora_dropout=0.1 if work.dropout else 0.0,
            fan_in_fan_out=config["model_type"] == "gpt2",
        )
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False).base_model.model
    if work.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, config["vocab_size"], (work.rows, work.length))
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers(), ids]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.train().base_model(input_ids=ids, use_cache=False).last_hidden_state
        (hidden * hidden if work.full else hidden).sum()  # a head that is trained keeps its input, as the product does
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_weights_gradients_and_moments_are_what_torch_allocates(facts_of, method):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = facts_of(LLAMA)
    work = {"full": full, "lora": lora}[method](facts, frozen_bytes=FP32)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.ones(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]

    def total(tensors) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    assert memory.weights(facts, work) + memory.adapters(work) == total(model.parameters())
    assert memory.gradients(work) == total(parameter.grad for parameter in trained)
    assert memory.optimizer_state(work) == total(moments)


# Strategies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "stage", "weights", "gradients", "optimizer"),
    [
        ("single", None, 1, 1, 1), ("ddp", None, 1, 1, 1), ("fsdp", None, 8, 8, 8),
        ("deepspeed", 1, 1, 1, 8), ("deepspeed", 2, 1, 8, 8), ("deepspeed", 3, 8, 8, 8),
    ],
)  # fmt: skip
def test_what_each_strategy_splits(facts, engine, stage, weights, gradients, optimizer):
    work = full(facts, engine, stage)
    assert memory.weights(facts, work) == facts.parameters * work.trained_bytes / weights
    beside = BF16 * facts.parameters if stage == 1 else 0  # what ZeRO-1 computed, beside the sum
    assert memory.gradients(work) == facts.parameters * FP32 / gradients + beside
    assert memory.optimizer_state(work) == facts.parameters * 2 * FP32 / optimizer
    assert memory.masters(work) == facts.parameters * work.master_bytes / optimizer


def test_a_hybrid_splits_inside_a_machine(facts):
    work = full(facts, "fsdp", world_size=16, processes_per_node=4, shards=4)
    assert memory.weights(facts, work) == facts.parameters * FP32 / 4
    assert memory.optimizer_state(work) == facts.parameters * 2 * FP32 / 4


def test_of_an_adapter_only_the_adapter_is_trained(facts):
    work = lora(facts, targets=("q_proj", "v_proj"))
    assert work.trained == 3 * 4 * ((64 + 64) + (64 + 32))  # layers x rank x (inputs + outputs)
    assert memory.adapters(work) == work.trained * FP32
    assert memory.gradients(work) == work.trained * FP32
    assert memory.weights(facts, work) == facts.parameters * BF16


def test_recomputed_layers_keep_their_input_alone(facts):
    kept, recomputed = (full(facts, checkpointing=kind) for kind in ("none", "full"))
    layers = memory.activations(facts, recomputed) - 2 * 64 * facts.hidden * (FP32 + 2 * BF16)
    assert layers == facts.layers * 2 * 64 * facts.hidden * BF16
    assert memory.activations(facts, recomputed) < memory.activations(facts, kept)
    assert memory.layer_backward(facts, recomputed) > memory.layer_backward(facts, kept)


def test_what_is_offloaded_is_on_the_host(facts):
    plain = full(facts, "deepspeed", 2)
    away = dataclasses.replace(plain, offload_optimizer=True)
    assert (memory.optimizer_state(away), memory.masters(away)) == (0, 0)
    assert memory.gradients(away) == memory.gradients(plain)  # the fp32 sum stays; of stage 3 it goes too
    third = full(facts, "deepspeed", 3, offload_optimizer=True)
    assert memory.gradients(third) == 0
    assert memory.offloaded(facts, third) == facts.parameters * (2 * FP32 + FP32 + 2 * FP32) / 8  # and their sum
    moved = facts.parameters * (2 * FP32 + FP32 + FP32) / 8  # moments, masters, and the gradients that they take
    assert memory.offloaded(facts, away) - memory.offloaded(facts, plain) == moved
    assert estimate(facts, away).device < estimate(facts, plain).device
    assert estimate(facts, away).host - estimate(facts, plain).host == pytest.approx(8 * moved, abs=1)


def test_every_process_of_a_machine_loads_the_whole_model(facts):
    one, eight = (estimate(facts, full(facts, "fsdp", processes_per_node=each)).host for each in (1, 8))
    assert eight > one + 6 * memory.process.LIBRARIES
    large = dataclasses.replace(facts, parameters=10**9)
    work = full(large, "fsdp", processes_per_node=8)
    assert estimate(large, work).host >= 8 * 4 * 10**9


def test_the_disk_holds_checkpoints_and_a_result(facts):
    work = full(facts, checkpoints=3)
    assert estimate(facts, work).disk == facts.parameters * (3 * 12 + 4)
    assert estimate(facts, dataclasses.replace(work, optimizer="sgd")).disk == facts.parameters * (3 * 4 + 4)


# Alone ---------------------------------------------------------------------------------------------------------------

workloads = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(ENGINES),
        "method": st.sampled_from([full, lora]),
        "changes": st.fixed_dictionaries(
            {
                "rows": st.integers(1, 8),
                "length": st.integers(1, 4096),
                "accumulation": st.integers(1, 4),
                "checkpointing": st.sampled_from(["none", "selective", "full"]),
                "attention": st.sampled_from(["eager", "sdpa", "flash"]),
                "device": st.sampled_from(["cuda", "cpu"]),
                "optimizer": st.sampled_from(["adamw", "sgd"]),
            }
        ),
    }
)


def drawn(facts, draw) -> Workload:
    return draw["method"](facts, *draw["engine"], **draw["changes"])


@settings(deadline=None, max_examples=60)
@given(workloads)
def test_the_parts_are_all_there_is(facts, draw):
    found = estimate(facts, drawn(facts, draw))
    of_tensors = {name: size for name, size in found.parts.items() if name not in ("allocator", "context", "process")}
    assert found.allocated == sum(of_tensors.values()) and min(found.parts.values()) >= 0
    assert found.reserved == found.allocated + found.parts.get("allocator", 0)
    assert found.device == found.reserved + found.parts.get("context", 0) + found.parts.get("process", 0)


@settings(deadline=None, max_examples=60)
@given(workloads, st.sampled_from(["rows", "length"]))
def test_more_work_never_takes_less(facts, draw, what):
    work = drawn(facts, draw)
    more = dataclasses.replace(work, **{what: getattr(work, what) + 1})
    assert estimate(facts, more).device >= estimate(facts, work).device


@settings(deadline=None, max_examples=60)
@given(workloads)
def test_more_ranks_never_take_more(facts, draw):
    work = drawn(facts, draw)
    if work.engine != "single":
        more = dataclasses.replace(work, world_size=16, shards=16)
        assert estimate(facts, more).device <= estimate(facts, work).device


def test_a_cpu_has_libraries_and_no_context(facts):
    found = estimate(facts, full(facts, device="cpu"))
    assert "context" not in found.parts
    assert found.parts["process"] == memory.process.LIBRARIES
    assert found.host == found.device
    assert estimate(facts, full(facts, "ddp")).parts["context"] == GIB  # CUDA and NCCL


@pytest.mark.parametrize(("optimizer", "decay", "tensors"), [("adamw", False, 1), ("sgd", True, 1), ("sgd", False, 0)])
def test_what_an_update_makes_besides(facts, optimizer, decay, tensors):
    """torch/optim/adamw.py: the denominator; sgd.py: the gradients with the decay, where there is one."""
    work = full(facts, optimizer=optimizer, weight_decay=decay)
    assert memory.update_temporaries(facts, work) == tensors * FP32 * facts.parameters
    largest = facts.embedding_parameters
    assert memory.update_temporaries(facts, dataclasses.replace(work, foreach=False)) == tensors * FP32 * largest


def test_on_a_cpu_a_sharded_checkpoint_can_be_the_worst_moment(facts):
    """The main rank collects weights and both moments, whole; without sharding they are written from where they are."""
    short = {"device": "cpu", "compute_bytes": FP32, "length": 8, "rows": 1, "checkpoints": 2}
    found = estimate(facts, full(facts, "fsdp", **short))
    assert found.moment == "checkpoint"
    assert found.parts["collected"] == 12 * facts.parameters
    assert estimate(facts, full(facts, "single", **short)).parts.get("collected", 0) == 0
    # Where none is written, the result is the worst: collected, and read back.
    without = estimate(facts, full(facts, "fsdp", **short | {"checkpoints": 0}))
    assert without.moment == "result" and without.parts["read back"] == 4 * facts.parameters


def test_every_moment_has_a_name_for_people(facts):
    """`dsft plan` and `dsft diff` show it."""
    work = full(facts, "deepspeed", 3, device="cpu")
    assert {*memory._moments(facts, work), *memory.process.cpu_moments(facts, work, {})} == set(MOMENTS)


def test_what_gradients_pass_through(facts):
    """Bytes worked out by hand: buckets of 500 million elements, and more than that is trained."""
    bucket, trained = 500_000_000, 8 * 10**9
    work = {"trained": trained, "world_size": 8, "shards": 8, "trained_bytes": BF16, "master_bytes": FP32}
    work["communication_bytes"] = FP32

    def zero(stage, **said):
        return Workload("deepspeed", stage, **work | said)

    assert memory.layer_buffers(facts, zero(2, overlap_comm=False)) == bucket * BF16
    assert memory.layer_buffers(facts, zero(2, overlap_comm=True)) == 2 * bucket * BF16
    assert memory.layer_buffers(facts, zero(1, overlap_comm=False)) == 0  # under bf16
    assert memory.layer_buffers(facts, zero(1, compute_bytes=FP32, overlap_comm=False)) == bucket * FP32
    assert memory.reduction_buffers(facts, zero(2, overlap_comm=False)) == bucket * (BF16 + BF16 + FP32)
    assert memory.reduction_buffers(facts, zero(3)) == bucket * FP32
    assert memory.reduction_buffers(facts, zero(1, zero_bucket=1)) == bucket * FP32, "BF16_Optimizer's own"
    assert memory.lasting_bucket(facts, zero(3)) == bucket * FP32 and memory.lasting_bucket(facts, zero(2)) == 0
    away = {"offload_optimizer": True, "overlap_comm": False}
    assert memory.layer_buffers(facts, zero(1, **away)) == bucket * FP32, "ZeRO-1 again"
    assert memory.lasting_bucket(facts, zero(2, **away)) == facts.embedding_parameters * BF16
    layer = Workload("fsdp", trained=facts.parameters, world_size=8, shards=8)
    assert memory.layer_buffers(facts, layer) == facts.layer_parameters * (BF16 + FP32)


def test_hpz_keeps_a_second_copy(facts):
    def weights(**said):
        zero = Workload("deepspeed", 3, trained=facts.parameters, world_size=16, shards=16, trained_bytes=BF16, **said)
        return memory.weights(facts, zero)

    assert weights(zero_hpz=8) - weights() == facts.parameters * BF16 / 8
    assert weights(zero_hpz=8, offload_weights=True) == facts.parameters * BF16 / 8


def test_a_machine_loads_casts_and_reads_back(facts):
    """Eight processes load fp32 weights, which DeepSpeed casts beside them; the main one has the result twice."""
    machine = {"trained": facts.parameters, "world_size": 8, "shards": 8, "processes_per_node": 8}
    libraries = 8 * memory.process.LIBRARIES
    assert memory.host(facts, Workload("fsdp", **machine)) == libraries + 8 * 4 * facts.parameters
    cast = Workload("deepspeed", 2, **machine, trained_bytes=BF16, master_bytes=FP32)
    assert memory.host(facts, cast) == libraries + 8 * memory.process.DEEPSPEED + 8 * (4 + 2) * facts.parameters
    alone = Workload("single", trained=facts.parameters, processes_per_node=1, optimizer="sgd")
    assert memory.host(facts, alone) == memory.process.LIBRARIES + 8 * facts.parameters


def test_fsdp_in_one_process_computes_on_a_copy(facts):
    alone = {"world_size": 1, "shards": 1, "checkpointing": "full"}
    assert memory.gathered(facts, full(facts, "fsdp", compute_bytes=BF16, **alone)) > 0
    assert memory.gathered(facts, full(facts, "fsdp", compute_bytes=FP32, **alone)) == 0
    assert memory.gathered(facts, full(facts, "ddp", compute_bytes=BF16, **alone)) == 0
