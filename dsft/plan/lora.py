"""Which modules LoRA adapts and how many parameters that adds, as peft counts them.

peft's rules (tuners/tuners_utils.py, utils/transformers_weight_conversion.py, tuners/lora/layer.py):
a target names the modules whose path is it or ends with it after a dot; "all-linear" names every Linear and Conv1D but
the output head. In Mixtral and Qwen3-MoE the names that experts and router had as linear layers (w1, w2, w3; gate_proj,
up_proj, down_proj; gate) stand for the parameters they became, and "all-linear" includes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dsft.plan.facts import ModelFacts
from dsft.plan.families import Layout, Module

ALL_LINEAR = "all-linear"

# model_type -> first name of an expert's linear layer (or the router) -> the parameter that holds it now.
_CONVERTED = {
    "mixtral": {"gate": "weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen3_moe": {"gate": "weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"},
}


def lora_parameters(facts: ModelFacts, r: int, targets: str | Sequence[str]) -> int:
    """Parameters that LoRA of rank `r` adds on `targets`: "all-linear" or names.

    An adapter on a layer has r x (inputs + outputs) parameters. Of a family without formulas only the linear layers
    that its weight files show are counted.
    """
    if facts.layout is None:
        names = adapted_names(facts, targets)
        return sum(r * (one.inputs + one.outputs) * one.count for one in facts.linears if one.name in names)
    converted = _CONVERTED.get(facts.model_type, {})
    plain, chosen = _split(facts, targets)
    total = 0
    for path, module, count in _modules(facts.layout, plain or ()):
        if module.kind == "router" and "gate" in chosen:
            experts, hidden = module.parameters["weight"]
            total += count * r * (experts + hidden)
        elif module.kind == "experts":
            for name, (experts, outputs, inputs) in module.parameters.items():
                # Fused layers get the rank of each of them.
                rank = r * sum(converted[one] == name for one in chosen)
                total += count * experts * rank * (inputs + outputs)
        elif _adapted(facts.layout, path, module, plain):
            total += count * r * (module.inputs + module.outputs)
    return total


def _adapted(layout: Layout, path: str, module: Module, targets: Sequence[str] | None) -> bool:
    """`targets` None: "all-linear", which for peft is all but the head."""
    return _named(path, module, targets) if targets is not None else _linear(module) and module is not layout.head


def _modules(layout: Layout, targets: Sequence[str]) -> Iterator[tuple[str, Module, int]]:
    """Path, module, and in how many layers it is the same: the planner asks for each of thousands of ways. One by one
    where a target says a layer's number."""
    if any(part.isdecimal() for target in targets for part in target.split(".")):
        yield from ((path, module, 1) for path, module in layout.modules())
        return
    counts = Counter(map(id, layout.layers))
    alike = {id(layer): layer for layer in layout.layers}
    yield from ((module.path, module, 1) for module in (*layout.outside, layout.head))
    for at, layer in alike.items():
        yield from ((f"{layout.layers_path}.N.{module.path}", module, counts[at]) for module in layer)


def adapted_names(facts: ModelFacts, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the linear layers inside the decoder layers that get an adapter, in the order of the model."""
    names = dict.fromkeys(linear.name for linear in facts.linears)
    if targets == ALL_LINEAR:
        return tuple(names)
    if facts.layout is None:
        wanted = {target.rpartition(".")[2] for target in targets}
    else:
        found = (path for path, module in facts.layout.modules() if _named(path, module, targets))
        wanted = {path.rpartition(".")[2] for path in found}
    return tuple(name for name in names if name in wanted)


def adapts_experts(facts: ModelFacts, targets: str | Sequence[str]) -> bool:
    """Whether experts that are kept as one parameter get adapters: peft then works on whole copies of them."""
    if facts.layout is None:
        return False
    converted = _CONVERTED.get(facts.model_type, {})
    return any(converted[name] != "weight" for name in _split(facts, targets)[1])


def unknown_targets(facts: ModelFacts, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Those of `targets` that name no module LoRA can adapt. Empty for a family without formulas: nothing is known."""
    if facts.layout is None or targets == ALL_LINEAR:
        return ()
    modules = list(facts.layout.modules())
    return tuple(
        target
        for target in targets
        if _conversion(facts, target) is None and not any(_named(path, module, [target]) for path, module in modules)
    )


def missing_partners(facts: ModelFacts, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Names to add to `targets`, since peft adapts an expert's gate and up projection only together."""
    if targets == ALL_LINEAR:
        return ()
    chosen = {name for target in targets if (name := _conversion(facts, target))}
    pair = [name for name, became in _CONVERTED.get(facts.model_type, {}).items() if became == "gate_up_proj"]
    present = [name for name in pair if name in chosen]
    return tuple(name for name in pair if name not in chosen) if present else ()


def target_names(facts: ModelFacts) -> tuple[str, ...]:
    """Names of what "all-linear" adapts, each once, in the order of the model; to suggest one."""
    names = dict.fromkeys(linear.name for linear in facts.linears)
    return tuple(names | dict.fromkeys(_CONVERTED.get(facts.model_type, {})))


def _split(facts: ModelFacts, targets: str | Sequence[str]) -> tuple[list[str] | None, set[str]]:
    """Targets that name modules as they are, None for every linear layer; and the converted names that are meant."""
    converted = _CONVERTED.get(facts.model_type, {})
    if targets == ALL_LINEAR:
        # peft then goes by the last names of what it found, so that a dense layer's gate_proj is taken for an expert's.
        names = {linear.name for linear in facts.linears} - converted.keys()
        return (sorted(names) if converted else None), set(converted)
    means = {target: _conversion(facts, target) for target in targets}
    return [target for target, name in means.items() if name is None], {name for name in means.values() if name}


def _conversion(facts: ModelFacts, target: str) -> str | None:
    """The first name of an expert's layer or router that `target` stands for."""
    name = target.rpartition(".")[2]
    return name if name in _CONVERTED.get(facts.model_type, {}) else None


def _linear(module: Module) -> bool:
    return module.kind in ("linear", "conv1d")


def _named(path: str, module: Module, targets: Sequence[str]) -> bool:
    """Whether a target names the module, and LoRA can adapt a module of its kind."""
    adaptable = _linear(module) or module.kind == "embedding"
    return adaptable and any(path == target or path.endswith(f".{target}") for target in targets)
