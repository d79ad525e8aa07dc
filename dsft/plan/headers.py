"""The headers of weight files: every tensor's name, type and shape, without reading a weight.

Two formats. safetensors: 8 bytes little-endian length, that many bytes of JSON, then the data
(https://github.com/huggingface/safetensors#format). GGUF: magic, version, counts, typed key-value pairs, tensor
infos (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsft.errors import DsftError, Where, refused

MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more too
MAX_ITEMS = 1 << 24  # tensors, pairs or dimensions; a count above is a damaged file

# Bits of one element, by the type's name in a safetensors header.
SAFETENSORS_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip

# GGUF's tensor types: number -> name, elements in a block, bytes of a block (ggml.h and ggml-common.h).
GGUF_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

# GGUF's value types: number -> struct format. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
    """One stored tensor. `shape` as PyTorch counts it, the slowest dimension first."""

    dtype: str  # the format's own name: "BF16", "Q4_1"
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by stored name, and the size of its weight files in bytes."""

    tensors: dict[str, Tensor]
    bytes: int


@dataclass(frozen=True)
class Gguf:
    """A GGUF file: its key-value pairs, long arrays as their length alone, and its tensors."""

    metadata: dict[str, Any]
    weights: Weights


def read_weights(folder: Path, *, where: Where | None = None) -> Weights | None:
    """The tensors of a model folder: model.safetensors, or the shards that model.safetensors.index.json names.

    None where the folder has neither. Other safetensors files are not looked at: transformers does not load them.
    Raises DsftError: model-damaged, or model-incomplete for a missing index, a missing shard, or one that lacks a
    tensor of the index.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.isfile(single):
        return Weights(read_safetensors(single, where=where), single.stat().st_size)
    if not os.path.isfile(index):
        shards = sorted(folder.glob("model-*-of-*.safetensors"))
        if shards:
            raise refused(
                "model-incomplete",
                f"{folder} has {shards[0].name} but no {index.name}, by which shards are loaded",
                where=where,
                help="copy or download the file that is missing",
            )
        return None
    weight_map = read_index(index, where=where)
    tensors: dict[str, Tensor] = {}
    size = 0
    held: dict[str, dict[str, Tensor]] = {}
    for name in sorted(set(weight_map.values())):
        shard = folder / name
        if not os.path.isfile(shard):
            raise refused(
                "model-incomplete",
                f"{folder} lacks {name}, which {index.name} names",
                where=where,
                help="copy or download the file that is missing",
            )
        held[name] = read_safetensors(shard, where=where)
        tensors |= held[name]
        size += shard.stat().st_size
    for name, shard_name in weight_map.items():
        if name not in held[shard_name]:
            raise refused(
                "model-incomplete",
                f"{folder / shard_name} has no tensor {name}, which {index.name} says it has",
                where=where,
                help="index and shards are of different copies: take both from one",
            )
    return Weights(tensors, size)


def read_index(path: Path, *, where: Where | None = None) -> dict[str, str]:
    """Tensor name to file name, from a model.safetensors.index.json. Raises DsftError."""
    try:
        index = json.loads(path.read_bytes())
        weight_map = index["weight_map"]
        if not isinstance(index.get("metadata"), dict):
            raise TypeError("it has no metadata, which transformers reads")
        names = set(weight_map.values())
        if not names or not all(isinstance(name, str) and name == os.path.basename(name) != "" for name in names):
            raise ValueError("its weight_map does not name files")
    except OSError as error:
        raise _unreadable(path, error, where) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"is no index of weights: {_reason(error)}", where) from None
    return weight_map


def read_safetensors(path: Path, *, where: Where | None = None) -> dict[str, Tensor]:
    """The header of one safetensors file, checked against the size of the file. Raises DsftError (model-damaged)."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if start == b"version ":
                raise _pointer(path, where)
            if len(start) < 8:
                raise _damaged(path, f"has {size} bytes: no safetensors file", where)
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER:
                raise _damaged(path, f"is no safetensors file: it claims a header of {length:,} bytes", where)
            if 8 + length > size:
                raise _damaged(path, f"ends inside its header: {size:,} of {8 + length:,} bytes", where)
            header = json.loads(file.read(length))
    except OSError as error:
        raise _unreadable(path, error, where) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has a broken header: {_reason(error)}", where) from None
    if not isinstance(header, dict):
        raise _damaged(path, "has a broken header: no JSON object", where)
    header.pop("__metadata__", None)
    tensors = {}
    spans = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            bits = SAFETENSORS_BITS.get(dtype)
            numbers = (*shape, begin, end)
            whole = isinstance(dtype, str) and set(map(type, numbers)) == {int} and min(numbers) >= 0
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole or (bits is not None and math.prod(shape) * bits != 8 * (end - begin)):
            raise _damaged(path, f"has a broken header: the entry of tensor {name}", where)
        tensors[name] = Tensor(dtype, shape, end - begin)
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise _damaged(path, f"has a broken header: gap or overlap of tensors at byte {position:,}", where)
        position = end
    if 8 + length + position != size:
        what = "is cut off" if size < 8 + length + position else "is longer than its tensors"
        raise _damaged(path, f"{what}: {size:,} of {8 + length + position:,} bytes", where)
    return tensors


