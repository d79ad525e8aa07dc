"""Decoder families: every module with weights of a model, from its config.json alone.

Names and shapes are those of the modules that transformers 5 builds (`AutoModelForCausalLM.from_config`), read from
its modeling and configuration files, with the same defaults for what config.json leaves out. In transformers 5 the
experts of a layer are two parameters of three dimensions, not a list of linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dsft.errors import Where, refused

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A module that owns parameters: its path, below its layer or the whole model, and its parameters' shapes.

    `kind` is "linear", "conv1d" (GPT-2's linear layer, whose weight is stored inputs x outputs), "embedding", "norm",
    "router" or "experts".
    """

    path: str
    kind: str
    parameters: Mapping[str, Shape]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def inputs(self) -> int:
        """Of a linear layer; the rows of an embedding."""
        return self.parameters["weight"][1 if self.kind == "linear" else 0]

    @property
    def outputs(self) -> int:
        """Of a linear layer; the width of an embedding."""
        return self.parameters["weight"][0 if self.kind == "linear" else 1]

    @property
    def size(self) -> int:
        """Parameters in elements."""
        return sum(map(math.prod, self.parameters.values()))


Layer = tuple[Module, ...]


@dataclass(frozen=True)
class Layout:
    """A model as its modules. Equal layers are the same object, so even a deep mixture of experts is small."""

    model_class: str
    layer_class: str | None
    outside: tuple[Module, ...]  # embeddings and the last norm, with their whole path
    layers_path: str
    layers: tuple[Layer, ...]
    head: Module
    tied: bool  # the head's weight is the input embedding's

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Whole path and module, of all layers too; the head last."""
        for module in self.outside:
            yield module.path, module
        for number, layer in enumerate(self.layers):
            for module in layer:
                yield f"{self.layers_path}.{number}.{module.path}", module
        yield self.head.path, self.head

    def shapes(self) -> dict[str, Shape]:
        """Parameter name to shape, as `named_parameters` gives them: a tied head's weight is left out."""
        found = {
            f"{path}.{name}": shape for path, module in self.modules() for name, shape in module.parameters.items()
        }
        if self.tied:
            del found[f"{self.head.path}.weight"]
        return found


@dataclass(frozen=True)
class Family:
    """How one model_type is built. `build` gives (modules outside, one list of modules per layer)."""

    model: str
    layer: str
    layers_path: str
    build: Callable[[SimpleNamespace], tuple[tuple[Module, ...], tuple[Layer, ...]]]
    defaults: Mapping[str, Any]
    head_bias: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)  # name in config.json -> name used here


