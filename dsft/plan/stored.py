"""Stored tensors against the model that config.json describes, and what they tell of a model no family describes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsft.errors import DsftError, Problem, Where
from dsft.plan.families import Layout, Shape
from dsft.plan.headers import Tensor

_MIXTRAL = {"w1.weight": "gate_proj.weight", "w3.weight": "up_proj.weight", "w2.weight": "down_proj.weight"}
_NUMBERED = re.compile(r"(.*?)\.(\d{1,9})\.(.+)")


def check_stored(layout: Layout, tensors: dict[str, Tensor], path: Path, *, where: Where | None = None) -> None:
    """Compares what is stored with what `layout` asks for, as transformers would load it.

    A name may lack the base model's prefix, experts may be stored one by one, and what is stored beyond the model's
    parameters (buffers, a tied head) does not matter. Raises DsftError: model-mismatch for another shape or more
    layers than config.json says, model-incomplete for tensors that are missing.
    """
    stored = _module_names(layout, tensors)
    missing, differing = [], []
    for name, shape in _wanted(layout, stored):
        if name not in stored:
            missing.append(name)
        elif stored[name] != shape:
            differing.append((name, stored[name], shape))
    problems = []
    layers = _count_layers(stored, layout.layers_path)
    if differing:
        name, found, shape = differing[0]
        problems.append(
            Problem(
                "model-mismatch",
                f"the weights in {path} are not those of its config.json: {name} is {_text(found)} in the file and "
                f"{_text(shape)} by config.json" + _others(len(differing)),
                where,
                "config.json and weights are of different models, or one of them was edited: take both from one copy",
            )
        )
    elif layers > len(layout.layers):
        problems.append(
            Problem(
                "model-mismatch",
                f"the weights in {path} have {layers} layers, its config.json says {len(layout.layers)}",
                where,
                "config.json and weights are of different models, or one of them was edited: take both from one copy",
            )
        )
    if missing:
        problems.append(
            Problem(
                "model-incomplete",
                f"{path} lacks a weight that its config.json asks for: {missing[0]}" + _others(len(missing)),
                where,
                "take a whole copy of the model",
            )
        )
    if problems:
        raise DsftError(problems)


def _module_names(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Shape]:
    """Shapes by the names of the modules: prefix put in front, first names of GPT-NeoX and Mixtral replaced."""
    prefix = layout.layers_path.partition(".")[0] + "."
    head = layout.head.path + "."
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("embed_out."):
            name = head + name.removeprefix("embed_out.")
        if not name.startswith((prefix, head)):
            name = prefix + name
        if ".block_sparse_moe." in name:
            name = name.replace(".block_sparse_moe.", ".mlp.")
            front, old = name[:-9], name[-9:]
            name = front + _MIXTRAL.get(old, old)
        found[name] = tensor.shape
    if layout.tied and f"{head}weight" in found:  # of the two names of one weight, either may be stored
        found.setdefault(f"{layout.outside[0].path}.weight", found[f"{head}weight"])
    return found


def _wanted(layout: Layout, stored: dict[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of all that has to be stored. Experts count as stored one by one unless they are stored fused."""
    tied = f"{layout.head.path}.weight" if layout.tied else None
    for path, module in layout.modules():
        fused = module.kind != "experts" or f"{path}.down_proj" in stored
        if fused:
            for name, shape in module.parameters.items():
                if f"{path}.{name}" != tied:
                    yield f"{path}.{name}", shape
            continue
        experts, hidden, width = module.parameters["down_proj"]
        for number in range(experts):
            yield f"{path}.{number}.gate_proj.weight", (width, hidden)
            yield f"{path}.{number}.up_proj.weight", (width, hidden)
            yield f"{path}.{number}.down_proj.weight", (hidden, width)


def _count_layers(names: Iterable[str], layers_path: str) -> int:
    start = len(layers_path) + 1
    numbers = {name[start:].partition(".")[0] for name in names if name.startswith(layers_path + ".")}
    return 1 + max((int(number) for number in numbers if number.isdecimal() and len(number) < 10), default=-1)


def layer_sizes(tensors: dict[str, Tensor]) -> list[int]:
    """Elements of each decoder layer of an unknown model: of all numbered lists, the one that holds most."""
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, tensor in tensors.items():
        if match := _NUMBERED.fullmatch(name):
            lists[match[1]][int(match[2])] += math.prod(tensor.shape)
    if not lists:
        return []
    largest = max(lists.values(), key=lambda layers: sum(layers.values()))
    return [largest[number] for number in sorted(largest)]


def linear_shapes(tensors: dict[str, Tensor]) -> list[tuple[str, int, int, bool]]:
    """(last name, inputs, outputs, bias) of what looks like a linear layer inside the layers of an unknown model."""
    found = []
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if last == "weight" and len(tensor.shape) == 2 and _NUMBERED.fullmatch(name):
            outputs, inputs = tensor.shape
            found.append((path.rpartition(".")[2], inputs, outputs, f"{path}.bias" in tensors))
    return found


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _others(count: int) -> str:
    return f" (and {count - 1:,} more)" if count > 1 else ""
