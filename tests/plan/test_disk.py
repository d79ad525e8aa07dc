"""Room for checkpoints: more of them than any disk holds."""

from __future__ import annotations

import pytest

from dsft.errors import DsftError

ENDLESS = ("checkpoint.save_steps=1", "checkpoint.keep=1000000000000", "training.max_steps=1000000000")


def test_checkpoints_that_no_disk_holds(workshop):
    workshop.plan("checkpoint.save_steps=1", "checkpoint.keep=2")
    with pytest.raises(DsftError) as caught:
        workshop.plan(*ENDLESS)
    (problem,) = caught.value.problems
    assert problem.kind == "disk-space" and f"{workshop.folder} has " in problem.message


def test_without_checkpoints_only_the_result_is_written(workshop):
    per_weight = 4 + 4 + 4  # a checkpoint: weight and two moments; the result: the weight

    def needed(save_steps, keep: int) -> int:
        plan = workshop.plan(f"checkpoint.save_steps={save_steps}", f"checkpoint.keep={keep}", "training.max_steps=5")
        return plan.estimate.disk_bytes

    result = needed("null", 3)
    checkpoint = per_weight * (result // 4)
    assert needed(1, 3) == result + 4 * checkpoint  # a new one is whole before the oldest goes
    assert needed(1, 100) == result + 5 * checkpoint  # no more than there are updates
    assert needed(2, 100) == result + 3 * checkpoint  # after 2, 4 and the last
    assert needed(1000, 100) == result + checkpoint


def test_the_disk_of_other_machines_is_not_known(workshop):
    workshop.write("hosts", "node1 slots=2\n")
    cluster = {"cluster": {"device": "cpu", "hostfile": "hosts"}}
    (warning,) = workshop.warnings(*ENDLESS, **cluster)
    assert (warning.kind, warning.severity) == ("disk-space", "warning") and " here has " in warning.message