def complete(config: Mapping[str, Any], *, where: Where | None = None) -> SimpleNamespace | None:
    """The fields of `config` that shapes follow from, checked, with the family's defaults; None for another family.

    Always there: vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    num_key_value_heads, head_dim, max_position_embeddings, tie_word_embeddings, and the family's own.
    Raises DsftError (model-config) for a value that no model can have.
    """
    family = _family(config)
    if family is None:
        return None
    said = {family.aliases.get(name, name): value for name, value in config.items()}
    fields = {name: said.get(name, default) for name, default in family.defaults.items()}
    fields.setdefault("head_dim", said.get("head_dim"))
    if fields["intermediate_size"] is None:  # GPT-2
        fields["intermediate_size"] = 4 * fields["hidden_size"] if type(fields["hidden_size"]) is int else None
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name, value in fields.items():
        default = family.defaults.get(name)
        if type(default) is bool:
            right = type(value) is bool
        elif name == "mlp_only_layers":
            right = value is None or (isinstance(value, list) and all(type(item) is int for item in value))
        elif name == "head_dim" and value is None:
            right = True
        else:
            right = type(value) is int and 0 < value < 1 << 32
        if not right:
            raise refused(
                "model-config",
                f'the model\'s config.json says "{name}": {repr(value)[:60]}, which no {config["model_type"]} model can have',
                where=where,
                help="take a whole copy of the model",
            )
    if fields["num_hidden_layers"] > 10_000:
        raise refused("model-config", f"the model's config.json says {fields['num_hidden_layers']} layers", where=where)
    if fields["head_dim"] is None:
        fields["head_dim"] = max(1, fields["hidden_size"] // fields["num_attention_heads"])
    return SimpleNamespace(**fields)


def layout(config: Mapping[str, Any], *, where: Where | None = None) -> Layout | None:
    """Every module of the model that `config` describes; None where its model_type is not one of FAMILIES."""
    c = complete(config, where=where)
    if c is None:
        return None
    family = _family(config)
    outside, layers = family.build(c)
    head = _linear("lm_head", c.hidden_size, c.vocab_size, family.head_bias)
    return Layout(family.model, family.layer, outside, family.layers_path, layers, head, c.tie_word_embeddings)


def _family(config: Mapping[str, Any]) -> Family | None:
    model_type = config.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def _linear(path: str, inputs: int, outputs: int, bias: bool = False) -> Module:
    return Module(path, "linear", {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {}))


def _conv1d(path: str, inputs: int, outputs: int) -> Module:
    return Module(path, "conv1d", {"weight": (inputs, outputs), "bias": (outputs,)})


def _embedding(path: str, rows: int, width: int) -> Module:
    return Module(path, "embedding", {"weight": (rows, width)})


def _norm(path: str, width: int, bias: bool = False) -> Module:
    return Module(path, "norm", {"weight": (width,)} | ({"bias": (width,)} if bias else {}))


def _attention(c: SimpleNamespace, *, qkv_bias: bool = False, o_bias: bool = False, output: str = "o_proj") -> Layer:
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return (
        _linear("self_attn.q_proj", c.hidden_size, q, qkv_bias),
        _linear("self_attn.k_proj", c.hidden_size, kv, qkv_bias),
        _linear("self_attn.v_proj", c.hidden_size, kv, qkv_bias),
        _linear(f"self_attn.{output}", q, c.hidden_size, o_bias),
    )


def _qk_norms(q: int, k: int) -> Layer:
    return _norm("self_attn.q_norm", q), _norm("self_attn.k_norm", k)


def _gated(path: str, hidden: int, width: int, bias: bool = False) -> Layer:
    return (
        _linear(f"{path}.gate_proj", hidden, width, bias),
        _linear(f"{path}.up_proj", hidden, width, bias),
        _linear(f"{path}.down_proj", width, hidden, bias),
    )


def _mixture(experts: int, hidden: int, width: int) -> Layer:
    return (
        Module("mlp.gate", "router", {"weight": (experts, hidden)}),
        Module(
            "mlp.experts",
            "experts",
            {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)},
        ),
    )


def _norms(c: SimpleNamespace, *names: str) -> Layer:
    return tuple(_norm(name, c.hidden_size) for name in names)


_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA2_NORMS = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _decoder(c: SimpleNamespace, layer: Layer | tuple[Layer, ...]) -> tuple[tuple[Module, ...], tuple[Layer, ...]]:
    """A Llama-like model around one kind of layer, or around the layers given one by one."""
    outside = (_embedding("model.embed_tokens", c.vocab_size, c.hidden_size), _norm("model.norm", c.hidden_size))
    return outside, (layer,) * c.num_hidden_layers if isinstance(layer[0], Module) else layer


def _llama(c):
    attention = _attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    mlp = _gated("mlp", c.hidden_size, c.intermediate_size, c.mlp_bias)
    return _decoder(c, (*attention, *mlp, *_norms(c, *_PRE_NORMS)))


def _mistral(c):
    mlp = _gated("mlp", c.hidden_size, c.intermediate_size)
    return _decoder(c, (*_attention(c), *mlp, *_norms(c, *_PRE_NORMS)))


def _mixtral(c):
    mixture = _mixture(c.num_local_experts, c.hidden_size, c.intermediate_size)
    return _decoder(c, (*_attention(c), *mixture, *_norms(c, *_PRE_NORMS)))


def _qwen2(c):
    mlp = _gated("mlp", c.hidden_size, c.intermediate_size)
    return _decoder(c, (*_attention(c, qkv_bias=True), *mlp, *_norms(c, *_PRE_NORMS)))


def _qwen2_moe(c):
    around = (*_attention(c, qkv_bias=c.qkv_bias), *_norms(c, *_PRE_NORMS))
    mixture = (
        *_mixture(c.num_local_experts, c.hidden_size, c.moe_intermediate_size),
        *_gated("mlp.shared_expert", c.hidden_size, c.shared_expert_intermediate_size),
        _linear("mlp.shared_expert_gate", c.hidden_size, 1),
    )
    return _decoder(c, _sparse_layers(c, around, mixture))


