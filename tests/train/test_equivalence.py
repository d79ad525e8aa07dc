"""The strategy changes the cost and never the result."""

from __future__ import annotations

import functools

import pytest
import tiny
import torch

from dsft.plan.deepspeed_keys import stages
from dsft.recipe.schema import load_schema

pytestmark = pytest.mark.slow

ENGINES = {
    "ddp": ("ddp", None),
    "fsdp": ("fsdp", None),
    "zero1": ("deepspeed", 1),
    "zero2": ("deepspeed", 2),
    "zero3": ("deepspeed", 3),
}
VARIANTS = {  # the fields of a strategy beyond its engine
    "fsdp-offload": ("fsdp", None, {"cpu_offload": True}),
    "fsdp-hybrid": ("fsdp", None, {"hybrid_shard": True, "machines": 2}),
    "fsdp-hybrid-offload": ("fsdp", None, {"cpu_offload": True, "hybrid_shard": True, "machines": 2}),
    "zero1-offload": ("deepspeed", 1, {"offload_optimizer": "cpu"}),
    "zero2-offload": ("deepspeed", 2, {"offload_optimizer": "cpu"}),
    "zero3-offload": ("deepspeed", 3, {"offload_optimizer": "cpu"}),
    "zero3-offload-param": ("deepspeed", 3, {"offload_param": "cpu"}),
    "zero3-offload-all": ("deepspeed", 3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
}
SHAPES = [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)]  # world, per device, accumulation: 4 rows each
CASES = [("single", shape) for shape in SHAPES if shape[0] == 1][1:]
CASES += [(engine, shape) for engine in ENGINES for shape in SHAPES]


@pytest.fixture(scope="session")
def follow(trained, model, untied, data, tmp_path_factory):
    """A function that trains ten updates; the same arguments train once."""

    @functools.cache
    def run(engine: str, shape: tuple[int, int, int], method: str, tied: bool = True, **training):
        kind, stage, *fields = VARIANTS.get(engine) or ENGINES.get(engine, (engine, None))
        world, per_device, accumulation = shape
        output = tmp_path_factory.mktemp(f"{engine}-{method}")
        plan = tiny.plan(
            model if tied else untied, data, output, engine=kind, stage=stage, world=world, per_device=per_device,
            accumulation=accumulation, method=method, **{"learning_rate": 2e-3, **training}, **dict(*fields),
        )  # fmt: skip
        return trained(plan)

    return run


def difference(run, reference, key: str) -> float:
    """The largest relative difference of a metric over all updates."""
    pairs = [(ours[key], theirs[key]) for ours, theirs in zip(run.updates, reference.updates, strict=True)]
    assert len(pairs) == 10
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def weight_difference(run, reference) -> float:
    """The largest difference of any weight, or of any tensor in relation to its norm, whichever is more.

    Not each weight in relation to itself: Adam divides by the size of the gradient, so where a gradient is nearly zero
    its rounding error is an update like any other.
    """
    ours, theirs = run.weights, reference.weights
    assert ours.keys() == theirs.keys()
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    return max(largest, max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs))


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    ("engine", "shape"), CASES, ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value))
)
def test_ten_fp32_updates_follow_one_process(follow, engine, shape, method):
    reference = follow("single", (1, 4, 1), method)
    run = follow(engine, shape, method)
    assert max(entry["grad_norm"] for entry in reference.updates) > 0.5  # clipping is active
    assert len({entry["supervised_tokens"] for entry in reference.updates}) > 5  # rows differ in length
    assert difference(run, reference, "loss") < 1e-6
    assert difference(run, reference, "grad_norm") < 1e-5
    assert weight_difference(run, reference) < 1e-5


OFFLOAD_CASES = [(variant, (2, 1, 2), "full") for variant in VARIANTS if "hybrid" not in variant]
OFFLOAD_CASES += [(variant, (2, 1, 2), "lora") for variant in ("fsdp-offload", "zero2-offload", "zero3-offload-all")]
HYBRID_CASES = [  # two machines of two
    ("fsdp-hybrid", (4, 1, 1), "full"),
    ("fsdp-hybrid", (4, 1, 2), "full"),
    ("fsdp-hybrid", (4, 1, 2), "lora"),
    ("fsdp-hybrid-offload", (4, 1, 2), "full"),
]


