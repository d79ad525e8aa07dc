"""What an output folder holds already is said before a process starts."""

import pytest

from dsft.plan.begun import METRICS, RECORD, is_begun
from dsft.plan.record import to_json


@pytest.fixture
def begun(workshop):
    """A plan, and its output folder with a run of it that has trained."""
    plan = workshop.plan()
    folder = workshop.folder / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(to_json(plan))
    (folder / METRICS).write_text("{}\n")
    return plan, folder


def test_an_empty_folder_is_free(workshop):
    assert not is_begun(workshop.plan()) and workshop.warnings() == []


def test_the_same_run_goes_on(workshop, begun):
    plan, _ = begun
    assert is_begun(plan) and workshop.warnings() == []


def test_another_strategy_goes_on_with_it(workshop, begun):
    assert workshop.warnings(strategy={"type": "deepspeed", "zero_stage": 2}) == []


def test_a_run_that_failed_at_its_start_binds_nobody(workshop, begun):
    (begun[1] / METRICS).unlink()
    assert workshop.warnings("training.learning_rate=1e-5") == []


@pytest.mark.parametrize(
    "kind, override, said",
    [
        ("other-run", "training.learning_rate=1e-5", "training.learning_rate was 0.001 and is 1e-05"),
        ("other-run", "training.seed=7", "training.seed was"),
        ("run-exists", "checkpoint.resume=never", "checkpoint.resume is never"),
    ],
)
def test_another_run(workshop, begun, kind, override, said):
    (warning,) = workshop.warnings(override)
    assert (warning.kind, warning.severity) == (kind, "warning") and said in warning.message


@pytest.mark.parametrize("content", ["", "{}", "[]", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_record_that_is_none(workshop, begun, content):
    (begun[1] / RECORD).write_bytes(content.encode("latin-1"))
    (warning,) = workshop.warnings()
    assert warning.kind == "run-unreadable"


@pytest.mark.parametrize("name", ["model", "adapter", "checkpoints", METRICS])
def test_something_else_than_a_run(workshop, name):
    (workshop.folder / "results" / name).mkdir(parents=True)
    (warning,) = workshop.warnings(checkpoint={"output_dir": "results"})
    assert warning.kind == "folder-taken" and name in warning.message
    assert warning.where.line and "results" in warning.where.text
