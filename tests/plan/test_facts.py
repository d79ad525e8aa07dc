"""Facts of model folders, GGUF files and the hub cache, and what is said of folders that contradict themselves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import struct
from pathlib import Path

import pytest
from workshop import parameter_shapes

from dsft.errors import DsftError, Where
from dsft.plan.facts import Linear, cached_snapshot, read_facts
from dsft.plan.families import layout

WHERE = Where("recipe.json", 3, 12)
LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MIXTURE = {**LLAMA, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CODES = {"F32": 4, "I32": 4, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}


def write_weights(path: Path, shapes: dict, dtype: str = "BF16") -> None:
    """A safetensors file with a hole for its data."""
    entries, position = {}, 0
    for name, shape in shapes.items():
        end = position + CODES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def write_folder(folder: Path, config: dict, shapes: dict | None = None, dtype: str = "BF16") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", parameter_shapes(config) if shapes is None else shapes, dtype)
    return str(folder)


def problems(path) -> list:
    with pytest.raises(DsftError) as error:
        read_facts(str(path), where=WHERE)
    assert all(problem.where == WHERE and problem.help for problem in error.value.problems)
    return list(error.value.problems)


def test_facts_of_a_folder(tmp_path):
    path = write_folder(tmp_path, LLAMA)
    facts = read_facts(path)
    attention, mlp = 2 * 16 * 16 + 2 * 16 * 8, 3 * 16 * 24
    layer = attention + mlp + 2 * 16
    assert facts.parameters == facts.active_parameters == 3 * layer + 2 * 64 * 16 + 16
    assert facts.layer_parameters == layer
    assert facts.embedding_parameters == facts.head_parameters == 64 * 16
    assert facts.linears == (
        Linear("q_proj", 16, 16, 3, False), Linear("k_proj", 16, 8, 3, False), Linear("v_proj", 16, 8, 3, False),
        Linear("o_proj", 16, 16, 3, False), Linear("gate_proj", 16, 24, 3, False), Linear("up_proj", 16, 24, 3, False),
        Linear("down_proj", 24, 16, 3, False),
    )  # fmt: skip
    assert (facts.model_type, facts.architecture, facts.decoder_layer) == (
        "llama", "LlamaForCausalLM", "LlamaDecoderLayer",
    )  # fmt: skip
    sizes = facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim, facts.ffn, facts.vocab
    assert sizes == (3, 16, 4, 2, 4, 24, 64)
    assert (facts.gated, facts.tied, facts.experts, facts.experts_per_token) == (True, False, 0, 0)
    assert facts.max_positions == 128
    assert facts.dtype == "bfloat16"
    assert facts.stored_bytes == os.path.getsize(f"{path}/model.safetensors")
    assert facts.chat_template is None


def test_tied_head_is_counted_once_and_may_be_stored(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    untied = read_facts(write_folder(tmp_path / "untied", LLAMA))
    tied = read_facts(write_folder(tmp_path / "tied", config))
    assert tied.parameters == untied.parameters - 64 * 16
    assert (tied.tied, tied.head_parameters) == (True, 0)
    stored = parameter_shapes(LLAMA)  # with a head
    assert read_facts(write_folder(tmp_path / "both", config, stored)).parameters == tied.parameters
    del stored["model.embed_tokens.weight"]
    assert read_facts(write_folder(tmp_path / "head", config, stored)).parameters == tied.parameters
    del stored["lm_head.weight"]
    (problem,) = problems(write_folder(tmp_path / "neither", config, stored))
    assert problem.kind == "model-incomplete"
    assert problem.message.endswith("model.embed_tokens.weight")


def test_head_of_a_tied_model_with_a_bias(tmp_path):
    config = {**LLAMA, "model_type": "phi", "tie_word_embeddings": True}
    facts = read_facts(write_folder(tmp_path, config))
    assert facts.head_parameters == 64
    assert facts.parameters == sum(map(math.prod, parameter_shapes(config).values()))
    assert not facts.gated


def test_a_mixture(tmp_path):
    config = {**MIXTURE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}
    facts = read_facts(write_folder(tmp_path, config))
    expert = 3 * 16 * 12
    assert facts.parameters - facts.active_parameters == 2 * expert  # one of three experts idle, in two layers
    assert (facts.experts, facts.experts_per_token, facts.ffn) == (3, 2, 2 * 12 + 20)
    assert facts.gated
    assert Linear("gate_proj", 16, 24, 1, False) in facts.linears  # of the dense layer
    assert Linear("gate_proj", 16, 20, 2, False) in facts.linears  # of the shared experts
    sparse = sum(module.size for module in layout(config).layers[1])
    assert facts.layer_parameters == sparse


def test_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float16"}))
    facts = read_facts(str(tmp_path))
    assert facts.parameters == sum(map(math.prod, parameter_shapes(LLAMA).values()))
    assert (facts.dtype, facts.stored_bytes) == ("float16", None)


def test_main_type_of_mixed_weights(tmp_path):
    small, large = {"lm_head.weight": (64, 16)}, parameter_shapes(LLAMA)
    del large["lm_head.weight"]
    path = write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    write_weights(tmp_path / "small", small, "F32")
    write_weights(tmp_path / "large", large, "BF16")
    weight_map = {name: "small" for name in small} | {name: "large" for name in large}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert read_facts(path).dtype == "bfloat16"


def test_weights_of_pytorchs_own_format_are_only_measured(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(123))
    assert read_facts(str(tmp_path)).stored_bytes == 123


@pytest.mark.parametrize("rename", [lambda name: name, lambda name: name.removeprefix("transformer.")])
def test_names_without_the_prefix_and_buffers(tmp_path, rename):
    config = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 64}
    shapes = {rename(name): shape for name, shape in parameter_shapes(config).items()}
    shapes[rename("transformer.h.0.attn.bias")] = (1, 1, 32, 32)
    facts = read_facts(write_folder(tmp_path, config, shapes))
    assert facts.parameters == sum(map(math.prod, parameter_shapes(config).values()))
    assert facts.ffn == 64


def test_first_name_of_the_head_of_gpt_neox(tmp_path):
    config = LLAMA | {"model_type": "gpt_neox"}
    shapes = {name.replace("lm_head", "embed_out"): shape for name, shape in parameter_shapes(config).items()}
    assert read_facts(write_folder(tmp_path, config, shapes)).head_parameters == 64 * 16


def one_by_one(config: dict) -> dict:
    """Shapes with every expert's layers on their own, as they are stored on the hub."""
    shapes = {}
    for name, shape in parameter_shapes(config).items():
        path, _, last = name.rpartition(".")
        for number in range(3 if path.endswith("experts") else 0):
            parts = ("down_proj",) if last == "down_proj" else ("gate_proj", "up_proj")
            rows = shape[1] // len(parts)
            shapes |= {f"{path}.{number}.{part}.weight": (rows, shape[2]) for part in parts}
        if not path.endswith("experts"):
            shapes[name] = shape
    if config["model_type"] == "mixtral":
        first = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for name in list(shapes):
            new = name.replace(".mlp.", ".block_sparse_moe.")
            for part, letter in first.items():
                new = new.replace(part, letter)
            shapes[new] = shapes.pop(name)
    return shapes


