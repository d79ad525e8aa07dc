"""GPUs: what a job can use of them. Memory is what CUDA reports as total, in bytes; rates are a second, one direction."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2


@dataclass(frozen=True)
class Gpu:
    """`flops`: dense bf16 (fp16 where there is no bf16) with fp32 sums. `bandwidth`: of its memory, bytes a second.

    `inside`: bytes a second to the other GPUs of a machine; `between`: of one GPU's share of the network of a typical
    machine. `source`: the vendor's data sheet.
    """

    memory: int
    flops: float
    bandwidth: float
    inside: float
    between: float
    bf16: bool
    source: str


PCIE3, PCIE4, PCIE5 = 12e9, 24e9, 48e9  # x16 as reached, not as named

GPUS = {
    "t4": Gpu(15_095 * MIB, 65e12, 320e9, PCIE3, 3e9, False, "NVIDIA T4 data sheet"),
    "v100-16gb": Gpu(16_160 * MIB, 125e12, 900e9, 150e9, 3e9, False, "NVIDIA V100 data sheet (SXM2)"),
    "v100-32gb": Gpu(32_510 * MIB, 125e12, 900e9, 150e9, 3e9, False, "NVIDIA V100 data sheet (SXM2)"),
    "rtx-3090": Gpu(24_260 * MIB, 71e12, 936e9, PCIE4, 1.25e9, True, "NVIDIA GA102 white paper"),
    "rtx-4090": Gpu(24_210 * MIB, 165e12, 1008e9, PCIE4, 1.25e9, True, "NVIDIA Ada white paper"),
    "a10g": Gpu(22_730 * MIB, 70e12, 600e9, PCIE4, 3e9, True, "AWS G5 instances; NVIDIA A10G data sheet"),
    "l4": Gpu(22_690 * MIB, 121e12, 300e9, PCIE4, 3e9, True, "NVIDIA L4 data sheet"),
    "l40s": Gpu(45_590 * MIB, 362e12, 864e9, PCIE4, 12.5e9, True, "NVIDIA L40S data sheet"),
    "a100-40gb": Gpu(40_340 * MIB, 312e12, 1555e9, 300e9, 12.5e9, True, "NVIDIA A100 data sheet (SXM4)"),
    "a100-80gb": Gpu(81_150 * MIB, 312e12, 2039e9, 300e9, 25e9, True, "NVIDIA A100 data sheet (SXM4)"),
    "h100-80gb": Gpu(81_080 * MIB, 989e12, 3350e9, 450e9, 50e9, True, "NVIDIA H100 data sheet (SXM5)"),
    "h100-96gb": Gpu(97_320 * MIB, 989e12, 2400e9, 450e9, 50e9, True, "PyTorch's torchtitan benchmarks: 95.04 GiB, HBM2e"),
    "h200": Gpu(143_160 * MIB, 989e12, 4800e9, 450e9, 50e9, True, "NVIDIA H200 data sheet (SXM5)"),
    "b200": Gpu(182_640 * MIB, 2250e12, 8000e9, 900e9, 50e9, True, "NVIDIA DGX B200 data sheet"),
    "mi250x": Gpu(65_520 * MIB, 191.5e12, 1638e9, 100e9, 25e9, True, "AMD Instinct MI250X data sheet; one of its two dies"),
    "mi300x": Gpu(196_500 * MIB, 1307e12, 5300e9, 448e9, 50e9, True, "AMD Instinct MI300X data sheet"),
}
