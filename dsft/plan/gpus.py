"""GPUs: what a training process can use of them. Sizes are bytes, rates a second, links in one direction."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2
PCIE3, PCIE4, PCIE5 = 12e9, 24e9, 48e9  # sixteen lanes, as copies reach; the specification says 15.8, 31.5 and 63


@dataclass(frozen=True)
class Gpu:
    """`memory`: what CUDA reports as total, which is less than the name says. `flops`: dense, 16 bits with fp32 sums: bf16,
    fp16 where `bf16` is False; `flops_fp32`: without TF32, as PyTorch multiplies fp32. `bandwidth`: of the memory.

    `inside`: to the other GPUs of a machine, NVLink's sum over links or PCIe; `between`: one GPU's share of the network of
    a typical machine (an assumption: clusters differ); `host`: to the machine's own memory. Rates are of the vendor's
    data sheet, `source`; a sheet that names NVLink in both directions is halved, and an MI250X is two devices.
    """

    memory: int
    flops: float
    flops_fp32: float
    bandwidth: float
    inside: float
    between: float
    host: float
    bf16: bool
    source: str


GPUS = {
    "t4": Gpu(15_095 * MIB, 65e12, 8.1e12, 320e9, PCIE3, 3e9, PCIE3, False, "NVIDIA T4 data sheet"),
    "v100-16gb": Gpu(16_160 * MIB, 125e12, 15.7e12, 900e9, 150e9, 3e9, PCIE3, False, "NVIDIA V100 data sheet, SXM2"),
    "v100-32gb": Gpu(32_510 * MIB, 125e12, 15.7e12, 900e9, 150e9, 3e9, PCIE3, False, "NVIDIA V100 data sheet, SXM2"),
    "rtx-3090": Gpu(24_260 * MIB, 71e12, 35.6e12, 936e9, PCIE4, 1.2e9, PCIE4, True, "NVIDIA Ampere GA102 white paper"),
    "rtx-4090": Gpu(24_210 * MIB, 165e12, 82.6e12, 1008e9, PCIE4, 1.2e9, PCIE4, True, "NVIDIA Ada white paper"),
    "a10g": Gpu(22_730 * MIB, 70e12, 35e12, 600e9, PCIE4, 3e9, PCIE4, True, "NVIDIA A10G data sheet"),
    "l4": Gpu(22_690 * MIB, 121e12, 30.3e12, 300e9, PCIE4, 3e9, PCIE4, True, "NVIDIA L4 data sheet"),
    "l40s": Gpu(45_590 * MIB, 362e12, 91.6e12, 864e9, PCIE4, 12.5e9, PCIE4, True, "NVIDIA L40S data sheet"),
    "a100-40gb": Gpu(40_340 * MIB, 312e12, 19.5e12, 1555e9, 300e9, 12.5e9, PCIE4, True, "NVIDIA A100 data sheet, SXM4"),
    "a100-80gb": Gpu(81_150 * MIB, 312e12, 19.5e12, 2039e9, 300e9, 25e9, PCIE4, True, "NVIDIA A100 data sheet, SXM4"),
    "h100-80gb": Gpu(81_080 * MIB, 989e12, 67e12, 3350e9, 450e9, 50e9, PCIE5, True, "NVIDIA H100 data sheet, SXM5"),
    "h100-96gb": Gpu(97_320 * MIB, 989e12, 67e12, 2400e9, 450e9, 50e9, PCIE5, True, "torchtitan: 95.04 GiB of HBM2e"),
    "h200": Gpu(143_160 * MIB, 989e12, 67e12, 4800e9, 450e9, 50e9, PCIE5, True, "NVIDIA H200 data sheet, SXM5"),
    "b200": Gpu(182_640 * MIB, 2250e12, 75e12, 8000e9, 900e9, 50e9, PCIE5, True, "NVIDIA DGX B200 data sheet"),
    "mi250x": Gpu(65_520 * MIB, 191.5e12, 47.9e12, 1638e9, 100e9, 25e9, PCIE4, True, "AMD MI250X data sheet; half"),
    "mi300x": Gpu(196_500 * MIB, 1307e12, 163e12, 5300e9, 448e9, 50e9, PCIE5, True, "AMD MI300X data sheet"),
}