def _qwen3(c):
    attention = _attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    mlp = _gated("mlp", c.hidden_size, c.intermediate_size)
    return _decoder(c, (*attention, *_qk_norms(c.head_dim, c.head_dim), *mlp, *_norms(c, *_PRE_NORMS)))


def _qwen3_moe(c):
    attention = _attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    around = (*attention, *_qk_norms(c.head_dim, c.head_dim), *_norms(c, *_PRE_NORMS))
    return _decoder(c, _sparse_layers(c, around, _mixture(c.num_local_experts, c.hidden_size, c.moe_intermediate_size)))


def _sparse_layers(c: SimpleNamespace, around: Layer, mixture: Layer) -> tuple[Layer, ...]:
    """Layer n has the mixture where n + 1 divides by decoder_sparse_step, unless mlp_only_layers names it."""
    dense, sparse = (*around, *_gated("mlp", c.hidden_size, c.intermediate_size)), (*around, *mixture)
    only = set(c.mlp_only_layers or ())
    return tuple(
        sparse if number not in only and (number + 1) % c.decoder_sparse_step == 0 else dense
        for number in range(c.num_hidden_layers)
    )


def _gemma(c):
    attention = _attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    return _decoder(c, (*attention, *_gated("mlp", c.hidden_size, c.intermediate_size), *_norms(c, *_PRE_NORMS)))


def _gemma2(c):
    attention = _attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    return _decoder(c, (*attention, *_gated("mlp", c.hidden_size, c.intermediate_size), *_norms(c, *_GEMMA2_NORMS)))


def _gemma3(c):
    outside, (layer, *_) = _gemma2(c)
    return outside, ((*layer, *_qk_norms(c.head_dim, c.head_dim)),) * c.num_hidden_layers


def _olmo2(c):
    attention = _attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    qk_norms = _qk_norms(c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim)
    norms = _norms(c, "post_attention_layernorm", "post_feedforward_layernorm")
    return _decoder(c, (*attention, *qk_norms, *_gated("mlp", c.hidden_size, c.intermediate_size), *norms))


def _phi(c):
    width = c.hidden_size // c.num_attention_heads
    layer = (
        *_attention(c, qkv_bias=True, o_bias=True, output="dense"),
        *(_norm(f"self_attn.{name}_layernorm", width, bias=True) for name in ("q", "k") if c.qk_layernorm),
        _linear("mlp.fc1", c.hidden_size, c.intermediate_size, bias=True),
        _linear("mlp.fc2", c.intermediate_size, c.hidden_size, bias=True),
        _norm("input_layernorm", c.hidden_size, bias=True),
    )
    (embedding, _), layers = _decoder(c, layer)
    return (embedding, _norm("model.final_layernorm", c.hidden_size, bias=True)), layers


def _phi3(c):
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return _decoder(
        c,
        (
            _linear("self_attn.o_proj", q, c.hidden_size),
            _linear("self_attn.qkv_proj", c.hidden_size, q + 2 * kv),
            _linear("mlp.gate_up_proj", c.hidden_size, 2 * c.intermediate_size),
            _linear("mlp.down_proj", c.intermediate_size, c.hidden_size),
            *_norms(c, *_PRE_NORMS),
        ),
    )


def _gpt2(c):
    outside = (
        _embedding("transformer.wte", c.vocab_size, c.hidden_size),
        _embedding("transformer.wpe", c.max_position_embeddings, c.hidden_size),
        _norm("transformer.ln_f", c.hidden_size, bias=True),
    )
    layer = (
        _norm("ln_1", c.hidden_size, bias=True),
        _conv1d("attn.c_attn", c.hidden_size, 3 * c.hidden_size),
        _conv1d("attn.c_proj", c.hidden_size, c.hidden_size),
        _norm("ln_2", c.hidden_size, bias=True),
        _conv1d("mlp.c_fc", c.hidden_size, c.intermediate_size),
        _conv1d("mlp.c_proj", c.intermediate_size, c.hidden_size),
    )
    return outside, (layer,) * c.num_hidden_layers


