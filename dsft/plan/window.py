"""Sliding windows of attention: how far back the layers of a model look, from its config.json alone.

As the models of transformers 5 do, which differs between families of the same fields: some look at `layer_types` and
others have a window in every layer, some want `use_sliding_window` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WITHOUT = {"llama", "granite", "olmo2", "gemma", "phi", "gpt2", "gpt_neox"}  # whatever their config.json says
_EVERY_LAYER = {"mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"}  # these do not look at layer_types
_SWITCHED = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}  # by use_sliding_window
_UNSWITCHED = {"mistral", "gemma2", "gemma3_text"}  # whatever use_sliding_window says
# Of the configuration classes, where config.json leaves them out.
_WINDOWS = {
    "mistral": 4096, "qwen2": 4096, "qwen2_moe": 4096, "qwen3": 4096, "qwen3_moe": 4096, "gemma2": 4096,
    "gemma3_text": 4096, "gpt_oss": 128,
}  # fmt: skip
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}  # every so many layers, one without a window
_FIRST = 28  # max_window_layers of the Qwens
_NO_ROPE = 4  # no_rope_layer_interval of SmolLM3


def sliding_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Tokens of the window, and how many of `layers` have it; (None, 0) where no layer has one."""
    family = str(config.get("model_type"))
    window = config.get("sliding_window", _WINDOWS.get(family))
    switched = family in _UNSWITCHED or config.get("use_sliding_window", family not in _SWITCHED)
    if family in _WITHOUT or not switched or type(window) is not int or window <= 0:
        return None, 0
    windowed = sum(_has_window(config, family, number) for number in range(layers))
    return (window, windowed) if windowed else (None, 0)


def _has_window(config: Mapping[str, Any], family: str, layer: int) -> bool:
    if family in _EVERY_LAYER:
        return True
    types = config.get("layer_types")
    if isinstance(types, list):
        return layer < len(types) and types[layer] == "sliding_attention"
    if family in ("qwen2", "qwen3"):
        return layer >= _number(config, "max_window_layers", _FIRST)
    if family == "qwen2_moe":
        return layer % 2 == 0 and layer < _number(config, "max_window_layers", _FIRST)
    if family == "smollm3":
        return not _has_rope(config, layer)
    pattern = _PATTERNS.get(family, 0)
    if family != "gemma2":
        pattern = _number(config, "sliding_window_pattern", pattern)
    return pattern <= 0 or (layer + 1) % pattern != 0


def _has_rope(config: Mapping[str, Any], layer: int) -> bool:
    with_rope = config.get("no_rope_layers")
    if isinstance(with_rope, Sequence):  # 1: with, 0: without
        return layer >= len(with_rope) or bool(with_rope[layer])
    return (layer + 1) % max(1, _number(config, "no_rope_layer_interval", _NO_ROPE)) != 0


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return value if type(value) is int else default