def read_gguf(path: Path, *, where: Where | None = None) -> Gguf:
    """Key-value pairs and tensors of one GGUF file of version 2 or 3. Raises DsftError (model-damaged)."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:8] == b"version ":
                raise _pointer(path, where)
            if data[:4] != b"GGUF":
                raise _damaged(path, "is no GGUF file", where)
            return _parse_gguf(data)
    except OSError as error:
        raise _unreadable(path, error, where) from None
    except (ValueError, struct.error, IndexError, OverflowError, RecursionError) as error:
        reason = "it ends too early" if isinstance(error, (struct.error, IndexError)) else _reason(error)
        raise _damaged(path, f"is a broken GGUF file: {reason}", where) from None


class _Reader:
    """A position in the bytes of a GGUF file, moved by every read."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def number(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self.data, self.at)
        self.at += struct.calcsize("<" + format)
        return value

    def count(self) -> int:
        count = self.number("Q")
        if count > MAX_ITEMS:
            raise ValueError(f"it claims {count:,} items")
        return count

    def skip(self, length: int) -> None:
        self.at += length
        if self.at > len(self.data):
            raise IndexError

    def string(self) -> str:
        length = self.number("Q")
        begin = self.at
        self.skip(length)
        return self.data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"unknown value type {kind}")
            return self.number(_SCALARS[kind])
        inner, count = self.number("I"), self.count()
        if inner in _SCALARS:
            if count <= 1024:
                return [self.number(_SCALARS[inner]) for _ in range(count)]
            self.skip(count * struct.calcsize("<" + _SCALARS[inner]))
            return count
        if inner == _STRING:  # a vocabulary: a hundred thousand strings, whose number is all that counts
            data, at = self.data, self.at
            for _ in range(count):
                at += 8 + int.from_bytes(data[at : at + 8], "little")
                if at > len(data):
                    raise IndexError
            self.at = at
            return count
        if inner != _ARRAY:
            raise ValueError(f"unknown value type {inner}")
        return [self.value(inner) for _ in range(count)]


def _parse_gguf(data: mmap.mmap) -> Gguf:
    reader = _Reader(data, 4)
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not 2 or 3")
    tensor_count, pair_count = reader.count(), reader.count()
    metadata = {}
    for _ in range(pair_count):
        key = reader.string()
        metadata[key] = reader.value(reader.number("I"))
    tensors, ends = {}, [0]
    for _ in range(tensor_count):
        name = reader.string()
        dimensions = reader.number("I")
        if dimensions > 8:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = reader.number("I"), reader.number("Q")
        if kind not in GGUF_TYPES:
            raise ValueError(f"tensor {name} is of the unknown type {kind}")
        dtype, block, block_bytes = GGUF_TYPES[kind]
        size = math.prod(shape) // block * block_bytes
        tensors[name] = Tensor(dtype, shape, size)
        ends.append(offset + size)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0:
        raise ValueError(f"an alignment of {alignment}")
    need = -(-reader.at // alignment) * alignment + max(ends)
    if tensors and need > len(data):
        raise ValueError(f"it is cut off: {len(data):,} of {need:,} bytes")
    return Gguf(metadata, Weights(tensors, len(data)))


def _damaged(path: Path, what: str, where: Where | None) -> DsftError:
    return refused("model-damaged", f"{path} {what}", where=where, help="copy or download the file again")


def _pointer(path: Path, where: Where | None) -> DsftError:
    return refused(
        "model-incomplete",
        f"{path} is a git-lfs pointer, not the weights",
        where=where,
        help="run `git lfs pull` in the model's folder",
    )


def _unreadable(path: Path, error: OSError, where: Where | None) -> DsftError:
    return refused("unreadable-file", f"cannot read {path}: {error.strerror or error}", where=where)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error)