MIXTURES = [{**MIXTURE, "model_type": "qwen3_moe"}, {**LLAMA, "model_type": "mixtral", "num_local_experts": 3}]


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config["model_type"])
def test_experts_stored_one_by_one(tmp_path, config):
    shapes = one_by_one(config)
    fused = read_facts(write_folder(tmp_path / "fused", config))
    facts = read_facts(write_folder(tmp_path / "single", config, shapes))
    assert facts.parameters == fused.parameters
    last = [name for name in shapes if "experts.2." in name][-1]
    shapes[last] = (3, 3)
    (problem,) = problems(write_folder(tmp_path / "wrong", config, shapes))
    assert problem.kind == "model-mismatch"
    assert "3 x 3" in problem.message
    del shapes[last]
    (problem,) = problems(write_folder(tmp_path / "wrong", config, shapes))
    assert problem.kind == "model-incomplete"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 65}, ["model.embed_tokens.weight", "64 x 16", "65 x 16", "1 more"]),
        ({"hidden_size": 32, "head_dim": 4}, ["64 x 16", "64 x 32"]),
        ({"num_hidden_layers": 2}, ["have 3 layers", "says 2"]),
    ],
)
def test_config_of_another_model(tmp_path, changes, words):
    path = write_folder(tmp_path, LLAMA | changes, parameter_shapes(LLAMA))
    (problem,) = problems(path)
    assert problem.kind == "model-mismatch"
    assert all(word in problem.message for word in [path, *words])


def test_missing_tensors(tmp_path):
    shapes = parameter_shapes(LLAMA)
    del shapes["model.layers.1.mlp.up_proj.weight"], shapes["lm_head.weight"]
    (problem,) = problems(write_folder(tmp_path, LLAMA, shapes))
    assert problem.kind == "model-incomplete"
    assert "model.layers.1.mlp.up_proj.weight (and 1 more)" in problem.message


