"""LoRA's parameters and target names: by hand, and as peft counts them."""

from __future__ import annotations

import json
import math

import pytest

from dsft.plan.facts import read_facts
from dsft.plan.lora import lora_parameters, missing_partners, target_names, unknown_targets

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip
MIXTURE = {**SMALL, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]}
CONFIGS = {
    "llama": SMALL,
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32, "eos_token_id": 1},
    "gpt_neox": SMALL,
    "phi": SMALL,
    "phi3": SMALL,
    "gemma2": SMALL | {"head_dim": 8},
    "qwen3": SMALL,
    "mixtral": SMALL | {"num_local_experts": 3},
    "qwen2_moe": MIXTURE | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": MIXTURE | {"head_dim": 8},
}


@pytest.fixture
def facts_of(tmp_path):
    """A function from a model_type to the facts of a small model of it."""

    def facts_of(model_type: str):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model_type] | {"model_type": model_type}))
        return read_facts(str(tmp_path))

    return facts_of


def test_all_linear_leaves_the_head_and_the_embeddings_out(facts_of):
    # Two layers: q and o 16 -> 16, k and v 16 -> 8, gate and up 16 -> 24, down 24 -> 16.
    assert lora_parameters(facts_of("llama"), 4, "all-linear") == 2 * 4 * (2 * 32 + 2 * 24 + 3 * 40)
    assert lora_parameters(facts_of("llama"), 4, ["q_proj"]) == 2 * 4 * 32
    assert lora_parameters(facts_of("llama"), 4, ["embed_tokens", "lm_head"]) == 2 * 4 * (64 + 16)


def test_expert_layers_are_adapted_under_their_first_names(facts_of):
    # Three experts of 16 -> 24 (twice) and 24 -> 16, gate and up fused into one adapter of twice the rank.
    assert lora_parameters(facts_of("mixtral"), 4, ["w1", "w2", "w3"]) == 2 * 3 * (8 * (16 + 48) + 4 * (24 + 16))
    assert lora_parameters(facts_of("mixtral"), 4, ["gate"]) == 2 * 4 * (16 + 3)


TARGETS = [
    ("llama", ["q_proj", "layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj"]),
    ("llama", ["embed_tokens", "lm_head"]),
    ("gpt2", ["c_proj"]),
    ("gpt2", ["attn.c_proj", "wte", "wpe"]),
    ("mixtral", ["w1", "w3", "q_proj"]),
    ("mixtral", ["w2"]),
    ("mixtral", ["mlp.gate"]),
    ("qwen2_moe", ["gate_proj", "mlp.down_proj", "shared_expert_gate"]),
    ("qwen3_moe", ["experts.gate_proj", "up_proj", "q_proj"]),
    ("qwen3_moe", ["down_proj"]),
    *((model_type, "all-linear") for model_type in CONFIGS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "targets"), TARGETS, ids=lambda value: "+".join([value] if isinstance(value, str) else value)
)
def test_as_peft_counts(facts_of, model_type, targets):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = facts_of(model_type)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **CONFIGS[model_type]))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert lora_parameters(facts, 4, targets) == trained > 0
    assert unknown_targets(facts, targets) == missing_partners(facts, targets) == ()


UNKNOWN = [
    ("llama", ["q_proj", "nope", "proj", "q_proj.weight", "layers.2.mlp.up_proj"], ("nope", "proj", "q_proj.weight", "layers.2.mlp.up_proj")),
    ("llama", ["mlp", "input_layernorm", "self_attn", "layers"], ("mlp", "input_layernorm", "self_attn", "layers")),
    ("gpt2", ["c_attn", "q_proj"], ("q_proj",)),
    ("gpt_neox", ["query_key_value", "embed_out"], ("embed_out",)),
    ("mixtral", ["q_proj", "gate_up_proj", "experts", "gate_proj"], ("gate_up_proj", "experts", "gate_proj")),
    ("qwen2_moe", ["gate", "experts.gate_proj"], ("gate", "experts.gate_proj")),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "targets", "unknown"), UNKNOWN)
def test_unknown_targets(facts_of, model_type, targets, unknown):
    assert unknown_targets(facts_of(model_type), targets) == unknown


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "targets", "unknown"), UNKNOWN)
def test_peft_refuses_unknown_targets_alone(model_type, targets, unknown):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    for target in unknown:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **CONFIGS[model_type]))
        with pytest.raises(ValueError, match="not found|not supported"):
            get_peft_model(model, LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM"))


def test_gate_and_up_projection_of_experts_go_together(facts_of):
    assert missing_partners(facts_of("mixtral"), ["w1", "q_proj"]) == ("w3",)
    assert missing_partners(facts_of("mixtral"), ["w2", "q_proj"]) == ()
    assert missing_partners(facts_of("qwen3_moe"), ["mlp.experts.up_proj"]) == ("gate_proj",)
    assert missing_partners(facts_of("qwen2_moe"), ["up_proj"]) == ()
    assert missing_partners(facts_of("llama"), ["up_proj"]) == ()


@pytest.mark.slow
def test_peft_refuses_a_projection_without_its_partner():
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **CONFIGS["mixtral"]))
    with pytest.raises(ValueError, match="w1.*without also targeting w3"):
        get_peft_model(model, LoraConfig(r=4, target_modules=["w1", "q_proj"], task_type="CAUSAL_LM"))


def test_names_to_suggest(facts_of):
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert target_names(facts_of("llama")) == (*attention, "gate_proj", "up_proj", "down_proj")
    assert target_names(facts_of("gpt2")) == ("c_attn", "c_proj", "c_fc")
    assert target_names(facts_of("mixtral")) == (*attention, "gate", "w1", "w3", "w2")


def test_unknown_family_goes_by_the_layers_it_stores(tmp_path):
    shapes = {"net.0.in_proj.weight": (32, 16), "net.1.in_proj.weight": (32, 16), "net.1.out.weight": (16, 32)}
    entries, position = {}, 0
    for name, shape in shapes.items():
        end = position + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(position))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    facts = read_facts(str(tmp_path))
    assert lora_parameters(facts, 4, "all-linear") == 3 * 4 * 48
    assert lora_parameters(facts, 4, ["net.in_proj"]) == 2 * 4 * 48
    assert unknown_targets(facts, ["nope"]) == ()
