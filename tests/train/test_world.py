"""A process that is not what the plan wants stops before it loads a model, and names both values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tiny

from dsft.compile import compile_plan, write
from dsft.errors import DsftError
from dsft.plan.versions import installed_versions
from dsft.train.world import check, forget_launcher, join


@pytest.fixture
def plan(tmp_path):
    return tiny.plan(tmp_path, tiny.write_rows(tmp_path / "rows.json", 4), tmp_path, engine="ddp", world=2)


def problems(plan, directory, environment) -> list[tuple[str, str]]:
    try:
        check(plan, directory, environment)
    except DsftError as error:
        return [(problem.kind, problem.message) for problem in error.problems]
    return []


def test_the_planned_world_passes(plan, tmp_path):
    assert problems(plan, tmp_path, {"WORLD_SIZE": "2"}) == []
    accelerate = {"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "false"}
    assert problems(plan, tmp_path, accelerate) == []


@pytest.mark.parametrize(
    ("environment", "kind", "values"),
    [
        ({}, "world-mismatch", ("2 processes", "1 were")),
        ({"WORLD_SIZE": "4"}, "world-mismatch", ("2 processes", "4 were")),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, "engine-mismatch", ("ddp", "deepspeed")),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "engine-mismatch", ("ddp", "fsdp")),
        ({"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "fp16"}, "precision-mismatch", ("fp32", "fp16")),
    ],
)
def test_a_difference_is_named_with_both_values(plan, tmp_path, environment, kind, values):
    ((found, message),) = problems(plan, tmp_path, environment)
    assert found == kind
    assert all(value in message for value in values)


def test_another_zero_stage_is_refused(tmp_path):
    data = tiny.write_rows(tmp_path / "rows.json", 4)
    plan = tiny.plan(tmp_path, data, tmp_path, engine="deepspeed", stage=2, world=2)
    environment = {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    ((kind, message),) = problems(plan, tmp_path, environment)
    assert kind == "engine-mismatch"
    assert "stage is 2" in message
    assert "stage 3" in message


def test_versions_are_compared_all_of_them(plan, tmp_path):
    import dataclasses

    wanted = {**installed_versions(), "torch": "1.0.0", "peft": "0.0.1"}
    found = problems(dataclasses.replace(plan, versions=wanted), tmp_path, {"WORLD_SIZE": "2"})
    assert [kind for kind, _ in found] == ["version-mismatch"] * 2
    assert "torch 1.0.0" in found[0][1]
    assert installed_versions()["torch"] in found[0][1]


def test_an_edited_deepspeed_json_is_refused(tmp_path):
    data = tiny.write_rows(tmp_path / "rows.json", 4)
    plan = tiny.plan(tmp_path, data, tmp_path, engine="deepspeed", stage=2, world=2)
    artifacts = compile_plan(plan, "{}\n", tmp_path / "compiled")
    write(artifacts, tmp_path / "compiled")
    from dsft.plan.record import from_json

    compiled = from_json(artifacts.files["plan.json"])
    assert problems(compiled, tmp_path / "compiled", {"WORLD_SIZE": "2"}) == []
    path = tmp_path / "compiled" / "deepspeed.json"
    path.write_text(path.read_text().replace('"stage": 2', '"stage": 3'))
    assert [kind for kind, _ in problems(compiled, tmp_path / "compiled", {"WORLD_SIZE": "2"})] == ["file-changed"]
    path.unlink()
    assert [kind for kind, _ in problems(compiled, tmp_path / "compiled", {"WORLD_SIZE": "2"})] == ["file-missing"]


def test_hints_of_launchers_do_not_reach_libraries():
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "RANK": "0", "HOME": "/"}
    forget_launcher(environment)
    assert environment == {"RANK": "0", "HOME": "/"}


def test_more_processes_than_gpus_are_refused(plan, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1000"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DsftError, match="wants 1000 GPUs on each machine, but [0-9]+ are visible") as caught:
        join(tiny.change(plan, "cluster", device="cuda"))
    assert [problem.kind for problem in caught.value.problems] == ["no-device"]


def test_a_mismatch_ends_the_process_before_torch_is_imported(plan, tmp_path):
    artifacts = compile_plan(plan, "{}\n", tmp_path / "compiled")
    write(artifacts, tmp_path / "compiled")
    code = (
        "import sys; from dsft.train.__main__ import main; code = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules]); sys.exit(code)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "compiled" / "plan.json"], capture_output=True, text=True, timeout=60, check=False,
        env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stdout.strip() == "[]"
    assert "2 processes, but 1 were launched" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [[], ["missing.json"], ["broken.json"]])
def test_a_wrong_command_line_is_a_message(tmp_path, arguments):
    (tmp_path / "broken.json").write_text('{"name": "x"}')
    result = subprocess.run(
        [sys.executable, "-m", "dsft.train", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 2
    assert "error[" in result.stderr
    assert "Traceback" not in result.stderr
