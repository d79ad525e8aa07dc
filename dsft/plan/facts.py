"""What is known of a model before it is loaded: sizes, layers and names, from its files alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.errors import Where, refused
from dsft.plan.buildable import check_buildable, check_known
from dsft.plan.families import Layout, complete, layout
from dsft.plan.headers import Gguf, Tensor, Weights, read_gguf, read_index, read_weights
from dsft.plan.stored import check_stored, layer_sizes, linear_shapes
from dsft.plan.tokenizer import is_whole, last_id
from dsft.plan.window import sliding_window
from dsft.recipe.load import nearby


@dataclass(frozen=True)
class Linear:
    """One kind of linear layer inside the decoder layers: `count` of them in the whole model."""

    name: str  # the last part of its module path: "q_proj"
    inputs: int
    outputs: int
    count: int
    bias: bool


@dataclass(frozen=True)
class ModelFacts:
    """Sizes are in elements, not bytes. A weight shared by input embedding and output head is counted once."""

    model_type: str  # as in config.json: "llama"
    architecture: str  # the class transformers builds: "LlamaForCausalLM"
    decoder_layer: str | None  # class of one layer: "LlamaDecoderLayer"; None where the family is not known
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the feed-forward block that a token passes through: of a mixture, of all its experts together
    gated: bool  # gate and up projection, as in Llama; False: one projection up, as in GPT-2
    experts: int  # 0: no mixture of experts
    experts_per_token: int
    vocab: int
    tied: bool  # the output head is the input embedding
    max_positions: int | None
    parameters: int  # of the whole model
    active_parameters: int  # those that a token passes through; the same as `parameters` without experts
    layer_parameters: int  # of the largest decoder layer
    embedding_parameters: int  # of input embeddings, learned positions too
    head_parameters: int  # of the output head; 0 where tied
    linears: tuple[Linear, ...]
    dtype: str | None  # of the stored weights: "bfloat16"
    stored_bytes: int | None  # size of the weight files; None where only config.json is there
    chat_template: bool | None  # whether the tokenizer has one; None where there is no tokenizer to look at
    layout: Layout | None = None  # every module by name and shape; None where the family is not known
    window: int | None = None  # tokens that layers with sliding-window attention look back; None without such layers
    windowed_layers: int = 0  # how many layers have that window
    last_token: int | None = None  # the last id of the tokenizer's own vocabulary; None where that is not known

    @property
    def sized(self) -> bool:
        """Whether all sizes are known by which activations are estimated."""
        return min(self.layers, self.hidden, self.heads, self.head_dim, self.ffn, self.vocab, self.layer_parameters) > 0


def read_facts(
    path: str, *, revision: str | None = None, trusted: bool = False, where: Where | None = None
) -> ModelFacts | None:
    """The facts of the model at `path`: an absolute path of a folder or of a .gguf file, or a hub id.

    A hub id is looked up in the local hub cache; nothing is fetched. `trusted`: code in the folder may be run. None
    where nothing is known: a hub id that is not in the cache, or a family without formulas whose weights are not there.
    Raises DsftError, placed at `where`, for files that are damaged, incomplete, quantized or not of one model, and for a
    model that transformers cannot build as a causal language model.
    """
    if not os.path.isabs(path):
        folder = cached_snapshot(path, revision)
        return None if folder is None else _folder_facts(folder, trusted, where, cached=True)
    if os.path.isdir(path):
        return _folder_facts(Path(path), trusted, where)
    if os.path.isfile(path) and path.endswith(".gguf"):
        return _gguf_facts(Path(path), where)
    is_file = os.path.isfile(path)
    raise refused(
        "model-not-found",
        f"{path} is a file, not a model's folder" if is_file else f"there is no folder {path}",
        where=where,
        help=f"name its folder, {os.path.dirname(path)}" if is_file else nearby(Path(path)),
    )


def cached_snapshot(hub_id: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the local hub cache, if it is there with a config.json.

    The layout is huggingface_hub's: models--ORG--NAME/refs/REVISION holds a commit, snapshots/COMMIT the files. The
    cache is HF_HUB_CACHE, or hub/ in HF_HOME, or in huggingface/ in XDG_CACHE_HOME (~/.cache).
    """
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    try:
        commit = (repository / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        commit = revision or ""  # a commit can be asked for by its own name
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if os.path.isfile(snapshot / "config.json") else None


def _folder_facts(folder: Path, trusted: bool, where: Where | None, *, cached: bool = False) -> ModelFacts | None:
    if not os.path.isfile(folder / "config.json"):
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _gguf_facts(files[0], where)
        lora = os.path.isfile(folder / "adapter_config.json")
        raise refused(
            "model-not-found",
            f"{folder} has no config.json" + (f" and {len(files)} .gguf files" if files else ""),
            where=where,
            help="it holds an adapter: name its base model, or merge both with `dsft export`"
            if lora
            else "name a folder that save_pretrained wrote, or one downloaded from the hub",
        )
    if os.path.isfile(folder / "adapter_config.json"):
        raise refused(
            "model-not-found",
            f"{folder} holds an adapter beside a config.json: transformers would load the adapter's own base model",
            where=where,
            help="name the folder of the base model, or merge both with `dsft export`",
        )
    config = _read_json(folder / "config.json", where)
    check_known(config, folder, trusted, where)
    weights = None if cached and _lacks_shards(folder) else read_weights(folder, where=where)
    _refuse_quantized(folder, config, weights, where)
    if not is_whole(folder):
        message = f"{folder / 'tokenizer.json'} is cut off, or no tokenizer"
        raise refused("model-damaged", message, where=where, help=_AGAIN)
    found = layout(config, where=where)
    if found is not None:
        if weights is not None:
            check_stored(found, weights.tensors, folder, where=where)
        facts = _family_facts(config, found, where)
    elif weights is not None:
        facts = _header_facts(config, weights)
    else:
        return None
    said = config.get("dtype") or config.get("torch_dtype")
    return dataclasses.replace(
        facts,
        dtype=_main_dtype(weights.tensors) if weights else said if isinstance(said, str) else None,
        stored_bytes=weights.bytes if weights else _pickled_bytes(folder),
        chat_template=_has_chat_template(folder, where),
        last_token=last_id(folder),
    )


def _refuse_quantized(folder: Path, config: Mapping[str, Any], weights: Weights | None, where: Where | None) -> None:
    """A quantized model stores other tensors than it computes with, and not all tools say so in config.json."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    said = next((place[name] for place in places for name in _QUANTIZATIONS if place.get(name)), None)
    stored = next((name for name in _QUANTIZATION_FILES if os.path.isfile(folder / name)), None)
    integers = _not_float(weights.tensors) if weights else None
    if not (said or stored or integers):
        return
    kind = said.get("quant_method") if isinstance(said, Mapping) else None
    sign = kind or stored or integers
    raise refused(
        "quantized-model",
        f"the weights of {folder} are quantized{f' ({sign})' if sign else ''}, and dsft trains models as they were before",
        where=where,
        help="name the model that it was made from, or one with weights in bf16, fp16 or fp32",
    )


_QUANTIZATIONS = ("quantization_config", "compression_config")  # fields of config.json
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")  # of AutoGPTQ and AutoAWQ


def _not_float(tensors: Mapping[str, Tensor]) -> str | None:
    """A weight matrix that is not stored in numbers to train with. Masks and other buffers are not called "weight"."""
    return next(
        (
            f"{name} is {tensor.dtype}"
            for name, tensor in tensors.items()
            if len(tensor.shape) > 1 and name.endswith("weight") and tensor.dtype not in ("BF16", "F16", "F32", "F64")
        ),
        None,
    )


def _lacks_shards(folder: Path) -> bool:
    """Whether shards are still to be downloaded: to be expected of a cache, not of a folder that a user names."""
    index = folder / "model.safetensors.index.json"
    return os.path.isfile(index) and not all(os.path.isfile(folder / name) for name in set(read_index(index).values()))


def _pickled_bytes(folder: Path) -> int | None:
    """Size of weights in PyTorch's own format, whose tensors cannot be listed without torch."""
    sizes = [path.stat().st_size for path in folder.glob("pytorch_model*.bin") if os.path.isfile(path)]
    return sum(sizes) or None


def _main_dtype(tensors: Mapping[str, Tensor]) -> str | None:
    """The type that most bytes are stored in, by PyTorch's name where it has one."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.bytes
    if not sizes:
        return None
    dtype = sizes.most_common(1)[0][0]
    return _DTYPES.get(dtype, dtype.lower())


_DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8",
}  # fmt: skip


def _family_facts(config: Mapping[str, Any], found: Layout, where: Where | None) -> ModelFacts:
    c = complete(config, where=where)
    check_buildable(config, c, where)
    experts = getattr(c, "num_local_experts", 0)
    chosen = min(getattr(c, "num_experts_per_tok", 0), experts)
    kinds = {id(layer): layer for layer in found.layers}
    sizes = {at: sum(module.size for module in layer) for at, layer in kinds.items()}
    in_experts = {at: sum(m.size for m in layer if m.kind == "experts") for at, layer in kinds.items()}
    outside = sum(module.size for module in found.outside)
    head = found.head.size - (math.prod(found.head.parameters["weight"]) if found.tied else 0)
    parameters = outside + head + sum(sizes[id(layer)] for layer in found.layers)
    idle = sum(in_experts[id(layer)] for layer in found.layers) // experts * (experts - chosen) if experts else 0
    ffn = c.intermediate_size
    if any(in_experts.values()):
        ffn = chosen * getattr(c, "moe_intermediate_size", ffn) + getattr(c, "shared_expert_intermediate_size", 0)
    linears = Counter(
        (module.name, module.inputs, module.outputs, "bias" in module.parameters)
        for layer in found.layers
        for module in layer
        if module.kind in ("linear", "conv1d")
    )
    names = {module.name for layer in kinds.values() for module in layer}
    window, windowed = sliding_window(config, c.num_hidden_layers)
    return ModelFacts(
        model_type=config["model_type"],
        architecture=found.model_class,
        decoder_layer=found.layer_class,
        layers=c.num_hidden_layers,
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        ffn=ffn,
        gated=not names.isdisjoint({"gate_proj", "gate_up_proj", "experts"}),
        experts=experts,
        experts_per_token=chosen,
        vocab=c.vocab_size,
        tied=found.tied,
        max_positions=c.max_position_embeddings,
        parameters=parameters,
        active_parameters=parameters - idle,
        layer_parameters=max(sizes.values()),
        embedding_parameters=sum(module.size for module in found.outside if module.kind == "embedding"),
        head_parameters=head,
        linears=_linears(linears),
        dtype=None,
        stored_bytes=None,
        chat_template=None,
        layout=found,
        window=window,
        windowed_layers=windowed,
    )


def _linears(counts: Counter[tuple[str, int, int, bool]]) -> tuple[Linear, ...]:
    return tuple(Linear(name, inputs, outputs, n, bias) for (name, inputs, outputs, bias), n in counts.items())


def _header_facts(config: Mapping[str, Any], weights: Weights) -> ModelFacts:
    """What stored tensors tell of a model of an unknown family; sizes as its config.json calls them, 0 where it is silent.

    Stored tensors are taken for the model's parameters: buffers are counted too, and an output head that is not stored
    is taken to be tied.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config

    def size(*names: str) -> int:
        said = [value for name in names if type(value := text.get(name)) is int and 0 <= value < 2**31]
        return said[0] if said else 0

    sizes = {name: math.prod(tensor.shape) for name, tensor in weights.tensors.items()}
    layers = layer_sizes(weights.tensors)
    experts, chosen = size("num_local_experts", "num_experts", "n_routed_experts"), size("num_experts_per_tok")
    in_experts = sum(number for name, number in sizes.items() if ".experts." in name) if experts else 0
    head = next((name for name in sizes if name in ("lm_head.weight", "embed_out.weight", "output.weight")), None)
    embeddings = [name for name in sizes if re.search(r"(embed\w*|wte|wpe)\.weight$", name) and name != head]
    heads, hidden = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd", "d_model")
    parameters = sum(sizes.values())
    architectures = config.get("architectures")
    linears = Counter(linear_shapes(weights.tensors))
    number = len(layers) or size("num_hidden_layers", "n_layer")
    window, windowed = sliding_window(text, number)
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        decoder_layer=None,
        layers=number,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=size("head_dim") or (hidden // heads if heads > 0 else 0),
        ffn=size("intermediate_size", "n_inner"),
        gated=any("gate_proj" in name or "gate_up_proj" in name for name in sizes),
        experts=experts,
        experts_per_token=chosen,
        vocab=size("vocab_size") or max((weights.tensors[name].shape[0] for name in embeddings), default=0),
        tied=head is None,
        max_positions=size("max_position_embeddings", "n_positions") or None,
        parameters=parameters,
        active_parameters=parameters - in_experts // max(1, experts) * max(0, experts - chosen),
        layer_parameters=max(layers, default=0),
        embedding_parameters=sum(sizes[name] for name in embeddings),
        head_parameters=sizes[head] if head else 0,
        linears=_linears(linears),
        dtype=None,
        stored_bytes=None,
        chat_template=None,
        window=window,
        windowed_layers=windowed,
    )


# GGUF's architecture -> model_type. Mixtral is a llama with experts there.
_GGUF_FAMILIES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi2": "phi",
    "phi3": "phi3", "gpt2": "gpt2", "gptneox": "gpt_neox", "granite": "granite", "olmo2": "olmo2", "smollm3": "smollm3",
}  # fmt: skip

