"""Each recipe that is accepted compiles to files that accelerate and DeepSpeed accept."""

from __future__ import annotations

import json

import pytest
from drawn_recipes import furnish, good
from hypothesis import HealthCheck, Phase, given, settings
from workshop import workshop

from dsft import cli

__all__ = ["workshop"]


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=60,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(good())
def test_engines_accept_what_is_compiled(workshop, on_cpu, recipe):
    from accelerate.commands.config import load_config_from_file
    from deepspeed.runtime import config as reader

    furnish(workshop)
    out = workshop.folder / "out"
    assert cli.main(["compile", str(workshop.write("recipe.json", recipe)), "-o", str(out)]) == 0
    plan = json.loads((out / "plan.json").read_text())
    world = plan["batch"]["world_size"]

    config = load_config_from_file(str(out / "accelerate.yaml"))
    assert config.num_processes == world
    if recipe["strategy"]["type"] != "deepspeed":
        assert not (out / "deepspeed.json").exists()
        return
    on_cpu.setattr(reader.dist, "get_rank", lambda *_: 0)
    on_cpu.setattr(reader.dist, "get_world_size", lambda *_: world)
    config = reader.DeepSpeedConfig(str(out / "deepspeed.json"))
    assert config.train_batch_size == plan["batch"]["global_batch_size"]
    assert config.zero_optimization_stage == recipe["strategy"]["zero_stage"]
    for key, value in recipe["strategy"].get("config", {}).get("zero_optimization", {}).items():
        name = key.removeprefix("stage3_")
        assert getattr(config.zero_config, name) == value


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return monkeypatch