def test_more_layers_in_config_than_in_the_file(tmp_path):
    (problem,) = problems(write_folder(tmp_path, LLAMA | {"num_hidden_layers": 4}, parameter_shapes(LLAMA)))
    assert problem.kind == "model-incomplete"
    assert "model.layers.3." in problem.message


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize(
    ("said", "file", "words"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, None, "(bitsandbytes)"),
        ({"quantization_config": {"bits": 4}}, None, "are quantized, and"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, None, "(compressed-tensors)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, None, "(fp8)"),
        ({}, "quantize_config.json", "(quantize_config.json)"),
        ({}, "quant_config.json", "(quant_config.json)"),
    ],
)
def test_quantized_weights_are_refused(tmp_path, family, said, file, words):
    path = write_folder(tmp_path, LLAMA | {"model_type": family} | said, parameter_shapes(LLAMA))
    if file:
        (tmp_path / file).write_text("{}")
    (problem,) = problems(path)
    assert problem.kind == "quantized-model" and words in problem.message


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "I32"])
def test_quantized_weights_without_a_word_in_the_config(tmp_path, family, dtype):
    (problem,) = problems(write_folder(tmp_path, LLAMA | {"model_type": family}, parameter_shapes(LLAMA), dtype))
    assert problem.kind == "quantized-model" and f"weight is {dtype})" in problem.message


def test_a_mask_among_the_weights_is_not_quantized(tmp_path):
    """Old copies of GPT-2 and GPT-NeoX store their causal masks as bytes."""
    shapes = {"h.0.attn.bias": (1, 1, 8, 8), "h.0.attn.masked_bias": ()}
    assert read_facts(write_folder(tmp_path, {"model_type": "mamba"}, shapes, "U8")).parameters == 65


UNKNOWN = {
    "tok.embed_tokens.weight": (64, 16), "net.blocks.0.mix.in_proj.weight": (32, 16), "net.blocks.0.mix.in_proj.bias": (32,),
    "net.blocks.0.norm.weight": (16,), "net.blocks.1.mix.in_proj.weight": (32, 16), "net.blocks.1.mix.in_proj.bias": (32,),
    "lm_head.weight": (64, 16),
}  # fmt: skip


def test_unknown_family_from_its_weights(tmp_path):
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 16}
    facts = read_facts(write_folder(tmp_path, config, UNKNOWN, "F32"))
    assert facts.parameters == facts.active_parameters == sum(map(math.prod, UNKNOWN.values()))
    assert (facts.model_type, facts.architecture, facts.decoder_layer) == ("mamba", "MambaForCausalLM", None)
    assert (facts.layers, facts.layer_parameters, facts.hidden, facts.vocab) == (2, 32 * 16 + 32 + 16, 16, 64)
    assert (facts.embedding_parameters, facts.head_parameters, facts.tied) == (64 * 16, 64 * 16, False)
    assert facts.linears == (Linear("in_proj", 16, 32, 2, True),)
    assert (facts.dtype, facts.layout) == ("float32", None)


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": 3, "num_experts": "x", "hidden_size": None, "architectures": "A", "num_attention_heads": 0},
        {"text_config": {"hidden_size": 16}, "architectures": []},
        {"num_experts": -3, "num_attention_heads": -1, "architectures": []},
    ],
)
def test_unknown_family_with_a_strange_config(tmp_path, config):
    config = {"model_type": "mamba"} | config
    assert read_facts(write_folder(tmp_path, config, UNKNOWN)).parameters == sum(map(math.prod, UNKNOWN.values()))


def test_nothing_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert read_facts(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("", "model-damaged"),
        ("[]", "model-damaged"),
        ("{", "model-damaged"),
        ("[" * 200_000, "model-damaged"),
        ("version https://git-lfs.github.com/spec/v1", "model-damaged"),
        ('{"model_type": "llama", "hidden_size": "x"}', "model-config"),
    ],
)
def test_broken_config(tmp_path, content, kind):
    (tmp_path / "config.json").write_text(content)
    (problem,) = problems(tmp_path)
    assert problem.kind == kind
    assert "config.json" in problem.message


def test_folder_of_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (problem,) = problems(tmp_path)
    assert problem.kind == "model-not-found"
    assert "adapter" in problem.help


def test_an_adapter_in_the_folder_of_a_model(tmp_path):
    write_folder(tmp_path, LLAMA, parameter_shapes(LLAMA))
    (tmp_path / "adapter_config.json").write_text("{}")
    (problem,) = problems(tmp_path)
    assert problem.kind == "model-not-found"
    assert "beside a config.json" in problem.message and "dsft export" in problem.help


