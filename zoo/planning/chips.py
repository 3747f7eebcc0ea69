"""Chips by their vendors' numbers: peak FLOP/s, memory, and the speed of memory and links."""

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from zoo.nn.precision import Precision

GB, GiB, MiB, TERA = 1e9, 2.0**30, 2.0**20, 1e12

# Published dense peaks in TFLOP/s for each jax device, by the first of these patterns that
# `device_kind` holds as a word: (bf16, fp16, fp32), None for no such type. Sources: NVIDIA's
# data sheets (GeForce: with fp32 accumulation) and the Cloud TPU documentation (halved for v2, v3
# and 7x, whose chips are two devices each).
_PEAKS: dict[str, tuple[float | None, float | None, float | None]] = {
    "GB200": (2500, 2500, 80),
    "B200": (2250, 2250, 75),
    "H100 PCIe": (756, 756, 51),
    "GH200|H200|H100": (989, 989, 67),
    "A100": (312, 312, 19.5),
    "A10": (125, 125, 31.2),
    "L40S": (362, 362, 91.6),
    "L4": (121, 121, 30.3),
    "V100": (None, 125, 15.7),
    "T4": (None, 65, 8.1),
    "RTX 3090": (71, 71, 35.6),
    "RTX 4090": (165.2, 165.2, 82.6),
    "RTX 5090": (209.5, 209.5, 104.8),
    "MI300X": (1307.4, 1307.4, 163.4),
    "TPU v2": (22.5, None, None),
    "TPU v3": (61.5, None, None),
    "TPU v4$": (275, None, None),
    "TPU v5 lite|TPU v5e": (197, None, None),
    "TPU v5p?": (459, None, None),
    "TPU v6 lite|TPU v6e": (918, None, None),
    "TPU7x": (1153.5, None, None),
}


def peak_flops(device: jax.Device, dtype: Precision) -> float | None:
    """The published dense peak of a device in FLOP/s; None where it is not known, as on a CPU.

    fp32 is the peak outside the tensor cores. JAX computes fp32 products on recent GPUs as TF32
    unless told otherwise, and may then be several times faster. That of int8 is bf16's, by which
    runs in both compare.
    """
    return published_peak(device.device_kind, dtype)


def published_peak(device_kind: str, dtype: Precision) -> float | None:
    """`peak_flops` of the device that JAX calls `device_kind`, such as "TPU v5 lite"."""
    for pattern, peaks in _PEAKS.items():
        if re.search(rf"\b({pattern})(?!\w)", device_kind):
            peak = peaks[("bf16", "fp16", "fp32").index("bf16" if dtype == "int8" else dtype)]
            return None if peak is None else peak * 1e12
    return None


@dataclass(frozen=True)
class Chip:
    """One device of a mesh, by its vendor's numbers; None where the vendor quotes no number."""

    name: str
    """Its name in a target."""
    flops: float | None
    """Peak of dense bf16 products, FLOP/s."""
    memory: float
    """Bytes of device memory."""
    bandwidth: float | None
    """Bytes per second between the chip and that memory."""
    interconnect: float | None
    """Bytes per second that the chip sends to others of its slice, over all of its links."""
    kind: str
    """The compiler's platform: tpu, gpu or cpu."""
    pattern: str = ""
    """Matches the names that JAX has for it."""
    links: int = 0
    """Links to its neighbours, which share `interconnect`; 0 where a switch joins a slice."""
    network: float | None = None
    """Bytes per second that the chip sends to those of other slices, or of other machines."""
    int8: float | None = None
    """Peak of dense products of int8, op/s."""

    def seconds(self, flops: float, int8: float = 0.0) -> float:
        """The least time of so many FLOPs, of which `int8` are of int8; 0 where no peak is known.

        At the peak of bf16 where that of int8 is not known.
        """
        if self.flops is None:
            return 0.0
        return (flops - int8) / self.flops + int8 / (self.int8 or self.flops)


def _peak(device_kind: str) -> float | None:
    return published_peak(device_kind, "bf16")