def _gpt_neox(c):
    outside = (
        _embedding("gpt_neox.embed_in", c.vocab_size, c.hidden_size),
        _norm("gpt_neox.final_layer_norm", c.hidden_size, bias=True),
    )
    layer = (
        *(_norm(name, c.hidden_size, bias=True) for name in _PRE_NORMS),
        _linear("attention.query_key_value", c.hidden_size, 3 * c.hidden_size, c.attention_bias),
        _linear("attention.dense", c.hidden_size, c.hidden_size, c.attention_bias),
        _linear("mlp.dense_h_to_4h", c.hidden_size, c.intermediate_size, bias=True),
        _linear("mlp.dense_4h_to_h", c.intermediate_size, c.hidden_size, bias=True),
    )
    return outside, (layer,) * c.num_hidden_layers


def _sizes(
    vocab: int, hidden: int, ffn: int | None, layers: int, heads: int, kv_heads: int | None, positions: int, **more
) -> dict[str, Any]:
    """The defaults of a configuration class. Fields that a family lacks are ignored in its config.json."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


_LLAMA_BIASES = {"attention_bias": False, "mlp_bias": False}
_GEMMA = {"head_dim": 256, "attention_bias": False, "tie_word_embeddings": True}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_EXPERTS = {"num_experts": "num_local_experts"}
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
}

# model_type -> how it is built; sizes are the defaults of transformers' configuration class of that type.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "LlamaDecoderLayer", "model.layers", _llama,
        _sizes(32000, 4096, 11008, 32, 32, None, 2048, **_LLAMA_BIASES),
    ),
    "granite": Family(
        "GraniteForCausalLM", "GraniteDecoderLayer", "model.layers", _llama,
        _sizes(32000, 4096, 11008, 32, 32, None, 2048, **_LLAMA_BIASES),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "SmolLM3DecoderLayer", "model.layers", _llama,
        _sizes(128256, 2048, 11008, 36, 16, 4, 32768, **_LLAMA_BIASES, tie_word_embeddings=True),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", "Olmo2DecoderLayer", "model.layers", _olmo2,
        _sizes(50304, 4096, 11008, 32, 32, None, 2048, attention_bias=False),
    ),
    "mistral": Family(
        "MistralForCausalLM", "MistralDecoderLayer", "model.layers", _mistral,
        _sizes(32000, 4096, 14336, 32, 32, 8, 131072),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralDecoderLayer", "model.layers", _mixtral,
        _sizes(32000, 4096, 14336, 32, 32, 8, 131072, num_local_experts=8, num_experts_per_tok=2),
        aliases=_EXPERTS,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", "Qwen2DecoderLayer", "model.layers", _qwen2,
        _sizes(151936, 4096, 22016, 32, 32, 32, 32768),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", "Qwen2MoeDecoderLayer", "model.layers", _qwen2_moe,
        _sizes(151936, 2048, 5632, 24, 16, 16, 32768, num_local_experts=60, num_experts_per_tok=4, qkv_bias=True,
               moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **_SPARSE),
        aliases=_EXPERTS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3DecoderLayer", "model.layers", _qwen3,
        _sizes(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128, attention_bias=False),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer", "model.layers", _qwen3_moe,
        _sizes(151936, 2048, 6144, 24, 32, 4, 32768, num_local_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=768, attention_bias=False, **_SPARSE),
        aliases=_EXPERTS,
    ),
    "gemma": Family(
        "GemmaForCausalLM", "GemmaDecoderLayer", "model.layers", _gemma,
        _sizes(256000, 3072, 24576, 28, 16, 16, 8192, **_GEMMA),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "Gemma2DecoderLayer", "model.layers", _gemma2,
        _sizes(256000, 2304, 9216, 26, 8, 4, 8192, **_GEMMA),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "Gemma3DecoderLayer", "model.layers", _gemma3,
        _sizes(262208, 2304, 9216, 26, 8, 4, 131072, **_GEMMA),
    ),
    "phi": Family(
        "PhiForCausalLM", "PhiDecoderLayer", "model.layers", _phi,
        _sizes(51200, 2048, 8192, 24, 32, None, 2048, qk_layernorm=False),
        head_bias=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM", "Phi3DecoderLayer", "model.layers", _phi3,
        _sizes(32064, 3072, 8192, 32, 32, None, 4096),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", "GPT2Block", "transformer.h", _gpt2,
        _sizes(50257, 768, None, 12, 12, None, 1024, tie_word_embeddings=True),
        aliases=_GPT2_NAMES,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", "GPTNeoXLayer", "gpt_neox.layers", _gpt_neox,
        _sizes(50432, 6144, 24576, 44, 64, None, 2048, attention_bias=True),
    ),
}  # fmt: skip
