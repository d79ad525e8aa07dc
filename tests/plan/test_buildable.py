"""What dsft says of a config.json against what transformers does with it: every rule, every family."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dsft.errors import DsftError
from dsft.plan.buildable import ACTIVATIONS, ROPE_FIELDS, causal_model_types
from dsft.plan.facts import read_facts
from dsft.plan.families import FAMILIES

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GLU9 = {"hidden_act": "glu9", "hidden_activation": "glu9", "activation_function": "glu9"}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHANGES = {
    "nothing": {},
    "three-heads": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "three-heads-by-width": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None},
    "three-key-value-heads": {"num_key_value_heads": 3},
    "odd-heads": {"head_dim": 7},
    "odd-heads-by-width": {"head_dim": None, "hidden_size": 36},
    "activation": GLU9,
    "rope-unknown": {"rope_scaling": {"rope_type": "bogus", "factor": 2.0}},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope-dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "rope-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "rope-llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
    "rope-incomplete": {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    "experts": {"num_experts_per_tok": 9},
    "padding": {"pad_token_id": 64},
    "padding-last": {"pad_token_id": 63},
    "layer-types": {"layer_types": ["full_attention"]},
}


def config_of(family: str, changes: dict) -> dict:
    said = {name: value for name, value in (SIZES | changes).items() if value is not None}
    names = {ours: theirs for theirs, ours in FAMILIES[family].aliases.items()} if family == "gpt2" else {}
    return {"model_type": family} | {names.get(name, name): value for name, value in said.items()}


def computes(config: dict) -> bool:
    """Whether transformers builds the model and a step with it goes through."""
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        tokens = torch.arange(3, 13).unsqueeze(0)
        model(input_ids=tokens, labels=tokens).loss.backward()
    except Exception:  # noqa: BLE001  of many kinds, KeyError and AssertionError among them
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_cannot_build_is_refused(tmp_path, family):
    refused, broken = set(), set()
    for name, changes in CHANGES.items():
        config = config_of(family, changes)
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            read_facts(str(tmp_path))
        except DsftError as error:
            assert {problem.kind for problem in error.problems} == {"model-config"}
            refused.add(name)
        if not computes(config):
            broken.add(name)
    # The part of each head that Phi rotates is not looked at, nor a rope for GPT-2, which has none.
    unseen = {"odd-heads"} if family == "phi" else {"rope-incomplete", "rope-yarn"} if family == "gpt2" else set()
    assert refused == broken - unseen


def test_the_lists_are_those_of_transformers():
    assert set(ACT2CLS) == ACTIVATIONS
    assert {"default", *ROPE_INIT_FUNCTIONS} == set(ROPE_FIELDS)
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == causal_model_types() >= set(FAMILIES)


REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 3}, "does not say a model_type"),
        ({"model_type": 3}, "does not say a model_type"),
        ({"model_type": "mamba9"}, '"mamba9"'),
        ({"model_type": "t5"}, '"t5"'),
        ({"model_type": "mamba9"} | REMOTE, '"trust_remote_code": true'),
        ({"model_type": "bart", "is_encoder_decoder": True}, "encoder with a decoder"),
        (config_of("llama", {}) | {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    ],
)
def test_models_that_do_not_predict_the_next_token(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DsftError) as error:
        read_facts(str(tmp_path))
    (problem,) = error.value.problems
    assert problem.kind == "model-config" and words in problem.message + problem.help and problem.help


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba9"} | REMOTE,
        {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
        {"model_type": "reformer", "architectures": ["ReformerModelWithLMHead"]},
        config_of("llama", {}) | {"architectures": ["LlamaModel"]},
        config_of("llama", {}) | {"architectures": ["LlamaForSequenceClassification", "LlamaForCausalLM"]},
    ],
)
def test_models_that_do(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_facts(str(tmp_path), trusted=True)


def test_every_contradiction_is_told_at_once(tmp_path):
    config = config_of("llama", GLU9 | {"num_attention_heads": 3, "pad_token_id": 99})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DsftError) as error:
        read_facts(str(tmp_path))
    assert len(error.value.problems) == 4


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", {"rms_norm_eps": "1e-6"}),
        ("llama", {"rms_norm_eps": -1}),
        ("qwen3", {"rms_norm_eps": None}),
        ("llama", {"attention_dropout": 2.0}),
        ("llama", {"attention_dropout": "0"}),
        ("gpt2", {"attn_pdrop": 2.0}),
        ("gpt2", {"resid_pdrop": "x"}),
        ("phi", {"layer_norm_eps": "x"}),
        ("llama", {"hidden_act": ["silu"]}),
        ("llama", {"return_dict": False}),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind(tmp_path, family, said):
    config = config_of(family, said | {name: None for name in said}) | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DsftError) as caught:
        read_facts(str(tmp_path))
    assert all(
        problem.kind == "model-config" and next(iter(said)) in problem.message for problem in caught.value.problems
    )
    assert not computes(config)
