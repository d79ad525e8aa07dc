"""The Plan: every decision a job needs, frozen. Written as plan.json, and the only thing `dsft.train` reads.

Nothing downstream fills in a default or derives a number again. Paths are absolute; lengths are in tokens, rates in
updates. This module imports nothing but the standard library, so a training process can check itself against the plan
before it loads torch.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    path: str  # an absolute local folder, or a hub id
    revision: str | None
    attn_implementation: str  # "sdpa" | "eager" | "flash_attention_2"
    trust_remote_code: bool
    gradient_checkpointing: bool


@dataclass(frozen=True)
class DataFile:
    """One data file as it was when the plan was made; a training process refuses a file that differs."""

    path: str
    format: str  # "alpaca" | "messages"
    rows: int
    sha256: str


@dataclass(frozen=True)
class Data:
    train: tuple[DataFile, ...]
    eval: DataFile | None
    eval_split_rows: int  # rows drawn from `train` (by the seed) for evaluation; 0 where `eval` is a file or nothing
    train_rows: int  # rows trained on, the split taken off
    eval_rows: int
    max_length: int
    chat_template: str | None  # the template's text, not its file


@dataclass(frozen=True)
class Method:
    type: str  # "lora" | "full"
    r: int | None
    lora_alpha: float | None
    lora_dropout: float | None
    target_modules: str | tuple[str, ...] | None  # "all-linear" or names


@dataclass(frozen=True)
class Strategy:
    engine: str  # "single" | "ddp" | "fsdp" | "deepspeed": a module of that name in compile/engines and train/engines
    zero_stage: int | None  # 1 | 2 | 3, deepspeed only
    offload_optimizer: str | None  # "none" | "cpu", deepspeed only
    offload_param: str | None  # "none" | "cpu", deepspeed only
    reshard_after_forward: bool | None  # fsdp only
    cpu_offload: bool | None  # fsdp only: shards, gradients and optimizer state in the host's memory
    hybrid_shard: bool | None  # fsdp only: sharded inside each machine, replicated between machines
    config: Mapping[str, Any]  # deepspeed only: the recipe's verbatim additions


@dataclass(frozen=True)
class Batch:
    """global_batch_size == per_device * accumulation * world_size, always."""

    world_size: int
    per_device: int
    accumulation: int
    global_batch_size: int


@dataclass(frozen=True)
class Training:
    updates_per_epoch: int  # ceil(train_rows / global_batch_size): the last update of an epoch may be short
    total_updates: int
    learning_rate: float
    lr_scheduler_type: str  # "linear" | "cosine" | "constant"
    warmup_updates: int
    optim: str  # "adamw" | "sgd"
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float | None  # None: no clipping
    precision: str  # "fp32" | "bf16"
    seed: int
    eval_updates: int | None  # evaluate every so many updates; None: before and after only


@dataclass(frozen=True)
class Checkpoint:
    output_dir: str
    save_updates: int | None  # None: no checkpoint before the end
    keep: int
    resume: str  # "auto" | "never"


@dataclass(frozen=True)
class Logging:
    logging_updates: int
    tensorboard: bool


@dataclass(frozen=True)
class Host:
    name: str  # as ssh takes it, without the user
    slots: int
    user: str | None = None
    devices: tuple[int, ...] | None = None  # the GPUs to use, as many as slots; None: all that the machine has


@dataclass(frozen=True)
class Cluster:
    device: str  # "cpu" | "cuda"
    hosts: tuple[Host, ...]
    processes_per_node: int
    timeout_seconds: int  # of every collective: how long a silent rank may hold up the others
    gpu: str | None = None  # a name of dsft.plan.gpus; None where the recipe does not say


@dataclass(frozen=True)
class Estimate:
    """What the planner expects. Training does not look at it."""

    memory: Mapping[str, int]  # bytes by part on the device of one process, at the peak
    moment: str  # when that is: a name in describe.MOMENTS
    device_bytes: int  # their sum
    capacity_bytes: int  # what one process may use
    host_bytes: int  # of each machine's own memory
    disk_bytes: int  # checkpoints and result together
    seconds_per_update: float | None  # None where the speed of the device is not known
    reason: str | None  # why this way, where the recipe leaves several open


@dataclass(frozen=True)
class Plan:
    name: str
    recipe_sha256: str  # of the compiled recipe.json
    versions: Mapping[str, str]  # package (and "python", as "3.11") -> version on the compiling machine
    model: Model
    data: Data
    method: Method
    strategy: Strategy
    batch: Batch
    training: Training
    checkpoint: Checkpoint
    logging: Logging
    cluster: Cluster
    launcher: str  # what `dsft launch` uses: "local" | "torchrun" | "accelerate" | "deepspeed"
    estimate: Estimate | None = None  # None where model or GPU are not known
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)  # compiled file -> sha256, of those train reads


def to_json(plan: Plan) -> str:
    """The plan as text: two-space indent, keys in the order of the record, a newline at the end."""
    return json.dumps(dataclasses.asdict(plan), indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> Plan:
    """The plan from `to_json`'s text. Raises ValueError where the text is not a plan of this version of dsft."""
    try:
        return _build(Plan, json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plan of this version of dsft: {error}") from error


def differences(old: Plan, new: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Every value that differs: its path in plan.json, as in "training.seed", and both values."""
    was, now = (dict(_flat(json.loads(to_json(plan)))) for plan in (old, new))
    for path in {**was, **now}:
        if was.get(path) != now.get(path):
            yield path, was.get(path), now.get(path)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, f"{path}.{name}".lstrip("."))
    else:
        yield path, value


def _build(kind: Any, value: Any) -> Any:
    """`value` as the dataclass, tuple, mapping or plain type that the annotation `kind` asks for, or one of a union."""
    arguments = typing.get_args(kind)
    match typing.get_origin(kind) or kind:
        case types.UnionType:
            fitting = next((option for option in arguments if _fits(option, value)), None)
            if fitting is None:
                raise TypeError(f"{value!r} is no {kind}")
            return _build(fitting, value)
        case _ if not _fits(kind, value):
            raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
        case record if dataclasses.is_dataclass(record):
            hints = typing.get_type_hints(record)
            unknown = value.keys() - hints.keys()
            if unknown:
                raise KeyError(f"unknown field {min(unknown)!r}")
            return record(**{name: _build(hints[name], item) for name, item in value.items()})
        case builtins.tuple:
            return tuple(_build(arguments[0], item) for item in value)
        case collections.abc.Mapping:
            return {name: _build(arguments[1], item) for name, item in value.items()}
    return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether JSON's `value` is of the kind, whatever is inside it."""
    origin = typing.get_origin(kind) or kind
    if origin is Any:
        return True
    if dataclasses.is_dataclass(origin) or origin is collections.abc.Mapping:
        return isinstance(value, dict)
    if origin is tuple:
        return isinstance(value, list)
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin) and isinstance(value, bool) == (origin is bool)
