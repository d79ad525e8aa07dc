"""An interrupted run goes on where its checkpoint is: to the bit on the same shape."""

from __future__ import annotations

import dataclasses
import shutil
from itertools import product

import pytest
import tiny
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

ENGINES = {
    "single": ("single", None, 1),
    "ddp": ("ddp", None, 2),
    "fsdp": ("fsdp", None, 2),
    "zero1": ("deepspeed", 1, 2),
    "zero2": ("deepspeed", 2, 2),
    "zero3": ("deepspeed", 3, 2),
}
VARIANTS = {
    "fsdp-offload": ("fsdp", None, 2, {"cpu_offload": True}),
    "fsdp-hybrid": ("fsdp", None, 4, {"hybrid_shard": True, "machines": 2}),
    "zero2-offload": ("deepspeed", 2, 2, {"offload_optimizer": "cpu"}),
    "zero3-offload": ("deepspeed", 3, 2, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
}


def plan_for(engine: str, model, data, output, **changes):
    kind, stage, world, *fields = VARIANTS.get(engine) or ENGINES[engine]
    changes |= dict(*fields)
    return tiny.plan(
        model, data, output, engine=kind, stage=stage, world=world, per_device=4 // world, updates=8,
        save_updates=4, learning_rate=2e-3, dropout=0.1, **changes,
    )  # fmt: skip


def interrupt_after_checkpoint(run) -> None:
    """Leaves the run as one that was killed some updates after its checkpoint of update four."""
    shutil.rmtree(run.output / "checkpoints" / "update-00000008")
    for result in ("adapter", "model"):
        shutil.rmtree(run.output / result, ignore_errors=True)


EXACT_CASES = [(engine, *what) for engine in ENGINES for what in product(("lora", "full"), ("fp32", "bf16"))]
EXACT_CASES += [
    ("fsdp-hybrid", "full", "fp32"),
    *((variant, "lora", "bf16") for variant in VARIANTS if "offload" in variant),
]


@pytest.mark.parametrize(("engine", "method", "precision"), EXACT_CASES)
def test_resume_on_the_same_shape_is_exact(trained, model, data, tmp_path, engine, method, precision):
    """Eight updates over an epoch's end at six; the checkpoint is at four; dropout draws on."""
    plan = plan_for(engine, model, data, tmp_path / "out", method=method, precision=precision)
    whole = trained(plan)
    weights = whole.weights
    interrupt_after_checkpoint(whole)
    resumed = trained(plan)
    assert resumed.updates[:4] == whole.updates[:4]  # the very lines of the first run, times included
    assert [entry["update"] for entry in resumed.updates] == list(range(1, 9))
    times = [[entry["seconds"] for entry in run.updates[4:]] for run in (whole, resumed)]
    assert times[0] != times[1]  # and these were trained again
    for before, after in zip(whole.updates, resumed.updates, strict=True):
        assert before["loss"] == after["loss"]
        assert before["grad_norm"] == after["grad_norm"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in resumed.weights.items())


@pytest.mark.parametrize(
    ("first", "second"),
    [("single", "zero3"), ("zero2", "fsdp"), ("fsdp", "ddp"), ("zero3", "single"), ("zero3-offload", "fsdp-offload")],
)
def test_resume_on_another_engine_and_world_follows(trained, model, data, tmp_path, first, second):
    reference = trained(dataclasses.replace(plan_for(first, model, data, tmp_path / "reference", method="full")))
    run = trained(plan_for(first, model, data, tmp_path / "out", method="full"))
    interrupt_after_checkpoint(run)
    resumed = trained(plan_for(second, model, data, tmp_path / "out", method="full"))
    assert resumed.updates[:4] == run.updates[:4]
    for ours, theirs in zip(resumed.updates, reference.updates, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for name, tensor in reference.weights.items():
        assert float((resumed.weights[name] - tensor).abs().max() / tensor.abs().max()) < 1e-5


def test_a_finished_run_does_nothing_and_says_so(trained, attempt, model, data, tmp_path):
    plan = plan_for("single", model, data, tmp_path / "out")
    first = trained(plan)
    ((outcome, printed),) = attempt(plan)
    assert outcome == "done"
    assert "is finished" in printed
    assert (first.output / "metrics.jsonl").read_text().count("\n") == len(first.metrics)


def test_another_recipe_does_not_go_on_with_it(trained, attempt, model, data, tmp_path):
    trained(plan_for("single", model, data, tmp_path / "out"))
    other = tiny.change(plan_for("single", model, data, tmp_path / "out"), "training", learning_rate=1e-3)
    ((outcome, _),) = attempt(other)
    assert outcome == "failed other-run"


def test_a_start_that_failed_does_not_bind_the_mended_one(attempt, model, data, tmp_path):
    ((outcome, _),) = attempt(plan_for("single", tmp_path / "no-model", data, tmp_path / "out"))
    assert outcome == "failed model-load"
    ((outcome, _),) = attempt(plan_for("single", model, data, tmp_path / "out"))
    assert outcome == "done"


def test_resume_never_refuses_a_folder_with_a_run(trained, attempt, model, data, tmp_path):
    plan = plan_for("single", model, data, tmp_path / "out", resume="never")
    trained(plan)
    ((outcome, _),) = attempt(plan)
    assert outcome == "failed run-exists"


@pytest.mark.parametrize("engine", ["fsdp", "zero3"])
def test_saving_is_collective_and_leaves_one_whole_set(trained, model, data, tmp_path, engine):
    plan = tiny.change(
        plan_for(engine, model, data, tmp_path / "out", precision="bf16"), "checkpoint", save_updates=2, keep=2
    )
    run = trained(plan)
    kept = sorted(path.name for path in (run.output / "checkpoints").iterdir())
    assert kept == ["update-00000006", "update-00000008"]
    for folder in (run.output / "checkpoints").iterdir():
        assert sorted(path.name for path in folder.iterdir()) == [
            "moments.safetensors", "parameters.safetensors", "rng-00000.safetensors", "rng-00001.safetensors",
            "state.json",
        ]  # fmt: skip
        for name in ("moments", "parameters"):
            stored = load_file(folder / f"{name}.safetensors")
            assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_folders_of_the_user_beside_checkpoints_are_left_alone(trained, model, data, tmp_path):
    plan = tiny.change(plan_for("single", model, data, tmp_path / "out"), "checkpoint", keep=1)
    (tmp_path / "out").mkdir()
    run = trained(plan)
    checkpoints = run.output / "checkpoints"
    for name in ("update-backup", "update-00000007-good"):
        (checkpoints / name).mkdir()
    shutil.rmtree(run.output / "adapter")
    shutil.rmtree(checkpoints / "update-00000008")
    trained(plan)
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "update-00000007-good",
        "update-00000008",
        "update-backup",
    ]


def test_two_runs_do_not_share_a_folder(attempt, model, data, tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ((outcome, _),) = attempt(plan_for("single", model, data, tmp_path / "out"))
        assert outcome == "failed run-busy"
    ((outcome, _),) = attempt(plan_for("single", model, data, tmp_path / "out"))
    assert outcome == "done"


def test_a_model_without_all_its_weights_is_refused(attempt, model, data, tmp_path):
    import json

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    ((outcome, _),) = attempt(plan_for("single", broken, data, tmp_path / "out"))
    assert outcome == "failed model-incomplete"
    weights = (model / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    ((outcome, _),) = attempt(plan_for("single", broken, data, tmp_path / "other"))
    assert outcome == "failed model-load"


def test_zero3_resumes_where_a_parameter_does_not_divide_by_the_ranks(trained, data, tmp_path):
    """Adapters of 3 x 65 weights on two ranks: the last rank's part is padded."""
    model = tiny.write_model(tmp_path / "model", width=65)
    plan = tiny.change(plan_for("zero3", model, data, tmp_path / "out", precision="bf16"), "method", r=3)
    whole = trained(plan)
    weights = whole.weights
    interrupt_after_checkpoint(whole)
    resumed = trained(plan)
    assert all(torch.equal(weights[name], tensor) for name, tensor in resumed.weights.items())


def test_a_run_whose_result_could_not_be_written_needs_no_training_again(trained, model, data, tmp_path):
    plan = plan_for("single", model, data, tmp_path / "out")
    whole = trained(plan)
    weights = whole.weights
    shutil.rmtree(whole.output / "adapter")
    again = trained(plan)
    assert again.updates == whole.updates
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.weights.items())


@pytest.mark.parametrize("name", ["model", "checkpoints", "metrics.jsonl"])
def test_what_is_not_a_run_is_never_replaced(attempt, model, data, tmp_path, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    ((outcome, _),) = attempt(plan_for("single", model, data, tmp_path / "out", method="full"))
    assert outcome == "failed folder-taken"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", name]
