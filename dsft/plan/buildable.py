"""Whether transformers builds the model that a config.json describes, and whether it then computes.

Told from the file alone: neither torch nor transformers is imported. The rules are those of transformers 5; a test
holds each of them against the models that it builds.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsft.errors import DsftError, Problem, Where
from dsft.plan.families import FAMILIES

# transformers.activations.ACT2CLS
ACTIVATIONS = frozenset(
    [
        "gelu",
        "gelu_10",
        "gelu_accurate",
        "gelu_fast",
        "gelu_new",
        "gelu_python",
        "gelu_python_tanh",
        "gelu_pytorch_tanh",
        "hardswish",
        "laplace",
        "leaky_relu",
        "linear",
        "mish",
        "prelu",
        "quick_gelu",
        "relu",
        "relu2",
        "relu6",
        "sigmoid",
        "silu",
        "sqrtsoftplus",
        "swish",
        "tanh",
        "xielu",
    ]
)
# transformers.modeling_rope_utils: type -> what its entry has to say.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "proportional": (),
    "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
_PHI3_ROPE = ("default", "longrope", "su", "yarn")  # the last two are old names of longrope there
_WHOLE_HEADS = {"llama", "gemma2", "gemma3_text", "gpt2", "gpt_neox"}  # hidden_size is a multiple of heads
_PART_ROTARY = {"phi", "gpt2", "gpt_neox"}  # no rotation, or of a part of each head
_OWN_LAYERS = {"gpt2", "gpt_neox"}  # neither grouped queries nor a padding row in the embedding


def check_known(config: Mapping[str, Any], path: Path, trusted: bool, where: Where | None) -> None:
    """Raises DsftError (model-config) for a model that AutoModelForCausalLM has no class for."""
    model_type = config.get("model_type")
    auto_map = config.get("auto_map")
    own_code = isinstance(auto_map, Mapping) and "AutoModelForCausalLM" in auto_map
    message, help = "", "dsft trains language models that predict the next token"
    if own_code and trusted:
        return
    if not isinstance(model_type, str) or not model_type:
        message, help = "does not say a model_type", "take a whole copy of the model"
    elif model_type not in FAMILIES and model_type not in (causal_model_types() or (model_type,)):
        message = (
            f'is of a model_type, "{model_type}", for which the installed transformers has no causal language model'
        )
        if own_code:
            help = 'it brings code of its own: read it, then write "trust_remote_code": true in "model"'
    elif config.get("is_encoder_decoder") is True:
        message = "is of an encoder with a decoder"
    elif not _is_causal(config.get("architectures")):
        message = f"is of {config['architectures'][0]}, which does not predict the next token"
        help += "; name the model that this one was made from"
    if message:
        raise DsftError([Problem("model-config", f"{path / 'config.json'} {message}", where, help)])


def _is_causal(architectures: Any) -> bool:
    """By the class's name; where none is said, transformers takes the causal one of the model_type."""
    if not isinstance(architectures, list) or not architectures:
        return True
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead", "Model", "GenerationDecoder")
    return any(isinstance(name, str) and name.endswith(ends) for name in architectures)


@functools.cache
def causal_model_types() -> frozenset[str]:
    """The keys of transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, read from its source: an import takes seconds.

    Empty where transformers is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    try:
        text = source.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    names = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b[^\n]*\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^ *\("([^"]+)",', names[1], re.MULTILINE)) if names else frozenset()


def check_buildable(config: Mapping[str, Any], sizes: SimpleNamespace, where: Where | None) -> None:
    """`config` against itself; `sizes` is what families.complete made of it. Raises DsftError (model-config)."""
    problems = [
        Problem("model-config", f"the model's config.json says {said}", where, help or "take a whole copy of the model")
        for said, help in _contradictions(config, config["model_type"], sizes)
    ]
    if problems:
        raise DsftError(problems)


def _contradictions(config: Mapping[str, Any], family: str, c: SimpleNamespace) -> Iterator[tuple[str, str | None]]:
    """(what it says, what to do or None)"""
    heads = c.num_attention_heads
    whole = family in _WHOLE_HEADS or (family == "phi" and not config.get("head_dim"))
    if whole and c.hidden_size % heads:
        yield f'"hidden_size": {c.hidden_size}, which is no multiple of its {heads} attention heads', None
    elif c.head_dim % 2 and family not in _PART_ROTARY:
        yield f"heads of {c.head_dim} numbers, and rotary embeddings turn pairs of them", None
    if family not in _OWN_LAYERS and heads % c.num_key_value_heads:
        yield f"{c.num_key_value_heads} key-value heads, which {heads} attention heads cannot share evenly", None
    name = {"gpt2": "activation_function", "gemma2": "hidden_activation", "gemma3_text": "hidden_activation"}.get(
        family, "hidden_act"
    )
    if name in config and not (isinstance(config[name], str) and config[name] in ACTIVATIONS):
        yield f'"{name}": {_short(config[name])}, and transformers has no such function', _nearest(config[name])
    yield from _numbers(config)
    if config.get("return_dict") is False:
        yield '"return_dict": false, and without it a model computes no loss', 'remove "return_dict"'
    experts, chosen = getattr(c, "num_local_experts", 0), getattr(c, "num_experts_per_tok", 0)
    if chosen > experts:
        yield f"that each token goes to {chosen} of {experts} experts", None
    padding = config.get("pad_token_id")
    if type(padding) is int and padding >= c.vocab_size and family not in _OWN_LAYERS:
        yield f'"pad_token_id": {padding}, which is beyond its vocabulary of {c.vocab_size}', None
    layers = config.get("layer_types")
    if isinstance(layers, list) and len(layers) != c.num_hidden_layers:
        yield f"{c.num_hidden_layers} layers, and lists the types of {len(layers)}", None
    if family not in ("gpt2", "gemma3_text"):  # gemma3_text has one entry for each type of layer
        yield from _rope(config.get("rope_parameters") or config.get("rope_scaling"), family)


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    for name, (least, beyond) in _NUMBERS.items():
        value = config.get(name, least)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value < beyond:
            said = "a number from 0 to below 1" if beyond == 1 else "a number above 0"
            yield f'"{name}": {_short(value)}, and it is {said}', None


_TINY = 1e-300  # above 0
# Fields of the configurations of transformers -> from where, and up to below where, they can be.
_NUMBERS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (_TINY, float("inf"))),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"), (0, 1)),
}


def _rope(entry: Any, family: str) -> Iterator[tuple[str, str | None]]:
    if not isinstance(entry, Mapping):
        return
    kind = entry.get("rope_type", entry.get("type", "default"))
    allowed = _PHI3_ROPE if family == "phi3" else tuple(ROPE_FIELDS)
    if kind not in allowed:
        yield f"a rope_type of {_short(kind)}", f"{family} knows {', '.join(allowed)}"
        return
    kind = "longrope" if family == "phi3" and kind in ("su", "yarn") else kind
    missing = [name for name in ROPE_FIELDS[kind] if name not in entry]
    if missing:
        yield f'a rope_type of "{kind}", and not its {" and ".join(missing)}', None


def _nearest(name: Any) -> str | None:
    from difflib import get_close_matches

    found = get_close_matches(name, ACTIVATIONS, n=1) if isinstance(name, str) else []
    return f"is {found[0]} meant?" if found else None


def _short(value: Any) -> str:
    return f'"{value[:40]}"' if isinstance(value, str) else repr(value)[:40]
