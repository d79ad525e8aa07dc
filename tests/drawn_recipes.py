"""Recipes as hypothesis draws them: right ones for every strategy, method and launcher, and ones gone wrong."""

from __future__ import annotations

import copy
import json
import math
import re
import string
from fractions import Fraction

import pytest
from hypothesis import strategies as st
from workshop import Workshop

from dsft.plan.gpus import GPUS
from dsft.recipe import schema

WORDS = sorted(
    {name for _, name, _ in schema._all_fields()} | {"lora", "full", "rows.json", "model", "~", "", "é", "dp", "\u202e"}
)
STRANGE = [2**63, -(2**63) - 1, 10**400, 1e308, -0.0, "\ud800", "\0", "a" * 300, "1e-4"]
NEST = st.just("[" * 70 + "]" * 70).map(json.loads)  # a new one each time: recipes are changed in place
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.sampled_from(STRANGE) | NEST,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(WORDS), v, max_size=3),
)
HOSTS = (
    "n1 slots=2\n",
    "# two\r\nn1 slots=2\r\nalice@n2 slots=2\r\n",
    "n1 slots=1\nn2 slots=1\nn3 slots=1\nn4 slots=1\n",
    "n1 slots=4\nn2 slots=4\nn3 slots=4",
)
ROWS = 1200  # of each file: more than any batch below, a quarter of them taken off


