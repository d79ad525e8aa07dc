"""Recipes as hypothesis draws them: right ones for every strategy, method and launcher, and ones gone wrong."""

from __future__ import annotations

import copy
import json
import string

from hypothesis import strategies as st
from workshop import COMPLETE, Workshop

from dsft.recipe import schema

WORDS = sorted(
    {name for _, name, _ in schema._all_fields()} | {"lora", "full", "rows.json", "model", "~", "", "é", "dp", "\u202e"}
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(WORDS), v, max_size=3)
)
HOSTS = (
    "n1 slots=2\n",
    "# two\r\nn1 slots=2\r\nalice@n2 slots=2\r\n",
    "n1 slots=1\nn2 slots=1\nn3 slots=1\nn4 slots=1\n",
)
ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 40


def furnish(workshop: Workshop) -> None:
    """The files that the recipes name."""
    (workshop.folder / "chat.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (workshop.folder / "unseen.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    (workshop.folder / "template.jinja").write_text("{{ messages }}")
    for number, hosts in enumerate(HOSTS):
        (workshop.folder / f"hosts{number}").write_text(hosts)


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
        "r": st.integers(1, 64) | st.just(8.0),
        "lora_alpha": st.integers(1, 64) | st.floats(0.5, 64),
        "lora_dropout": st.floats(0, 0.9),
        "target_modules": st.sampled_from(["all-linear", ["q_proj"], ["q_proj", "v_proj"]]),
    },
)
# What is added to deepspeed.json; a key that the stage does not use is warned of.
ZERO = {
    "overlap_comm": st.booleans(),
    "reduce_bucket_size": st.integers(1, 10**9),
    "contiguous_gradients": st.booleans(),
}
ZERO_1_2 = ZERO | {"allgather_bucket_size": st.integers(0, 10**9), "round_robin_gradients": st.booleans()}
ZERO_3 = ZERO | {"stage3_param_persistence_threshold": st.integers(0, 10**6), "sub_group_size": st.integers(1, 10**9)}


@st.composite
def strategies(draw, machines: int, per_machine: int):
    kinds = ["ddp", "fsdp", "deepspeed"] + ["single"] * (machines * per_machine == 1)
    strategy = {"type": draw(st.sampled_from(kinds))}
    if strategy["type"] == "fsdp":
        hybrid = st.booleans() if machines > 1 and per_machine > 1 else st.just(False)
        strategy |= draw(_some(reshard_after_forward=st.booleans(), cpu_offload=st.booleans(), hybrid_shard=hybrid))
    if strategy["type"] == "deepspeed":
        stage = draw(st.sampled_from([1, 2, 3]))
        offload = st.sampled_from(["none", "cpu"])
        config = _some(zero_optimization=_some(**ZERO_3 if stage == 3 else ZERO_1_2), memory_breakdown=st.booleans())
        param = {"offload_param": offload} if stage == 3 else {}
        strategy |= {"zero_stage": stage} | draw(_some(offload_optimizer=offload, config=config, **param))
    return strategy


@st.composite
def batches(draw, processes: int):
    """Two of the three numbers, or all of them."""
    per_device, accumulation = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    batch = {
        "global_batch_size": per_device * accumulation * processes,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
    }
    left_out = draw(st.sampled_from([None, *batch]))
    return {name: number for name, number in batch.items() if name != left_out}


@st.composite
def good(draw):
    """A recipe without a mistake or a doubt: no error, no warning."""
    device = draw(st.sampled_from(["cpu", "cuda"]))
    hosts = draw(st.sampled_from([None, *range(len(HOSTS))]))
    launcher = draw(st.sampled_from(["local", "torchrun", "accelerate", "deepspeed"]))
    if hosts is None:
        machines, per_machine = 1, draw(st.integers(1, 8))
        cluster = {"processes_per_node": per_machine}
    else:
        machines, per_machine = HOSTS[hosts].count("slots"), int(HOSTS[hosts].split("slots=")[1][0])
        cluster = {"hostfile": f"hosts{hosts}"}
    cluster |= draw(_some(timeout_seconds=st.integers(10, 10**5))) | {"device": device}
    precision = draw(st.sampled_from(["bf16", "fp32"]))
    flash = ["flash_attention_2"] * (device == "cuda" and precision == "bf16")
    evaluation = draw(
        st.sampled_from([None, {"split": 0.25}, {"path": "unseen.json", "format": "alpaca"}, {"split": 1e-9}])
    )
    optim = draw(st.sampled_from(["adamw", "sgd"]))
    betas = _some(adam_beta1=st.floats(0, 0.99), adam_beta2=st.floats(0, 0.9999), adam_epsilon=st.floats(1e-12, 1e-3))
    training = {
        "learning_rate": draw(st.floats(1e-8, 1.0) | st.just(1)),
        "optim": optim,
        "precision": precision,
        **draw(batches(machines * per_machine)),
        **draw(LENGTHS),
        **(draw(betas) if optim == "adamw" else {}),
        **(draw(_some(eval_steps=_with_null(st.integers(1, 100)))) if evaluation else {}),
        **draw(
            _some(
                lr_scheduler_type=st.sampled_from(["linear", "cosine", "constant"]),
                weight_decay=st.floats(0, 1),
                max_grad_norm=_with_null(st.floats(0.01, 100)),
                seed=st.integers(0, 2**32 - 1),
            )
        ),
        **draw(st.just({}) | _some(warmup_ratio=st.floats(0, 0.5)) | _some(warmup_steps=st.integers(0, 1))),
    }
    train = draw(
        st.sampled_from(
            [
                [{"path": "rows.json", "format": "alpaca"}],
                [{"path": "chat.jsonl", "format": "messages"}],
                [{"path": "rows.json", "format": "alpaca"}, {"path": "./chat.jsonl", "format": "messages"}],
            ]
        )
    )
    saving = st.fixed_dictionaries({"save_steps": st.integers(1, 100)}, optional={"keep": st.integers(1, 5)})
    return {
        "name": draw(st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)),
        "model": {"path": "./model"}
        | draw(
            _some(
                attn_implementation=st.sampled_from(["sdpa", "eager", *flash]),
                gradient_checkpointing=st.booleans(),
                trust_remote_code=st.booleans(),
            )
        ),
        "data": {"train": train, "max_length": draw(st.integers(2, 512)), "eval": evaluation}
        | draw(_some(chat_template=st.sampled_from([None, "template.jinja"]))),
        "method": draw(METHODS),
        "strategy": draw(strategies(machines, per_machine)),
        "training": training,
        "checkpoint": draw(st.just({}) | saving) | draw(_some(resume=st.sampled_from(["auto", "never"]))),
        "logging": draw(_some(logging_steps=st.integers(1, 100), tensorboard=st.booleans())),
        "cluster": cluster,
        "launcher": {"type": launcher},
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


__all__ = ["COMPLETE", "VALUES", "WORDS", "damaged", "furnish", "good", "places"]
