"""The schedules are those of transformers, as functions."""

from __future__ import annotations

import pytest
import tiny
import torch

from dsft.train.schedule import learning_rate


def training(tmp_path, **changes):
    data = tiny.write_rows(tmp_path / "rows.json", 8)
    return tiny.plan(tmp_path, data, tmp_path, learning_rate=1.0, **changes).training


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 8])
def test_values_are_those_of_transformers(tmp_path, kind, warmup):
    from transformers import get_scheduler

    ours = training(tmp_path, lr_scheduler_type=kind, warmup_updates=warmup, updates=8)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=8)
    for update in range(8):
        assert learning_rate(update, ours) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_linear_ends_at_zero_after_the_last_update(tmp_path):
    ours = training(tmp_path, lr_scheduler_type="linear", warmup_updates=0, updates=8)
    assert [learning_rate(k, ours) for k in range(9)] == [1 - k / 8 for k in range(9)]
