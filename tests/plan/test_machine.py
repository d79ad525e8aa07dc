from __future__ import annotations

import pytest

from dsft.plan.machine import machine_memory

INSTALLED = machine_memory("/nowhere/memory.max")


@pytest.mark.parametrize(
    ("limit", "memory"), [("max\n", INSTALLED), ("1073741824\n", 2**30), (f"{INSTALLED * 2}\n", INSTALLED)]
)
def test_a_container_may_have_less_than_its_machine(tmp_path, limit, memory):
    (tmp_path / "memory.max").write_text(limit)
    assert machine_memory(str(tmp_path / "memory.max")) == memory


def test_what_is_installed():
    assert 2**28 < INSTALLED < 2**50