@pytest.mark.parametrize(("variant", "shape", "method"), OFFLOAD_CASES + HYBRID_CASES)
def test_offload_and_hybrid_follow_one_process(follow, variant, shape, method):
    rows = shape[0] * shape[1] * shape[2]
    reference, run = follow("single", (1, rows, 1), method), follow(variant, shape, method)
    assert difference(run, reference, "loss") < 1e-6
    assert difference(run, reference, "grad_norm") < 1e-5
    assert weight_difference(run, reference) < 1e-5


def additions(stage: int, on: bool) -> dict:
    """A value for every key of zero_optimization that a recipe may add and that the stage uses; switches all on, or off."""
    config = load_schema()["properties"]["strategy"]["then"]["properties"]["config"]
    fields = {
        key: field
        for key, field in config["properties"]["zero_optimization"]["properties"].items()
        if stage in stages(key)
    }
    values = {
        key: on if field["type"] == "boolean" else field["examples"][0 if on else -1] for key, field in fields.items()
    }
    if stage == 3:  # else a tiny model would stay whole; and what needs a GPU
        values |= {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
    return {"zero_optimization": values, "disable_python_gc": on}


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_key_of_deepspeed_changes_the_result(trained, follow, model, data, tmp_path, stage, on):
    plan = tiny.plan(
        model, data, tmp_path / "out", engine="deepspeed", stage=stage, world=2, per_device=1, accumulation=2,
        method="full", learning_rate=2e-3, config=additions(stage, on),
    )  # fmt: skip
    run, reference = trained(plan), follow("single", (1, 4, 1), "full")
    assert difference(run, reference, "loss") < 1e-6
    assert weight_difference(run, reference) < 1e-5


BF16_CASES = [(engine, shape, method) for engine in ENGINES for shape in SHAPES[3:] for method in ("lora", "full")]
BF16_CASES += [
    (variant, (2, 1, 2), "full") for variant in ("fsdp-offload", "zero1-offload", "zero2-offload", "zero3-offload-all")
]


@pytest.mark.parametrize(("engine", "shape", "method"), BF16_CASES)
def test_bf16_stays_near_one_process(follow, engine, shape, method):
    reference = follow("single", (1, 4, 1), method, precision="bf16")
    run = follow(engine, shape, method, precision="bf16")
    assert difference(run, reference, "loss") < 5e-3
    from transformers import AutoModelForCausalLM

    if method == "full":  # what plain transformers loads is what was trained, not its rounding
        loaded = AutoModelForCausalLM.from_pretrained(run.output / "model").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in run.weights.items())
        assert loaded["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_evaluation_is_the_token_mean_of_plain_transformers(follow, model, data, engine):
    """Before, during and after; five rows over two ranks of two."""
    shape = (1, 4, 1) if engine == "single" else (2, 2, 1)
    run = follow(engine, shape, "lora", eval_split_rows=5, eval_updates=3)
    losses = {entry["update"]: entry["eval_loss"] for entry in run.metrics if "eval_loss" in entry}
    assert list(losses) == [0, 3, 6, 9, 10]
    assert losses[0] == pytest.approx(plain_evaluation(model, data), rel=1e-6)
    reference = follow("single", (1, 4, 1), "lora", eval_split_rows=5, eval_updates=3)
    for entry in reference.metrics:
        if "eval_loss" in entry:
            assert losses[entry["update"]] == pytest.approx(entry["eval_loss"], rel=1e-6)


def plain_evaluation(model, data) -> float:
    """The mean loss over the answers' tokens of the held-out rows, one row at a time, by transformers alone."""
    import json

    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows = json.loads(data.read_text())
    held_out = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7))[:5]
    losses = []
    for row in held_out.tolist():
        prompt = f"<|im_start|>user\n{rows[row]['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(f"{prompt}{rows[row]['output']}<|im_end|>")["input_ids"]])
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0, start - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="none"))
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("engine", ["fsdp", "zero2", "zero3"])
def test_untied_head_follows_too(follow, engine):
    reference = follow("single", (1, 4, 1), "full", tied=False)
    run = follow(engine, (2, 2, 1), "full", tied=False)
    assert "lm_head.weight" in run.weights
    assert weight_difference(run, reference) < 1e-5


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero2", "zero3"])
def test_tied_weights_are_saved_once(follow, engine):
    run = follow(engine, (2, 2, 1), "full")
    assert "lm_head.weight" not in run.weights
    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(run.output / "model")
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert torch.equal(reloaded.lm_head.weight, run.weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 1)])
def test_the_schedule_steps_once_an_update(follow, engine, shape):
    """accelerate steps a prepared schedule once a process, and DeepSpeed steps its own besides the loop's."""
    run = follow(engine, shape, "lora", updates=8, warmup_updates=0, learning_rate=1e-3)
    rates = [entry["learning_rate"] / 1e-3 for entry in run.updates]
    assert rates == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])