# Sources; of the FLOP/s beside `published_peak`. The memory of TPUs is what libtpu 0.0.42.1 has
# available for a program, by its own error; that of GPUs the total of `nvidia-smi` (MI300X: AMD's
# data sheet). The rest of TPUs: the tables of specifications on the pages "TPU v4", "TPU v5e", "TPU
# v5p" and "TPU v6e" of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, and so on):
# "HBM bandwidth per chip", and half of "Bidirectional inter-chip interconnect (ICI) bandwidth (per
# chip)" (400 GBps of v5e, 1200 of v5p, 800 of v6e; of v4 the former "Interchip Interconnect BW",
# 2400 Gbps, one way). Of GPUs: the vendors' data sheets and, for GeForce, NVIDIA's whitepapers of
# the architectures; half of NVLink's 600, 900 or 1800 GB/s, which are both ways, or of PCI
# Express's 64 or 128. To other slices: "Data center network bandwidth" of the same pages, 6.4 Tbps
# for the 256 chips of a v5e pod, 25.6 for v6e's, 50 Gbps per chip of v5p (v4: none); of the DGX
# A100 200 Gb/s per GPU, of the DGX H100, H200 and B200 400. Of int8: "Peak compute per chip (Int8)"
# of the same pages (v4: "275 teraflops (bf16 or int8)"), and the data sheets' "INT8 Tensor Core"
# without sparsity.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", _peak("TPU v4"), 30.75 * GiB, 1228 * GB, 300 * GB, "tpu", "TPU v4$", 6,
             int8=275 * TERA),
        Chip("v5e", _peak("TPU v5e"), 15.75 * GiB, 819 * GB, 200 * GB, "tpu", "TPU v5 ?(lite|e)", 4,
             3.125 * GB, 393 * TERA),
        Chip("v5p", _peak("TPU v5p"), 95.74 * GiB, 2765 * GB, 600 * GB, "tpu", "TPU v5p?$", 6,
             6.25 * GB, 918 * TERA),
        Chip("v6e", _peak("TPU v6e"), 31.25 * GiB, 1638 * GB, 400 * GB, "tpu", "TPU v6 ?(lite|e)",
             4, 12.5 * GB, 1836 * TERA),
        Chip("a10", _peak("A10"), 23_028 * MiB, 600 * GB, 32 * GB, "gpu", r"\bA10$",
             int8=250 * TERA),
        Chip("a100-40", _peak("A100"), 40_960 * MiB, 1555 * GB, 300 * GB, "gpu", "A100.*40GB",
             network=25 * GB, int8=624 * TERA),
        Chip("a100-80", _peak("A100"), 81_920 * MiB, 2039 * GB, 300 * GB, "gpu", "A100.*80GB",
             network=25 * GB, int8=624 * TERA),
        Chip("l4", _peak("L4"), 23_034 * MiB, 300 * GB, 32 * GB, "gpu", r"\bL4$",
             int8=242 * TERA),
        Chip("l40s", _peak("L40S"), 46_068 * MiB, 864 * GB, 32 * GB, "gpu", "L40S",
             int8=733 * TERA),
        Chip("h100", _peak("H100"), 81_559 * MiB, 3350 * GB, 450 * GB, "gpu", "H100(?! PCIe)",
             network=50 * GB, int8=1979 * TERA),
        Chip("h200", _peak("H200"), 143_771 * MiB, 4800 * GB, 450 * GB, "gpu", "H200",
             network=50 * GB, int8=1979 * TERA),
        Chip("b200", _peak("B200"), 183_359 * MiB, 8000 * GB, 900 * GB, "gpu", r"\bB200",
             network=50 * GB, int8=4500 * TERA),
        Chip("rtx3090", _peak("RTX 3090"), 24_576 * MiB, 936 * GB, 32 * GB, "gpu", "RTX 3090",
             int8=284 * TERA),
        Chip("rtx4090", _peak("RTX 4090"), 24_564 * MiB, 1008 * GB, 32 * GB, "gpu", "RTX 4090",
             int8=660.6 * TERA),
        Chip("rtx5090", _peak("RTX 5090"), 32_607 * MiB, 1792 * GB, 64 * GB, "gpu", "RTX 5090",
             int8=838 * TERA),
        Chip("mi300x", _peak("MI300X"), 192 * GiB, 5300 * GB, 448 * GB, "gpu", "MI300X",
             network=50 * GB, int8=2614.9 * TERA),
    )
}  # fmt: skip


def by_name(name: str) -> Chip | None:
    """A chip by its name in a target, or a GPU by its memory alone, as 24gib; else None."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)gib", name):
        return Chip(name.replace("gib", "GiB"), None, float(match[1]) * GiB, None, None, "gpu")
    return CHIPS.get({"a100": "a100-80"}.get(name, name))


def cpu(devices: int) -> Chip:
    """A virtual device of this machine: its share of the memory, and no peak to quote."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Chip("cpu", None, memory / devices, None, None, "cpu")


def of_device(device: Any, devices: int) -> Chip:
    """The chip that a device of JAX's is, with the memory that JAX may use of it."""
    if device.platform == "cpu":
        return cpu(devices)
    known = (chip for chip in CHIPS.values() if re.search(chip.pattern, device.device_kind))
    unknown = Chip(device.device_kind, None, math.inf, None, None, device.platform)
    chip = next(known, unknown)
    usable = (device.memory_stats() or {}).get("bytes_limit", chip.memory)
    return dataclasses.replace(chip, memory=float(usable))
