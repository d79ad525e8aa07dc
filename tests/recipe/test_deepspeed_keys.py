"""The keys that a recipe may add to deepspeed.json are DeepSpeed's own, and what DeepSpeed would pass over is said."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib import metadata

import pytest

from dsft.errors import DsftError
from dsft.plan.deepspeed_keys import VERSION, deepspeed_takes_all_keys
from dsft.recipe.schema import load_schema

CONFIG = load_schema()["properties"]["strategy"]["then"]["properties"]["config"]
ZERO = CONFIG["properties"]["zero_optimization"]
BLOCKS = {name: block for name, block in CONFIG["properties"].items() if "properties" in block}


def sample(field: dict):
    return True if field["type"] == "boolean" else field["examples"][0]


EVERYTHING = {
    name: {key: sample(field) for key, field in BLOCKS[name]["properties"].items()} if name in BLOCKS else sample(block)
    for name, block in CONFIG["properties"].items()
}


def test_the_keys_are_those_of_the_version_that_is_installed():
    assert metadata.version("deepspeed") == VERSION


def test_no_key_is_both_allowed_and_refused():
    for block in (CONFIG, ZERO):
        assert not block["properties"].keys() & block["x-refused"].keys()


@pytest.mark.slow
def test_every_key_of_zero_optimization_is_allowed_or_refused():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    allowed, aliases = set(ZERO["properties"]), {a for f in ZERO["properties"].values() for a in f.get("x-aliases", [])}
    assert allowed <= known
    assert known <= allowed | aliases | ZERO["x-refused"].keys()
    other_spellings = {name for name, field in DeepSpeedZeroConfig.model_fields.items() if field.alias}
    assert other_spellings <= aliases


@pytest.mark.slow
def test_every_key_that_deepspeed_reads_is_allowed_or_refused(monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    read = set()

    class Recording(dict):
        def get(self, key, *default):
            read.add(key)
            return super().get(key, *default)

        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    DeepSpeedConfig(Recording(train_batch_size=1))
    assert {"zero_optimization", "aio", "dump_state", "fp16"} <= read
    assert read - CONFIG["properties"].keys() - CONFIG["x-refused"].keys() == set()


@pytest.mark.slow
def test_inner_blocks_have_the_keys_that_deepspeed_reads():
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig

    def keys(name):
        return set(BLOCKS[name]["properties"])

    assert keys("comms_logger") == set(CommsLoggerConfig.model_fields)
    assert keys("flops_profiler") == set(vars(DeepSpeedFlopsProfilerConfig({})))


@pytest.mark.slow
def test_types_and_ranges_are_those_of_the_models():
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    for model, properties in ((DeepSpeedZeroConfig, ZERO), (CommsLoggerConfig, BLOCKS["comms_logger"])):
        for key, field in properties["properties"].items():
            for inside in (sample(field), field.get("minimum", sample(field))):
                model(**{key: inside})
            outside = {"boolean": "perhaps", "integer": field.get("minimum", 0) - 1, "array": 3}[field["type"]]
            if key == "stage3_module_granularity_threshold":
                continue  # DeepSpeed takes a negative one for 0
            with pytest.raises(ValidationError):
                model(**{key: outside})


def problems_of(workshop, stage, config, precision="fp32", **strategy):
    fields = {"type": "deepspeed", "zero_stage": stage, "config": config, **strategy}
    return list(deepspeed_takes_all_keys(workshop.recipe(f"training.precision={precision}", strategy=fields)))


def test_the_installed_deepspeed_has_all_keys(workshop):
    everything = copy.deepcopy(EVERYTHING)
    everything["zero_optimization"]["stage3_module_granularity_threshold"] = 0  # the workshop has no GPU
    assert all(problem.severity == "warning" for problem in problems_of(workshop, 3, everything)), "found in its source"


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        (2, "stage3_prefetch_bucket_size"),
        (1, "stage3_max_live_parameters"),
        (2, "sub_group_size"),
        (1, "zero_hpz_partition_size"),
        (3, "allgather_bucket_size"),
        (3, "ignore_unused_parameters"),
    ],
)
def test_a_key_that_the_stage_does_not_use_is_a_warning_at_its_place(workshop, stage, key):
    config = {"zero_optimization": {"overlap_comm": True, key: sample(ZERO["properties"][key])}}
    (problem,) = problems_of(workshop, stage, config)
    assert (problem.kind, problem.severity) == ("no-effect", "warning")
    assert f"zero_stage is {stage}" in problem.message
    assert problem.where.text[problem.where.column - 1 :].startswith(f'"{key}"')
    other = 3 if stage < 3 else 2
    assert problems_of(workshop, other, config) == []


def test_stage_1_under_bf16_is_another_optimizer(workshop):
    config = {"zero_optimization": {"reduce_bucket_size": 5, "overlap_comm": True, "allgather_bucket_size": 5}}
    found = problems_of(workshop, 1, config, "bf16")
    assert [problem.kind for problem in found] == ["no-effect"] * 2
    assert all("BF16_Optimizer" in problem.message for problem in found)
    assert problems_of(workshop, 1, config) == problems_of(workshop, 2, config, "bf16") == []
    assert problems_of(workshop, 1, config, "bf16", offload_optimizer="cpu") == []


def test_what_no_stage_uses_is_a_warning_too(workshop):
    config = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    (gather,) = problems_of(workshop, 3, config)
    assert "writes the result itself" in gather.message


@pytest.mark.parametrize(
    ("device", "stage", "value", "kinds"), [("cpu", 3, 9, ["incompatible"]), ("cpu", 3, 0, []), ("cuda", 3, 9, [])]
)
def test_what_runs_on_a_gpu_only(workshop, device, stage, value, kinds):
    config = {"zero_optimization": {"stage3_module_granularity_threshold": value}}
    strategy = {"type": "deepspeed", "zero_stage": stage, "config": config}
    recipe = workshop.recipe(f"cluster.device={device}", strategy=strategy)
    assert [problem.kind for problem in deepspeed_takes_all_keys(recipe)] == kinds


@pytest.mark.slow
def test_stages_are_those_that_the_engine_hands_a_key_to():
    """Its one branch for stages 1 and 2 and its other for stage 3 name the settings they pass on."""
    import ast
    import inspect
    import textwrap

    from deepspeed.runtime.engine import DeepSpeedEngine

    from dsft.plan.deepspeed_keys import _STAGES

    tree = ast.parse(textwrap.dedent(inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)))
    low = next(node for node in ast.walk(tree) if isinstance(node, ast.If) and "gradients" in ast.unparse(node.test))
    first, second = (ast.unparse(ast.Module(body, [])) for body in (low.body, low.orelse))
    handed = {key: (f"{key}=" in first, f"{key}=" in second) for key in _STAGES}
    elsewhere = {key for key, places in handed.items() if not any(places)}
    assert elsewhere == {"allgather_partitions", "memory_efficient_linear"}
    assert {key: (1 in _STAGES[key], 3 in _STAGES[key]) for key in _STAGES.keys() - elsewhere} == {
        key: places for key, places in handed.items() if key not in elsewhere
    }


def test_what_the_other_optimizer_is_handed():
    import inspect

    from deepspeed.runtime.engine import DeepSpeedEngine

    from dsft.plan.deepspeed_keys import _BF16_OPTIMIZER

    source = inspect.getsource(DeepSpeedEngine._configure_bf16_optimizer)
    assert tuple(key for key in ZERO["properties"] if f"{key}=" in source) == _BF16_OPTIMIZER


def test_a_deepspeed_without_a_key_is_named_with_its_version(workshop):
    """As where another version is installed: its source is read, not imported."""
    elsewhere = workshop.folder / "elsewhere"
    zero = elsewhere / "deepspeed" / "runtime" / "zero"
    zero.mkdir(parents=True)
    (elsewhere / "deepspeed" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (zero / "config.py").write_text(
        'ZERO_OPTIMIZATION = "zero_optimization"\n'
        "class DeepSpeedZeroConfig(DeepSpeedConfigModel):\n"
        "    overlap_comm: bool = True\n"
        '    prefetch_bucket_size: int = Field(5, alias="stage3_prefetch_bucket_size")\n'
    )
    info = elsewhere / "deepspeed-0.9.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.9.5\n")
    zero_keys = {"overlap_comm": True, "stage3_prefetch_bucket_size": 7, "zero_hpz_partition_size": 2}
    strategy = {"type": "deepspeed", "zero_stage": 3, "config": {"zero_optimization": zero_keys}}
    recipe = workshop.recipe(strategy=strategy)
    assert not recipe.problems
    run = subprocess.run(
        [sys.executable, "-m", "dsft", "check", workshop.folder / "recipe.json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")])},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.count("error[") == 1
    assert 'error[unknown-key]: DeepSpeed 0.9.5, which is installed, has no key "zero_hpz_partition_size"' in run.stderr


def test_auto_is_a_word_of_transformers_and_not_of_deepspeed(workshop):
    zero = {"zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": "auto"}}
    with pytest.raises(DsftError) as caught:
        workshop.plan(strategy={"type": "deepspeed", "zero_stage": 2, "config": zero})
    assert [problem.kind for problem in caught.value.problems] == ["wrong-type"] * 2
    assert {problem.help for problem in caught.value.problems} == {"leave it out, and the default is taken"}