CLIPPING_CASES = [(engine, clip) for engine in ("single", *ENGINES) for clip in (None, 0.3, 1e4)]
CLIPPING_CASES += [(variant, 0.3) for variant in ("fsdp-offload", "zero2-offload", "zero3-offload-all")]


@pytest.mark.parametrize(("engine", "clip"), CLIPPING_CASES)
def test_clipping_means_the_same_everywhere(follow, model, engine, clip):
    """With SGD at a rate of 1 the update is the clipped gradient: its size is the norm, or what the recipe allows."""
    shape = (1, 4, 1) if engine == "single" else (2, 2, 1)
    run = follow(
        engine, shape, "full", updates=1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant",
        warmup_updates=0, weight_decay=0.0, max_grad_norm=clip,
    )  # fmt: skip
    from safetensors.torch import load_file

    before, after = load_file(model / "model.safetensors"), run.weights
    size = sum(float((after[name].double() - before[name].double()).square().sum()) for name in after) ** 0.5
    norm = run.updates[0]["grad_norm"]
    assert norm > 1  # the norm reported is the one before clipping
    assert size == pytest.approx(min(norm, clip or norm), rel=1e-4)


def test_gradient_checkpointing_is_on_where_it_is_asked_for(model, data, tmp_path):
    """Each layer runs forward twice: once without keeping activations, once more in the backward pass."""
    from dsft.train.model import build_model, decoder_layers

    for asked, runs in ((False, 1), (True, 2)):
        built = build_model(tiny.plan(model, data, tmp_path, checkpointing=asked))
        calls = []
        attention = decoder_layers(built)[0].self_attn
        attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        built(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False).logits.sum().backward()
        assert len(calls) == runs


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_gradient_checkpointing_changes_nothing(trained, follow, model, data, tmp_path, engine):
    kind, stage = ENGINES[engine]
    plan = tiny.plan(
        model, data, tmp_path / "out", engine=kind, stage=stage, world=2, per_device=2, checkpointing=True,
        learning_rate=2e-3, targets=("q_proj",),
    )  # fmt: skip
    run, reference = (
        trained(plan),
        trained(tiny.plan(model, data, tmp_path / "plain", learning_rate=2e-3, targets=("q_proj",))),
    )
    assert difference(run, reference, "loss") < 1e-6
    assert weight_difference(run, reference) < 1e-5
    trained_b = [name for name, tensor in run.weights.items() if "lora_B" in name and tensor.any()]
    assert len(trained_b) == 4  # every layer got gradients


@pytest.mark.parametrize("engine", ["single", *ENGINES, "fsdp-offload", "zero2-offload", "zero3-offload-all"])
def test_small_updates_survive_bf16(follow, model, data, tmp_path, engine):
    """A weight of 0.1 in bf16 has steps of 5e-4: updates of 1e-5 would all be rounded away."""
    from dsft.train.model import build_model

    shape = (1, 4, 1) if engine == "single" else (2, 2, 1)
    run = follow(engine, shape, "lora", precision="bf16", learning_rate=1e-5, lr_scheduler_type="constant")
    plan = tiny.plan(model, data, tmp_path / "out", precision="bf16")
    start = {name.replace(".default.", "."): p for name, p in build_model(plan).named_parameters() if "lora_A" in name}
    for name, before in start.items():
        after = run.weights[name]
        assert after.dtype == torch.float32
        moved = (after - before.detach()).abs()
        assert 0 < float(moved.max()) < 2e-4
        assert float((moved > 0).float().mean()) > 0.9