def test_no_folder(tmp_path):
    (tmp_path / "tiny").mkdir()
    for wrong in ("tinny", "tinny\0", "x" * 5000):
        with pytest.raises(DsftError, match="there is no folder") as error:
            read_facts(str(tmp_path / wrong), where=WHERE)
        assert error.value.problems[0].kind == "model-not-found"


def test_a_file_that_is_not_gguf(tmp_path):
    write_folder(tmp_path, LLAMA)
    (problem,) = problems(tmp_path / "model.safetensors")
    assert problem.kind == "model-not-found"
    assert str(tmp_path) in problem.help


def hub(cache: Path, *, ref: str | None = "main", commit: str = "a" * 40) -> Path:
    repository = cache / "models--org--tiny"
    if ref:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return repository / "snapshots" / commit


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_hub_cache(tmp_path, monkeypatch, variable, below):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert read_facts("org/tiny") is None
    snapshot = hub(tmp_path / below)
    write_folder(snapshot, LLAMA)
    assert read_facts("org/tiny").hidden == 16
    assert cached_snapshot("org/tiny", "v2") is None
    assert cached_snapshot("org/tiny", "a" * 40) == snapshot
    assert cached_snapshot("org/other") is None


def test_revision_in_the_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    write_folder(hub(tmp_path), LLAMA)
    write_folder(hub(tmp_path, ref="pr/1", commit="b" * 40), LLAMA | {"vocab_size": 70})
    assert read_facts("org/tiny", revision="pr/1").vocab == 70
    assert read_facts("org/tiny").vocab == 64


def test_shards_still_to_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = hub(tmp_path)
    write_folder(snapshot, LLAMA)
    (snapshot / "model.safetensors").rename(snapshot / "one.safetensors")
    weight_map = {name: "one.safetensors" for name in parameter_shapes(LLAMA)} | {"lm_head.weight": "two.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert read_facts("org/tiny").stored_bytes is None
    (problem,) = problems(snapshot)  # a folder that a user names has to be whole
    assert problem.kind == "model-incomplete"


WHOLE = '{"model": {}}'


@pytest.mark.parametrize(
    ("files", "there"),
    [
        ({}, None),
        ({"tokenizer.json": WHOLE}, False),
        ({"tokenizer_config.json": {}}, False),
        ({"tokenizer_config.json": {"chat_template": None}}, False),
        ({"tokenizer_config.json": {"chat_template": "{{ x }}"}}, True),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "x"}]}}, True),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "x"}]}}, False),
        ({"tokenizer_config.json": {"chat_template": [3]}}, False),
        ({"chat_template.jinja": "{{ messages }}"}, True),
        ({"tokenizer.json": WHOLE, "additional_chat_templates/rag.jinja": "x"}, False),
        ({"tokenizer.json": WHOLE, "additional_chat_templates/default.jinja": "messages"}, True),
    ],
)
def test_chat_template(tmp_path, files, there):
    path = write_folder(tmp_path, LLAMA)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert read_facts(path).chat_template is there


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", WHOLE[:-2]),
        ("chat_template.jinja", ""),
        ("chat_template.jinja", "hello"),
        ("chat_template.jinja", "messages \N{LATIN SMALL LETTER E WITH ACUTE}"),
    ],
)
def test_broken_files_of_the_tokenizer(tmp_path, name, content):
    path = write_folder(tmp_path, LLAMA)
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    (problem,) = problems(path)
    assert problem.kind == "model-damaged" and name in problem.message


def test_a_broken_tokenizer_config_beside_a_template_of_its_own(tmp_path):
    path = write_folder(tmp_path, LLAMA)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer_config.json").write_text("{,}")
    (problem,) = problems(path)
    assert "tokenizer_config.json" in problem.message


def test_broken_tokenizer_config(tmp_path):
    path = write_folder(tmp_path, LLAMA)
    (tmp_path / "tokenizer_config.json").write_text("{,}")
    (problem,) = problems(path)
    assert "tokenizer_config.json" in problem.message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, architecture: str, numbers: dict[str, int], tensors: dict, template: bool) -> str:
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    pairs += [text(f"{architecture}.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    pairs += [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1) + text("a")]
    pairs += [text("tokenizer.chat_template") + struct.pack("<I", 8) + text("x")] if template else []
    infos, offset = [], 0
    for name, shape in tensors.items():
        infos.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], 1, offset))
        offset += 2 * math.prod(shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + infos)
    path.write_bytes(head + bytes(-len(head) % 32 + offset))
    return str(path)


