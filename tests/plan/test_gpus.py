"""The table of GPUs against what vendors publish, and against the schema."""

from __future__ import annotations

import pytest

from dsft.errors import DsftError
from dsft.plan.gpus import GPUS
from dsft.recipe.schema import load_schema

GIB = 2**30

# As published, in the sheets' own units, a whole board each: GiB built in; TFLOPS of 16 bits with fp32 sums and without
# sparsity, and of fp32 without TF32; TB/s of memory; GB/s of NVLink in both directions, None where GPUs have PCIe only;
# PCIe's generation. Sheets that print a number with sparsity have twice the one here.
FACTS = {
    "t4": (16, 65, 8.1, 0.320, None, 3),
    "v100-16gb": (16, 125, 15.7, 0.900, 300, 3),
    "v100-32gb": (32, 125, 15.7, 0.900, 300, 3),
    "rtx-3090": (24, 71, 35.6, 0.936, None, 4),
    "rtx-4090": (24, 165.2, 82.6, 1.008, None, 4),
    "a10g": (24, 140 / 2, 35, 0.600, None, 4),
    "l4": (24, 242 / 2, 30.3, 0.300, None, 4),
    "l40s": (48, 362.05, 91.6, 0.864, None, 4),
    "a100-40gb": (40, 312, 19.5, 1.555, 600, 4),
    "a100-80gb": (80, 312, 19.5, 2.039, 600, 4),
    "h100-80gb": (80, 1979 / 2, 67, 3.35, 900, 5),
    "h100-96gb": (96, 1979 / 2, 67, 2.4, 900, 5),
    "h200": (141, 1979 / 2, 67, 4.8, 900, 5),
    "b200": (1440 / 8, 36_000 / 8 / 2, 600 / 8, 64 / 8, 14_400 / 8, 5),  # DGX B200: eight of them, 36 PFLOPS sparse
    "mi250x": (128, 383, 95.7, 3.2768, 2 * 2 * 100, 4),  # two devices, each with two Infinity Fabric links to the next
    "mi300x": (192, 1307.4, 163.4, 5.3, 7 * 128, 5),  # Infinity Fabric: seven links
}
DEVICES = {"mi250x": 2}  # that a board is to a process
LANES = {3: 15.75, 4: 31.5, 5: 63.0}  # GB/s of sixteen in one direction (PCI-SIG)

# Gb/s of a machine's network, its devices, and GB of its own memory.
MACHINES = {
    "t4": (100, 8, 384 * 2**30 / 1e9),  # AWS g4dn.metal
    "v100-16gb": (400, 8, 512),  # DGX-1
    "v100-32gb": (400, 8, 512),
    "rtx-3090": (10, 1, 64),
    "rtx-4090": (10, 1, 64),
    "a10g": (100, 8, 768 * 2**30 / 1e9),  # AWS g5.48xlarge
    "l4": (100, 8, 768 * 2**30 / 1e9),  # AWS g6.48xlarge
    "l40s": (400, 8, 1536 * 2**30 / 1e9),  # AWS g6e.48xlarge
    "a100-40gb": (1600, 8, 1000),  # DGX A100 320GB
    "a100-80gb": (1600, 8, 2000),  # DGX A100 640GB
    "h100-80gb": (3200, 8, 2000),  # DGX H100
    "h100-96gb": (3200, 8, 2000),  # Grand Teton
    "h200": (3200, 8, 2000),  # DGX H200
    "b200": (3200, 8, 2000),  # DGX B200
    "mi250x": (800, 8, 512),  # Frontier
    "mi300x": (3200, 8, 1850 * 2**30 / 1e9),  # Azure ND MI300X v5
}
WITHOUT_BF16 = {"t4", "v100-16gb", "v100-32gb"}  # before Ampere
near = pytest.approx


def test_a_recipe_can_name_each_of_them():
    allowed = load_schema()["properties"]["cluster"]["properties"]["gpu"]["enum"]
    assert {name for name in allowed if name} == set(GPUS) == set(FACTS) == set(MACHINES)


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_those_that_are_published(name):
    gpu, devices = GPUS[name], DEVICES.get(name, 1)
    _, flops, fp32, bandwidth, nvlink, pcie = FACTS[name]
    assert gpu.flops == near(flops * 1e12 / devices, rel=0.01)
    assert gpu.flops_fp32 == near(fp32 * 1e12 / devices, rel=0.01)
    assert gpu.bandwidth == near(bandwidth * 1e12 / devices, rel=0.01)
    assert gpu.host == near(0.76 * LANES[pcie] * 1e9, rel=0.01)  # what copies reach of it
    assert gpu.inside == (near(nvlink * 1e9 / 2 / devices, rel=0.01) if nvlink else gpu.host)
    assert gpu.bf16 == (name not in WITHOUT_BF16)
    assert gpu.source


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_its_share_of_the_machine(name):
    gigabits, devices, gigabytes = MACHINES[name]
    assert GPUS[name].machine.network == near(gigabits / 8 * 1e9 / devices)
    assert GPUS[name].machine.memory == near(gigabytes * 1e9 / devices, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_cuda_reports_a_little_less_memory_than_is_built_in(name):
    """ECC takes a sixteenth of GDDR6, which T4, A10G, L4 and L40S have on; HBM keeps it beside."""
    built_in = FACTS[name][0] / DEVICES.get(name, 1) * GIB
    ecc = 15 / 16 if name in {"t4", "a10g", "l4", "l40s"} else 1
    assert 0.98 * ecc * built_in < GPUS[name].memory < ecc * built_in


@pytest.mark.parametrize("name", [name for name in GPUS if name.endswith("gb")])
def test_a_name_with_a_size_means_that_memory(name):
    assert FACTS[name][0] == int(name.partition("-")[2].removesuffix("gb"))


@pytest.mark.parametrize(("said", "meant"), [("h100", "h100-80gb"), ("A100-40", "a100-40gb"), ("H200", "h200")])
def test_a_name_without_its_size(workshop, said, meant):
    with pytest.raises(DsftError, match=f'did you mean "{meant}"'):
        workshop.plan(f"cluster.gpu={said}", "cluster.device=cuda")