# A field of config.json -> GGUF's key below the architecture's name.
_GGUF_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}


def _gguf_facts(path: Path, where: Where | None) -> ModelFacts:
    """The facts of the model that transformers makes of a GGUF file: its numbers, names and families, not GGUF's."""
    gguf = read_gguf(path, where=where)
    config = _gguf_config(gguf)
    found = layout(config, where=where)
    if found is not None:
        facts = _family_facts(config, found, where)
    else:  # tensors have GGUF's names, which are not those of modules
        facts = dataclasses.replace(_header_facts(config, gguf.weights), linears=())
    template = "tokenizer.chat_template" in gguf.metadata
    return dataclasses.replace(
        facts,
        dtype=_main_dtype(gguf.weights.tensors),
        stored_bytes=gguf.weights.bytes,
        chat_template=template if template or "tokenizer.ggml.tokens" in gguf.metadata else None,
    )


def _gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The config.json that says the same as the key-value pairs of a GGUF file."""
    architecture, tensors = str(gguf.metadata.get("general.architecture", "")), gguf.weights.tensors
    fields = {name: gguf.metadata.get(f"{architecture}.{key}") for name, key in _GGUF_FIELDS.items()}
    config = {name: value for name, value in fields.items() if value}
    config["model_type"] = _GGUF_FAMILIES.get(architecture, architecture)
    if config["model_type"] == "llama" and "num_local_experts" in config:
        config["model_type"] = "mixtral"
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
    return config


def _has_chat_template(folder: Path, where: Where | None) -> bool | None:
    """Whether transformers finds a default chat template: a file of its own, or in tokenizer_config.json."""
    config = folder / "tokenizer_config.json"
    said = _read_json(config, where) if os.path.isfile(config) else None
    for name in ("chat_template.jinja", "additional_chat_templates/default.jinja"):
        if os.path.isfile(folder / name):
            _check_own_template(folder / name, where)
            return True
    if said is not None:
        template = said.get("chat_template")
        if isinstance(template, list):  # several by name
            return any(isinstance(one, Mapping) and one.get("name") == "default" for one in template)
        return isinstance(template, str) or (isinstance(template, Mapping) and "default" in template)
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return False if any(os.path.isfile(folder / name) for name in tokenizers) else None


def _check_own_template(path: Path, where: Where | None) -> None:
    """Only what is told at a glance: the rest costs an import, and is seen when the tokenizer is loaded."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refused("model-damaged", f"{path} cannot be read: {error}", where=where, help=_AGAIN) from None
    if "messages" not in text:
        raise refused("model-damaged", f"{path} does not write the messages", where=where, help=_AGAIN)


_AGAIN = "copy or download the file again"


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _read_json(path: Path, where: Where | None) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise refused("unreadable-file", f"cannot read {path}: {error.strerror or error}", where=where) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise refused("model-damaged", f"{path} is no JSON: {reason}", where=where, help=_AGAIN) from None
    if not isinstance(read, dict):
        raise refused("model-damaged", f"{path} is no JSON object", where=where, help=_AGAIN)
    return read
