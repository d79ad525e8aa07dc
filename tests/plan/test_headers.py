"""Headers of weight files: what is read from good ones, and what is said of damaged ones."""

from __future__ import annotations

import json
import math
import struct

import pytest

from dsft.errors import DsftError, Where
from dsft.plan.headers import Tensor, read_gguf, read_safetensors, read_weights

WHERE = Where("recipe.json", 3, 12)
TENSORS = {"a.weight": ("F32", (2, 3)), "b.weight": ("BF16", (4,)), "empty": ("F32", (0, 5)), "number": ("F64", ())}
SIZES = {"F32": 4, "BF16": 2, "F64": 8}


def safetensors(tensors=TENSORS, *, header: object = None, extra: bytes = b"") -> bytes:
    """A safetensors file of zeros; `header` in place of the one that fits the tensors."""
    entries, position = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        end = position + SIZES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = header if isinstance(header, bytes) else json.dumps(entries if header is None else header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(position) + extra


def entry(**changes) -> dict:
    """A header whose one tensor fits 24 bytes of data, but for `changes`."""
    return {"a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


def refusal(read, path):
    with pytest.raises(DsftError) as error:
        read(path, where=WHERE)
    (problem,) = error.value.problems
    assert problem.where == WHERE
    assert problem.help
    return problem


def test_reads_names_types_and_shapes(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors())
    assert read_safetensors(path) == {
        "a.weight": Tensor("F32", (2, 3), 24),
        "b.weight": Tensor("BF16", (4,), 8),
        "empty": Tensor("F32", (0, 5), 0),
        "number": Tensor("F64", (), 8),
    }


def test_reads_what_the_library_writes(tmp_path):
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"x": numpy.zeros((3, 4), "float16"), "y": numpy.zeros(5, "int64")}, path, {"format": "pt"})
    assert read_safetensors(path) == {"x": Tensor("F16", (3, 4), 24), "y": Tensor("I64", (5,), 40)}


def test_a_type_of_tomorrow_is_not_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"a.weight": ("F32", (2, 3))}, header=entry(dtype="F3")))
    assert read_safetensors(path)["a.weight"].dtype == "F3"


