"""Formulas against published counts, and against the models that transformers builds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from workshop import parameter_shapes

from dsft.errors import DsftError, Where
from dsft.plan.families import FAMILIES, complete, layout

# Real published models: the fields of their config.json that shapes follow from, and their parameter count.
PUBLISHED = json.loads((Path(__file__).parent / "configs" / "published.json").read_text())
NAMES = [model["name"] for model in PUBLISHED]


@pytest.mark.parametrize("model", PUBLISHED, ids=NAMES)
def test_published_count(model):
    shapes = parameter_shapes(model["config"])
    assert sum(map(math.prod, shapes.values())) == model["parameters"]


def test_every_family_has_a_published_model():
    assert {model["config"]["model_type"] for model in PUBLISHED} == set(FAMILIES)


def test_layers_with_a_mixture():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sparse = [
        number for number in range(6) if f"model.layers.{number}.mlp.experts.down_proj" in parameter_shapes(config)
    ]
    assert sparse == [1, 5]  # every second layer, but not the one that is named


def build(config: dict):
    """The model that transformers makes of `config`, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def assert_same(config: dict) -> None:
    """Names, shapes, classes and linear layers of the formulas are those of transformers' model."""
    model, found = build(config), layout(config)
    assert found.shapes() == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert type(model).__name__ == found.model_class
    assert type(model.get_submodule(found.layers_path)[0]).__name__ == found.layer_class
    linear = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    assert {path for path, module in found.modules() if module.kind in ("linear", "conv1d")} == linear
    fields = complete(config)
    assert fields.max_position_embeddings == model.config.max_position_embeddings
    assert fields.tie_word_embeddings == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLISHED, ids=NAMES)
def test_names_and_shapes_of_transformers(model):
    assert_same(model["config"])


SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "pad_token_id": None,
}  # fmt: skip
MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
VARIANTS = {
    "llama-biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", **SMALL, "head_dim": 8, "num_key_value_heads": 2},
    "mixtral-head-dim": {"model_type": "mixtral", **SMALL, "num_local_experts": 3, "head_dim": 8},
    "qwen2-tied": {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2-moe-partial": {
        "model_type": "qwen2_moe", **SMALL, **MIXTURE, "num_key_value_heads": 4, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 20, "mlp_only_layers": [3], "qkv_bias": False,
    },
    "qwen3-moe-partial": {
        "model_type": "qwen3_moe", **SMALL, **MIXTURE, "mlp_only_layers": [0, 2], "attention_bias": True,
        "head_dim": 8,
    },
    "qwen3-biases": {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "attention_bias": True},
    "gemma-biases": {"model_type": "gemma", **SMALL, "num_key_value_heads": 1, "attention_bias": True},
    "gemma2-untied": {"model_type": "gemma2", **SMALL, "tie_word_embeddings": False},
    "gemma3-biases": {"model_type": "gemma3_text", **SMALL, "attention_bias": True},
    "olmo2-grouped": {"model_type": "olmo2", **SMALL, "num_key_value_heads": 2, "attention_bias": True},
    "phi-norms": {"model_type": "phi", **SMALL, "qk_layernorm": True, "num_key_value_heads": 2},
    "phi-tied": {"model_type": "phi", **SMALL, "tie_word_embeddings": True},
    "phi3-grouped": {"model_type": "phi3", **SMALL, "num_key_value_heads": 2},
    "gpt2-inner": {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "n_inner": 20, "n_positions": 32},
    "gpt-neox-no-bias": {"model_type": "gpt_neox", **SMALL, "attention_bias": False},
    "gpt-neox-tied": {"model_type": "gpt_neox", **SMALL, "tie_word_embeddings": True},
    "granite-biases": {"model_type": "granite", **SMALL, "attention_bias": True, "mlp_bias": True},
    "smollm3-biases": {"model_type": "smollm3", **SMALL, "attention_bias": True, "mlp_bias": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_variants_as_transformers_builds_them(config):
    assert_same(config)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type):
    assert_same({"model_type": model_type})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_save_pretrained_writes_means_the_same(model_type):
    from transformers import AutoConfig

    written = json.loads(AutoConfig.for_model(model_type).to_json_string())
    assert parameter_shapes(written) == parameter_shapes({"model_type": model_type})


@pytest.mark.parametrize("config", [{}, {"model_type": "mamba"}, {"model_type": ["llama"]}, {"model_type": None}])
def test_unknown_family(config):
    assert parameter_shapes(config) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "4096"),
        ("hidden_size", 0),
        ("hidden_size", -1),
        ("hidden_size", 4096.0),
        ("hidden_size", True),
        ("hidden_size", 10**400),
        ("vocab_size", None),
        ("num_hidden_layers", [32]),
        ("num_hidden_layers", 10**9),
        ("head_dim", "64"),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_impossible_value(field, value):
    with pytest.raises(DsftError) as error:
        parameter_shapes({"model_type": "llama", field: value}, where=Where("recipe.json", 3, 4))
    (problem,) = error.value.problems
    assert problem.kind == "model-config"
    assert field in problem.message or "layers" in problem.message
    assert str(problem.where) == "recipe.json:3:4"
