"""The keys that a recipe may add to deepspeed.json are DeepSpeed's own."""

from __future__ import annotations

import pytest

from dsft.recipe.schema import load_schema


@pytest.mark.slow
def test_keys_of_zero_optimization():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    config = load_schema()["properties"]["strategy"]["then"]["properties"]["config"]
    zero = config["properties"]["zero_optimization"]
    assert set(zero["properties"]) <= known
    assert not set(zero["properties"]) & set(zero["x-refused"])
    assert not set(config["properties"]) & set(config["x-refused"])