ONE = {"a.weight": ("F32", (2, 3))}
DAMAGED = {
    "empty": (b"", "0 bytes"),
    "short": (b"\x10\0\0", "3 bytes"),
    "text": (b"<html><body>404</body></html>", "claims a header"),
    "huge-header": ((1 << 62).to_bytes(8, "little") + b"{}", "claims a header"),
    "header-past-the-end": ((1000).to_bytes(8, "little") + b"{}", "ends inside its header"),
    "not-json": (safetensors(ONE, header=b'{"a.weight": '), "broken header"),
    "not-utf8": (safetensors(ONE, header=b'{"\xff": 1}'), "broken header"),
    "deep": (safetensors(ONE, header=b"[" * 200_000), "nested too deeply"),
    "list": (safetensors(ONE, header=[1]), "no JSON object"),
    "no-shape": (safetensors(ONE, header={"a.weight": {"dtype": "F32", "data_offsets": [0, 24]}}), "a.weight"),
    "entry-is-a-number": (safetensors(ONE, header={"a.weight": 3}), "a.weight"),
    "three-offsets": (safetensors(ONE, header=entry(data_offsets=[0, 1, 24])), "a.weight"),
    "offsets-turned": (safetensors(ONE, header=entry(data_offsets=[24, 0])), "a.weight"),
    "negative": (safetensors(ONE, header=entry(shape=[-2, -3])), "a.weight"),
    "float-shape": (safetensors(ONE, header=entry(shape=[2.0, 3])), "a.weight"),
    "text-shape": (safetensors(ONE, header=entry(shape="23")), "a.weight"),
    "type-is-a-list": (safetensors(ONE, header=entry(dtype=["F32"])), "a.weight"),
    "shape-not-size": (safetensors(ONE, header=entry(shape=[2, 4])), "a.weight"),
    "gap": (safetensors(ONE, header=entry(data_offsets=[8, 32])), "gap or overlap"),
    "longer": (safetensors(extra=b"x"), "longer than its tensors"),
    "cut-off": (safetensors()[:-1], "cut off"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    problem = refusal(read_safetensors, path)
    assert problem.kind == "model-damaged"
    assert str(path) in problem.message
    assert words in problem.message


def test_every_cut_is_noticed(tmp_path):
    path, whole = tmp_path / "model.safetensors", safetensors()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refusal(read_safetensors, path).kind == "model-damaged"


def test_pointer_of_git_lfs(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 538090408\n")
    for read in (read_safetensors, read_gguf):
        problem = refusal(read, path)
        assert problem.kind == "model-incomplete"
        assert "git lfs pull" in problem.help


def test_missing_file(tmp_path):
    for read in (read_safetensors, read_gguf):
        with pytest.raises(DsftError, match="unreadable-file"):
            read(tmp_path / "no.safetensors")


def sharded(folder, shards: dict[str, dict], weight_map: object = None):
    for name, tensors in shards.items():
        (folder / name).write_bytes(safetensors(tensors))
    weight_map = weight_map or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SHARDS = {"one.safetensors": {"a": ("F32", (2,))}, "two.safetensors": {"b": ("BF16", (3,)), "c": ("F32", (1,))}}


def test_shards(tmp_path):
    assert read_weights(tmp_path) is None
    sharded(tmp_path, SHARDS)
    weights = read_weights(tmp_path)
    assert weights.tensors == {"a": Tensor("F32", (2,), 8), "b": Tensor("BF16", (3,), 6), "c": Tensor("F32", (1,), 4)}
    assert weights.bytes == sum((tmp_path / name).stat().st_size for name in SHARDS)


def test_one_file_goes_before_an_index_and_others_are_not_looked_at(tmp_path):
    sharded(tmp_path, SHARDS)
    (tmp_path / "consolidated.safetensors").write_bytes(b"broken")
    (tmp_path / "model.safetensors").write_bytes(safetensors(ONE))
    assert set(read_weights(tmp_path).tensors) == {"a.weight"}


def test_missing_shard(tmp_path):
    sharded(tmp_path, SHARDS)
    (tmp_path / "two.safetensors").unlink()
    problem = refusal(read_weights, tmp_path)
    assert problem.kind == "model-incomplete"
    assert "two.safetensors" in problem.message


def test_shards_without_an_index(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(safetensors(ONE))
    problem = refusal(read_weights, tmp_path)
    assert problem.kind == "model-incomplete"
    assert "model.safetensors.index.json" in problem.message


def test_index_names_a_tensor_that_its_shard_has_not(tmp_path):
    sharded(tmp_path, SHARDS, {"a": "two.safetensors", "b": "two.safetensors"})
    problem = refusal(read_weights, tmp_path)
    assert problem.kind == "model-incomplete"
    assert "no tensor a" in problem.message


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": [], "metadata": {}}',
        '{"weight_map": {}, "metadata": {}}',
        '{"weight_map": {"a": 3}, "metadata": {}}',
        '{"weight_map": {"a": "one"}}',
    ]
    + [
        '{"weight_map": {"a": ["one"]}, "metadata": {}}',
        '{"weight_map": {"a": "../one"}, "metadata": {}}',
        '{"weight_map": {"a": ""}, "metadata": {}}',
        "[" * 200_000,
    ],
)
def test_broken_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    problem = refusal(read_weights, tmp_path)
    assert problem.kind == "model-damaged"
    assert "model.safetensors.index.json" in problem.message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(*, version: int = 3, pairs: bytes | None = None, pair_count: int = 5, kind: int = 3, data: int = 40) -> bytes:
    """A GGUF file of one tensor "w" of 2 rows of 32, by default Q4_1 (a block of 32 in 20 bytes)."""
    if pairs is None:
        pairs = b"".join(
            text(key) + struct.pack("<I", kind) + value
            for key, kind, value in [
                ("general.architecture", 8, text("llama")),
                ("llama.block_count", 4, struct.pack("<I", 2)),
                ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("é") + text("")),
                ("list", 9, struct.pack("<IQ2i", 5, 2, -1, 7)),
                ("long", 9, struct.pack("<IQ", 0, 2000) + bytes(2000)),
            ]
        )
    head = b"GGUF" + struct.pack("<IQQ", version, 1, pair_count) + pairs
    head += text("w") + struct.pack("<IQQIQ", 2, 32, 2, kind, 0)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_reads_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf())
    found = read_gguf(path)
    assert found.metadata == {
        "general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": 3, "list": [-1, 7],
        "long": 2000,
    }  # fmt: skip
    assert found.weights.tensors == {"w": Tensor("Q4_1", (2, 32), 40)}
    assert found.weights.bytes == path.stat().st_size


DAMAGED_GGUF = {
    "empty": (b"", "empty"),
    "other": (b"GGML" + bytes(40), "no GGUF file"),
    "version-1": (gguf(version=1), "version 1"),
    "other-byte-order": (gguf(version=3 << 24), "version"),
    "many-pairs": (gguf(pair_count=1 << 60), "claims"),
    "value-type": (gguf(pairs=text("k") + struct.pack("<I", 99), pair_count=1), "value type 99"),
    "item-type": (gguf(pairs=text("k") + struct.pack("<IIQ", 9, 99, 1), pair_count=1), "value type 99"),
    "many-items": (gguf(pairs=text("k") + struct.pack("<IIQ", 9, 4, 1 << 50), pair_count=1), "claims"),
    "long-text": (gguf(pairs=struct.pack("<Q", 1 << 63), pair_count=1), "too early"),
    "long-texts": (gguf(pairs=text("k") + struct.pack("<IIQ", 9, 8, 1 << 24), pair_count=1), "too early"),
    "alignment": (gguf(pairs=text("general.alignment") + struct.pack("<II", 4, 0), pair_count=1), "alignment"),
    "tensor-type": (gguf(kind=77), "unknown type 77"),
    "cut-off": (gguf(data=39), "cut off"),
    "nested": (gguf(pairs=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, pair_count=1), "deeply"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED_GGUF.values(), ids=DAMAGED_GGUF)
def test_damaged_gguf(tmp_path, content, words):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    problem = refusal(read_gguf, path)
    assert problem.kind == "model-damaged"
    assert str(path) in problem.message
    assert words in problem.message


def test_every_cut_of_a_gguf_file_is_noticed(tmp_path):
    path, whole = tmp_path / "model.gguf", gguf()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert refusal(read_gguf, path).kind == "model-damaged"
