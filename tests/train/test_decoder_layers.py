"""FSDP shards by the model's own decoder layers: there is no class to name, so none that could be misspelt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsft.train.model import decoder_layers

PUBLISHED = json.loads((Path(__file__).parents[1] / "plan" / "configs" / "published.json").read_text())
FAMILIES = {each["config"]["model_type"]: each["config"] for each in PUBLISHED}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_are_those_that_transformers_would_not_split(family):
    config = AutoConfig.for_model(**FAMILIES[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)
    assert len(layers) == config.get_text_config().num_hidden_layers
    assert {type(layer).__name__ for layer in layers} <= set(model._no_split_modules)
