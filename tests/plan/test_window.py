"""Sliding windows of attention, against transformers' own configurations and models."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from dsft.plan.facts import read_facts
from dsft.plan.families import FAMILIES
from dsft.plan.window import sliding_window

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
}  # fmt: skip
USED = {"use_sliding_window": True}
TYPES = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 5}
CONFIGS = [{"model_type": family} for family in (*FAMILIES, "gpt_oss", "starcoder2")] + [
    {"model_type": "llama", "sliding_window": 7},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "mistral", "sliding_window": 7},
    {"model_type": "mistral", "sliding_window": 7, **TYPES},
    {"model_type": "mixtral", "sliding_window": 7},
    {"model_type": "phi3", "sliding_window": 7},
    {"model_type": "starcoder2", "sliding_window": 7},
    {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2},
    {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2, **USED},
    {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 8, **USED},
    {"model_type": "qwen2", "sliding_window": None, "max_window_layers": 2, **USED},
    {"model_type": "qwen2", **USED},
    {"model_type": "qwen2", **USED, **TYPES},
    {"model_type": "qwen3", "max_window_layers": 2, **USED},
    {"model_type": "qwen2_moe", "max_window_layers": 5, **USED},
    {"model_type": "qwen2_moe", **USED, **TYPES},
    {"model_type": "qwen3_moe", **USED},
    {"model_type": "gemma2", "sliding_window": 7, **TYPES},
    {"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 3},
    {"model_type": "gemma3_text", "sliding_window": 7, **TYPES},
    {"model_type": "gpt_oss", **TYPES},
    {"model_type": "smollm3", "sliding_window": 7, **USED},
    {"model_type": "smollm3", "sliding_window": 7, "no_rope_layers": [1, 1, 0, 0, 0, 1, 1, 1], **USED},
    {"model_type": "smollm3", "sliding_window": 7, "no_rope_layer_interval": 2, **USED},
]  # fmt: skip


def in_transformers(config: dict) -> tuple[int | None, int]:
    """The window of the model's attention layers and how many have it: said in each, or in the configuration for all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    full = AutoConfig.for_model(**{**SIZES, **config})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(full)
    layers = [module for module in model.modules() if hasattr(module, "o_proj") or hasattr(module, "c_attn")]
    code = Path(inspect.getsourcefile(type(model))).read_text()
    everywhere = full.sliding_window if "sliding_window" in code and "layer_types" not in code else None
    looks = [getattr(layer, "sliding_window", everywhere) for layer in layers]
    windows = [window for window in looks if window]
    return (windows[0], len(windows)) if windows else (None, 0)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_as_in_transformers(config):
    found = sliding_window(SIZES | config, SIZES["num_hidden_layers"])
    assert found == in_transformers(config)


def test_some_of_them_have_one():
    found = [sliding_window(SIZES | config, 8) for config in CONFIGS]
    assert found.count((None, 0)) == 21 and (7, 8) in found and (4096, 6) in found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, (None, 0)),
        ({"sliding_window": 9}, (9, 8)),
        ({"sliding_window": 9, "use_sliding_window": False}, (None, 0)),
        ({"sliding_window": 9, **TYPES}, (9, 3)),
        ({"sliding_window": 9, "sliding_window_pattern": 4}, (9, 6)),
        ({"sliding_window": "9", "layer_types": 3}, (None, 0)),
        ({"sliding_window": 9, "layer_types": [3]}, (None, 0)),
    ],
)
def test_an_unknown_family(said, found):
    assert sliding_window({"model_type": "of-another"} | said, 8) == found


def test_facts_say_it(workshop):
    facts = read_facts(str(workshop.model(model_type="mistral", sliding_window=64)))
    assert (facts.window, facts.windowed_layers) == (64, 2)
    facts = read_facts(str(workshop.model()))
    assert (facts.window, facts.windowed_layers) == (None, 0)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_models_that_do_not_look_at_the_switch(family):
    said = {"model_type": family, "sliding_window": 64}
    assert sliding_window(said | {"use_sliding_window": False}, 6) == sliding_window(said, 6) != (None, 0)