@pytest.fixture
def furnished(workshop) -> Workshop:
    """With the files that the recipes name."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (workshop.folder / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * ROWS))
    (workshop.folder / "chat.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * ROWS))
    (workshop.folder / "unseen.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    (workshop.folder / "template.jinja").write_text("{{ messages }}")
    for number, hosts in enumerate(HOSTS):
        (workshop.folder / f"hosts{number}").write_text(hosts)
    return workshop


def _some(**fields):
    """Any of the optional fields, each with its strategy."""
    return st.fixed_dictionaries({}, optional=fields)


def _with_null(values):
    return st.none() | values


LENGTHS = st.one_of(
    st.fixed_dictionaries({"max_steps": st.integers(1, 10**6)}),
    st.fixed_dictionaries({"num_train_epochs": st.integers(1, 100)}),
    st.fixed_dictionaries({"num_train_epochs": st.integers(1, 100), "max_steps": st.integers(1, 10**6)}),
)
METHODS = st.just({"type": "full"}) | st.fixed_dictionaries(
    {"type": st.just("lora")},
    optional={
        "r": st.integers(1, 32) | st.just(8.0),
        "lora_alpha": st.integers(1, 64) | st.floats(0.5, 64),
        "lora_dropout": st.floats(0, 0.9),
        "target_modules": st.sampled_from(["all-linear", ["q_proj"], ["q_proj", "layers.1.mlp.up_proj"]]),
    },
)
# What is added to deepspeed.json; a key that the stage does not use is warned of.
CONFIG = {
    "memory_breakdown": st.booleans(),
    "dump_state": st.booleans(),
    "disable_python_gc": st.booleans(),
    "comms_logger": _some(enabled=st.booleans(), verbose=st.booleans(), prof_ops=st.just(["all_reduce"])),
    "flops_profiler": _some(enabled=st.booleans(), profile_step=st.integers(1, 9), module_depth=st.integers(-1, 3)),
}
ZERO = {
    "overlap_comm": st.booleans(),
    "reduce_bucket_size": st.integers(1, 10**9),
    "contiguous_gradients": st.booleans(),
}
ZERO_1_2 = ZERO | {"allgather_bucket_size": st.integers(0, 10**9), "allgather_partitions": st.booleans()}
ZERO_3 = ZERO | {
    "stage3_param_persistence_threshold": st.integers(0, 10**6),
    "stage3_max_live_parameters": st.integers(0, 10**9),
    "sub_group_size": st.integers(1, 10**9),
}


@st.composite
def clusters(draw):
    """Machines, processes on each, and the fields that say so."""
    hostfile = draw(st.sampled_from([*range(len(HOSTS)), None, None]))
    if hostfile is None:
        slots = draw(st.integers(1, 8))
        names, said = ["localhost"], {"processes_per_node": slots}
    else:
        names, slots = re.findall(r"\w+(?= slots)", HOSTS[hostfile]), int(HOSTS[hostfile].split("slots=")[1][0])
        said = {"hostfile": f"hosts{hostfile}"}
    selection = draw(st.sampled_from([None, "include", "exclude"]))
    if selection:
        used = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        each = draw(st.integers(1, slots))
        taken = {name: draw(st.permutations(range(slots)))[:each] for name in used}
        left = {name: [slot for slot in range(slots) if slot not in taken.get(name, ())] for name in names}
        named = taken if selection == "include" else {name: numbers for name, numbers in left.items() if numbers}
        whole = [name if len(numbers) == slots and draw(st.booleans()) else f"{name}:{','.join(map(str, numbers))}"
                 for name, numbers in named.items()]  # fmt: skip
        said |= {selection: "@".join(whole)} if whole else {}
        names, slots = used, each
    return len(names), slots, said | draw(_some(nodes=st.just(len(names)), timeout_seconds=st.integers(10, 10**5)))


@st.composite
def strategies(draw, machines: int, per_machine: int, device: str, automatic: bool):
    kinds = (
        ["fsdp", "deepspeed", "deepspeed", "ddp"]
        + ["single"] * (machines * per_machine == 1)
        + ["auto"] * (2 * automatic)
    )
    strategy = {"type": draw(st.sampled_from(kinds))}
    if strategy["type"] == "fsdp":
        hybrid = st.sampled_from([True, True, False]) if machines > 1 and per_machine > 1 else st.just(False)
        fields = {
            "reshard_after_forward": st.booleans(),
            "cpu_offload": st.sampled_from([False, device == "cuda"]),
            "hybrid_shard": hybrid,
        }
        strategy |= draw(st.fixed_dictionaries(fields) | _some(**fields))
    if strategy["type"] == "deepspeed":
        stage = draw(st.sampled_from([1, 2, 3]))
        offload = st.sampled_from(["none", "cpu"] if device == "cuda" else ["none"])
        config = _some(zero_optimization=_some(**ZERO_3 if stage == 3 else ZERO_1_2), **CONFIG)
        param = {"offload_param": offload} if stage == 3 else {}
        fields = {"offload_optimizer": offload, "config": config, **param}
        strategy |= {"zero_stage": stage} | draw(st.fixed_dictionaries(fields) | _some(**fields))
    return strategy


def _of_precision(strategy: dict, precision: str) -> dict:
    """Without the keys that ZeRO-1 does not take under bf16."""
    if strategy.get("zero_stage") == 1 and precision == "bf16" and strategy.get("offload_optimizer") != "cpu":
        zero = strategy.get("config", {}).get("zero_optimization", {})
        for key in zero.keys() - {"allgather_bucket_size"}:
            del zero[key]
    return strategy


@st.composite
def batches(draw, processes: int, automatic: bool):
    """The global batch, and two of the three numbers, or all of them; or, where the planner can choose, it alone."""
    per_device, accumulation = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    total = per_device * accumulation * processes
    batch = {
        "global_batch_size": total,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
    }
    if automatic and draw(st.booleans()):
        return total, {"global_batch_size": total}
    left_out = draw(st.sampled_from([None, *batch]))
    return total, {name: number for name, number in batch.items() if name != left_out}


@st.composite
def good(draw):
    """A recipe without a mistake or a doubt: no error, no warning."""
    machines, per_machine, cluster = draw(clusters())
    device = draw(st.sampled_from(["cuda", "cpu", "cuda"]))
    gpu = draw(st.sampled_from([None, *GPUS])) if device == "cuda" else None
    cluster |= {"device": device} | ({"gpu": gpu} if gpu else {}) | draw(_some(memory_gib=st.integers(200, 2000)))
    precision = draw(st.sampled_from(["bf16", "fp32"] if gpu is None or GPUS[gpu].bf16 else ["fp32"]))
    flash = ["flash_attention_2"] * (device == "cuda" and precision == "bf16")
    # Slots of user@host are what DeepSpeed's launcher cannot name.
    named = "@" in HOSTS[int(cluster.get("hostfile", "0")[-1])] and not cluster.keys().isdisjoint(
        {"include", "exclude"}
    )
    launchers = ["local", "torchrun", "accelerate"] + ["deepspeed"] * (not named)
    here = draw(
        st.sampled_from([True] * 5 + [False])
    )  # the model's files; else it is an id of the hub, of which nothing is known
    model = (
        {"path": "./model"} if here else {"path": "nobody/nothing"} | draw(_some(revision=_with_null(st.just("main"))))
    )
    automatic = here and (gpu is not None or device == "cpu")

    train = draw(
        st.sampled_from(
            [
                [{"path": "rows.json", "format": "alpaca"}],
                [{"path": "chat.jsonl", "format": "messages"}],
                [{"path": "rows.json", "format": "alpaca"}, {"path": "./chat.jsonl", "format": "messages"}],
            ]
        )
    )
    evaluation = draw(
        st.sampled_from([None, {"split": 0.25}, {"path": "unseen.json", "format": "alpaca"}, {"split": 1e-9}])
    )
    split = (evaluation or {}).get("split")
    rows = ROWS * len(train)
    rows -= max(1, int(rows * Fraction(str(split)))) if split else 0
    total, batch = draw(batches(machines * per_machine, automatic))
    length = draw(LENGTHS)
    by_epochs = length.get("num_train_epochs", math.inf) * math.ceil(rows / total)
    updates = min(by_epochs, length.get("max_steps", math.inf))
    seldom = st.integers(1, min(updates, 100))

    optim = draw(st.sampled_from(["adamw", "sgd"]))
    betas = _some(adam_beta1=st.floats(0, 0.99), adam_beta2=st.floats(0, 0.9999), adam_epsilon=st.floats(1e-12, 1e-3))
    training = {
        "learning_rate": draw(st.floats(1e-8, 0.09) | st.just(0.01)),
        "optim": optim,
        "precision": precision,
        **batch,
        **length,
        **(draw(betas) if optim == "adamw" else {}),
        **(draw(_some(eval_steps=_with_null(seldom))) if evaluation else {}),
        **draw(
            _some(
                lr_scheduler_type=st.sampled_from(["linear", "cosine", "constant"]),
                weight_decay=st.floats(0, 1),
                max_grad_norm=_with_null(st.floats(0.01, 100)),
                seed=st.integers(0, 2**32 - 1),
            )
        ),
        **draw(
            st.just({})
            | _some(warmup_ratio=st.floats(0, 0.5))
            | _some(warmup_steps=st.integers(0, updates - 1) | st.just(updates - 1))
        ),
    }
    saving = st.fixed_dictionaries({"save_steps": seldom}, optional={"keep": st.integers(1, 5)})
    resuming = _some(resume=st.sampled_from(["auto", "never"]), output_dir=st.sampled_from([None, "results/é 1"]))
    return {
        **draw(_some(extends=st.none(), **{"$schema": st.just("recipe.schema.json")})),
        "name": draw(st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)),
        "model": model
        | draw(
            _some(
                attn_implementation=st.sampled_from(["sdpa", "eager", *flash]),
                gradient_checkpointing=st.sampled_from([True, False, "auto"]),
                trust_remote_code=st.booleans(),
            )
        ),
        "data": {"train": train, "max_length": draw(st.integers(2, 512)), "eval": evaluation}
        | draw(_some(chat_template=st.sampled_from([None, "template.jinja"]))),
        "method": draw(METHODS),
        "strategy": _of_precision(draw(strategies(machines, per_machine, device, automatic)), precision),
        "training": training,
        "checkpoint": draw(st.just({}) | saving) | draw(resuming),
        "logging": draw(_some(logging_steps=st.integers(1, 100), tensorboard=st.booleans())),
        "cluster": cluster,
        "launcher": {"type": draw(st.sampled_from(launchers))},
    }


def places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


@st.composite
def damaged(draw):
    """A good recipe with some values replaced, taken away, said elsewhere, or under another name."""
    recipe = copy.deepcopy(draw(good()))
    for _ in range(draw(st.integers(1, 4))):
        *above, last = draw(st.sampled_from([path for path in places(recipe) if path]))
        inner = recipe
        for step in above:
            inner = inner[step]
        change = draw(st.sampled_from(["replace", "remove", "move", "rename", "add"]))
        if change == "replace":
            inner[last] = draw(VALUES)
        elif change == "add" and isinstance(inner, dict):
            inner[draw(st.sampled_from(WORDS))] = draw(VALUES)
        elif isinstance(inner, list):
            inner.append(inner.pop(last) if change == "move" else draw(VALUES))
        else:
            value = inner.pop(last)
            if change == "move":
                recipe[last] = value
            if change == "rename" and last:
                cut = draw(st.integers(0, len(last) - 1))
                inner[last[:cut] + last[cut + 1 :]] = value
    return recipe
