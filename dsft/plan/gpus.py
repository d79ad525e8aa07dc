"""GPUs: what a training process can use of them. Sizes are bytes, rates are a second, links are in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from dsft.plan.units import MIB


@dataclass(frozen=True)
class Machine:
    """What a GPU has of a machine. Both are an assumption, for clusters differ: of the machine that the vendor builds, or
    of one that can be rented."""

    network: float  # bytes a second to other machines
    memory: float  # bytes of the machine's own memory


@dataclass(frozen=True)
class Gpu:
    """One device: an MI250X is two. Sheets give NVLink in both directions together, of which this is one."""

    memory: int  # bytes that CUDA reports as total: less than is built in, by what ECC and the driver take
    flops: float  # operations a second, dense, 16 bits with fp32 sums: bf16, or fp16 where `bf16` is False
    flops_fp32: float  # operations a second, as PyTorch multiplies fp32: without TF32, which dsft.train leaves off
    bandwidth: float  # bytes a second, of the device's memory
    inside: float  # bytes a second to the other GPUs of a machine: all links of NVLink or Infinity Fabric, or PCIe
    machine: Machine  # in which it is taken to be
    host: float  # bytes a second to the machine's own memory
    bf16: bool
    source: str  # of operations, bandwidth and links between GPUs


# Sixteen lanes, as copies reach: about three quarters of the specification's 15.8, 31.5 and 63 GB/s (PCI-SIG).
PCIE3, PCIE4, PCIE5 = 12e9, 24e9, 48e9


def machine(gpus: int, *, gigabits: float, gigabytes: float) -> Machine:
    """Of a machine's network (Gb/s) and memory what one of its GPUs has."""
    return Machine(gigabits * 1e9 / 8 / gpus, gigabytes * 1e9 / gpus)


DESKTOP = machine(2, gigabits=20, gigabytes=128)  # 10 Gb/s Ethernet for each
G4DN = machine(8, gigabits=100, gigabytes=412)  # AWS g4dn.metal, 384 GiB
G5 = machine(8, gigabits=100, gigabytes=824)  # AWS g5.48xlarge and g6.48xlarge, 768 GiB
G6E = machine(8, gigabits=400, gigabytes=1649)  # AWS g6e.48xlarge, 1536 GiB
DGX_1 = machine(8, gigabits=4 * 100, gigabytes=512)  # four EDR InfiniBand adapters
DGX_A100_320 = machine(8, gigabits=8 * 200, gigabytes=1000)  # eight HDR InfiniBand adapters
DGX_A100_640 = machine(8, gigabits=8 * 200, gigabytes=2000)
DGX_H100 = machine(8, gigabits=8 * 400, gigabytes=2000)  # eight NDR InfiniBand adapters; DGX H200 and B200 have as much
ND_MI300X = machine(8, gigabits=8 * 400, gigabytes=1986)  # Azure ND MI300X v5, 1850 GiB
FRONTIER = machine(8, gigabits=4 * 200, gigabytes=512)  # four Slingshot adapters, four MI250X of two devices (OLCF)

GPUS = {
    "t4": Gpu(15_095 * MIB, 65e12, 8.1e12, 320e9, PCIE3, G4DN, PCIE3, False, "NVIDIA T4 product brief"),
    "v100-16gb": Gpu(16_160 * MIB, 125e12, 15.7e12, 900e9, 150e9, DGX_1, PCIE3, False, "NVIDIA V100 SXM data sheet"),
    "v100-32gb": Gpu(32_510 * MIB, 125e12, 15.7e12, 900e9, 150e9, DGX_1, PCIE3, False, "NVIDIA V100 SXM data sheet"),
    "rtx-3090": Gpu(24_260 * MIB, 71e12, 35.6e12, 936e9, PCIE4, DESKTOP, PCIE4, True, "NVIDIA GA102 white paper"),
    "rtx-4090": Gpu(24_210 * MIB, 165e12, 82.6e12, 1008e9, PCIE4, DESKTOP, PCIE4, True, "NVIDIA Ada white paper"),
    "a10g": Gpu(22_730 * MIB, 70e12, 35e12, 600e9, PCIE4, G5, PCIE4, True, "NVIDIA A10G data sheet"),
    "l4": Gpu(22_690 * MIB, 121e12, 30.3e12, 300e9, PCIE4, G5, PCIE4, True, "NVIDIA L4 data sheet"),
    "l40s": Gpu(45_590 * MIB, 362e12, 91.6e12, 864e9, PCIE4, G6E, PCIE4, True, "NVIDIA L40S data sheet"),
    "a100-40gb": Gpu(
        40_340 * MIB, 312e12, 19.5e12, 1555e9, 300e9, DGX_A100_320, PCIE4, True, "NVIDIA A100 SXM data sheet"
    ),
    "a100-80gb": Gpu(
        81_150 * MIB, 312e12, 19.5e12, 2039e9, 300e9, DGX_A100_640, PCIE4, True, "NVIDIA A100 SXM data sheet"
    ),
    "h100-80gb": Gpu(81_080 * MIB, 989e12, 67e12, 3350e9, 450e9, DGX_H100, PCIE5, True, "NVIDIA H100 SXM data sheet"),
    # With HBM2e: Meta's Grand Teton, 400 Gb/s for a GPU. Memory and its bandwidth as torchtitan's benchmarks say.
    "h100-96gb": Gpu(97_320 * MIB, 989e12, 67e12, 2400e9, 450e9, DGX_H100, PCIE5, True, "NVIDIA H100 SXM data sheet"),
    "h200": Gpu(143_160 * MIB, 989e12, 67e12, 4800e9, 450e9, DGX_H100, PCIE5, True, "NVIDIA H200 SXM data sheet"),
    "b200": Gpu(182_640 * MIB, 2250e12, 75e12, 8000e9, 900e9, DGX_H100, PCIE5, True, "NVIDIA DGX B200 data sheet"),
    # Its matrix units multiply fp32. To most of the other devices go two links of 50 GB/s (OLCF: 50 to 100 GB/s).
    "mi250x": Gpu(65_520 * MIB, 191.5e12, 47.9e12, 1638e9, 100e9, FRONTIER, PCIE4, True, "AMD MI250X data sheet; half"),
    # Seven links of 64 GB/s.
    "mi300x": Gpu(196_500 * MIB, 1307e12, 163.4e12, 5300e9, 448e9, ND_MI300X, PCIE5, True, "AMD MI300X data sheet"),
}
