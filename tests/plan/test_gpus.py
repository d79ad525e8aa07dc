"""The table of GPUs against the schema, and against itself."""

from __future__ import annotations

import pytest

from dsft.errors import DsftError
from dsft.plan.gpus import GPUS
from dsft.recipe.schema import load_schema

MIB = 1024**2


def test_a_recipe_can_name_each_of_them():
    allowed = load_schema()["properties"]["cluster"]["properties"]["gpu"]["enum"]
    assert {name for name in allowed if name} == set(GPUS)


@pytest.mark.parametrize("name", GPUS)
def test_values_are_of_the_right_unit(name):
    gpu = GPUS[name]
    assert 10_000 * MIB < gpu.memory < 300_000 * MIB
    assert 1e12 < gpu.flops_fp32 < gpu.flops < 1e16
    assert 1e11 < gpu.bandwidth < 1e13
    assert gpu.between <= gpu.inside and gpu.host <= gpu.inside
    assert gpu.source


@pytest.mark.parametrize("name", [name for name in GPUS if name.partition("-")[2].endswith("gb")])
def test_a_name_with_a_size_has_about_that_memory(name):
    """What CUDA reports is a little less than what is built in, which is said in GB or GiB."""
    said = int(name.partition("-")[2].removesuffix("gb"))
    assert 0.97 * said * 1e9 < GPUS[name].memory < said * 1024**3


@pytest.mark.parametrize(("said", "meant"), [("h100", "h100-80gb"), ("A100-40", "a100-40gb"), ("H200", "h200")])
def test_a_name_without_its_size(workshop, said, meant):
    with pytest.raises(DsftError, match=f'did you mean "{meant}"'):
        workshop.plan(f"cluster.gpu={said}", "cluster.device=cuda")