NUMBERS = {
    "embedding_length": 16, "block_count": 3, "feed_forward_length": 24, "attention.head_count": 4,
    "attention.head_count_kv": 2, "context_length": 128,
}  # fmt: skip


def test_gguf(tmp_path):
    tensors = {"token_embd.weight": (64, 16), "output.weight": (64, 16)}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", NUMBERS, tensors, template=True)
    facts = read_facts(path)
    same = read_facts(write_folder(tmp_path / "same", LLAMA))
    files = {"dtype": "float16", "stored_bytes": os.path.getsize(path), "chat_template": True}
    assert facts == dataclasses.replace(same, **files)
    assert read_facts(str(tmp_path)) == facts  # the folder's only GGUF file


@pytest.mark.parametrize("path", ["model.gguf", "folder"])
def test_a_job_of_a_gguf_file_can_be_planned_only(workshop, path):
    (workshop.folder / "folder").mkdir()
    tensors = {"token_embd.weight": (64, 16), "output.weight": (64, 16)}
    write_gguf(workshop.folder / "model.gguf", "llama", NUMBERS, tensors, template=True)
    shutil.copy(workshop.folder / "model.gguf", workshop.folder / "folder")
    (warning,) = workshop.warnings(model={"path": f"./{path}"})
    assert (warning.kind, warning.severity) == ("model-partial", "warning")
    assert f"/{path} is in GGUF, which is for inference: the job can be planned, and not run" in warning.message
    assert workshop.plan(model={"path": f"./{path}"}).estimate.memory["weights"] > 0


def test_gguf_of_a_mixture_tied_and_without_template(tmp_path):
    numbers = NUMBERS | {"expert_count": 3, "expert_used_count": 2}
    tensors = {"token_embd.weight": (64, 16)}
    facts = read_facts(write_gguf(tmp_path / "tiny.gguf", "llama", numbers, tensors, template=False))
    assert (facts.model_type, facts.experts, facts.experts_per_token) == ("mixtral", 3, 2)
    assert (facts.tied, facts.chat_template) == (True, False)


def test_gguf_of_an_unknown_family(tmp_path):
    tensors = {"token_embd.weight": (64, 16), "blk.0.mix.weight": (32, 16), "output.weight": (64, 16)}
    facts = read_facts(write_gguf(tmp_path / "tiny.gguf", "rwkv9", NUMBERS, tensors, template=False))
    assert facts.parameters == sum(map(math.prod, tensors.values()))
    assert (facts.model_type, facts.hidden, facts.layers, facts.vocab) == ("rwkv9", 16, 1, 64)
    assert facts.linears == ()


def test_several_gguf_files(tmp_path):
    for name in ("q4.gguf", "q8.gguf"):
        write_gguf(tmp_path / name, "llama", NUMBERS, {}, template=False)
    (problem,) = problems(tmp_path)
    assert "2 .gguf files" in problem.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "gpt_neox", "phi", "qwen3", "gemma2", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_what_transformers_saves(tmp_path, model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2} if model_type == "gpt2" else {**MIXTURE, "pad_token_id": None}
    config = AutoConfig.for_model(**{**sizes, "model_type": model_type})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    facts = read_facts(str(tmp_path))
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.architecture == type(model).__name__
    assert facts.dtype == "float32"


@pytest.mark.slow
def test_a_real_gguf_file_as_transformers_reads_it(tmp_path):
    """transformers' own reader on a file of the gguf package's writer: same family and sizes."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_embedding_length(16)
    writer.add_block_count(3)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_vocab_size(64)
    writer.add_token_list(["a", "b"])
    writer.add_chat_template("x")
    writer.add_tensor("token_embd.weight", numpy.zeros((64, 16), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = load_gguf_checkpoint(path)["config"]
    facts = read_facts(str(path))
    assert (facts.model_type, facts.tied) == (theirs["model_type"], theirs["tie_word_embeddings"]) == ("qwen2", True)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    found = facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.vocab
    assert found == tuple(theirs[name] for name in names)
    assert (facts.dtype, facts.chat_template, facts.ffn, facts.max_positions) == ("float32", True, 24, 128)


@pytest.mark.parametrize(
    "content",
    [json.dumps(LLAMA).encode("utf-8-sig"), json.dumps(LLAMA).encode("utf-16"), b'{"rms_norm_eps": NaN}'],
    ids=["byte-order-mark", "utf-16", "nan"],
)
def test_a_config_that_transformers_cannot_read(tmp_path, content):
    path = write_folder(tmp_path, LLAMA)
    (tmp_path / "config.json").write_bytes(content)
    (problem,) = problems(path)
    assert problem.kind == "model-damaged" and "config.json" in problem.message
