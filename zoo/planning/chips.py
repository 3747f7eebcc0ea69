"""What the chips that a plan is made for have: peak FLOP/s, memory, and its and the links' speed."""

import os
from dataclasses import dataclass

GB, GiB = 1e9, 2.0**30


@dataclass(frozen=True)
class Chip:
    """One device of a mesh, by its vendor's numbers; None where there is none to quote."""

    name: str
    """As a target names it."""
    flops: float | None
    """Peak of dense bf16 products, FLOP/s."""
    memory: float
    """Bytes of device memory."""
    bandwidth: float | None
    """Bytes a second between the chip and that memory."""
    interconnect: float | None
    """Bytes a second that the chip sends to others, over all of its links together."""
    kind: str
    """What compiles for it: tpu, gpu or cpu."""


# Sources. TPUs: the tables of specifications on the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU
# v6e" of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, and so on): "Peak compute
# per chip (bf16)", "HBM capacity per chip", "HBM bandwidth per chip", and half of "Bidirectional
# inter-chip interconnect (ICI) bandwidth (per chip)" (400 GBps of v5e, 1200 of v5p, 800 of v6e; of
# v4 the former "Interchip Interconnect BW", 2400 Gbps, one way). GPUs: NVIDIA's data sheets of the
# A100 80GB, H100 and H200 (SXM): dense bf16 (half of "with sparsity"), memory, and half of NVLink's
# 600 or 900 GB/s, which are both ways.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * GiB, 1228 * GB, 300 * GB, "tpu"),
        Chip("v5e", 197e12, 16 * GiB, 819 * GB, 200 * GB, "tpu"),
        Chip("v5p", 459e12, 95 * GiB, 2765 * GB, 600 * GB, "tpu"),
        Chip("v6e", 918e12, 32 * GiB, 1638 * GB, 400 * GB, "tpu"),
        Chip("a100", 312e12, 80 * GB, 2039 * GB, 600 * GB / 2, "gpu"),
        Chip("h100", 989e12, 80 * GB, 3350 * GB, 900 * GB / 2, "gpu"),
        Chip("h200", 989e12, 141 * GB, 4800 * GB, 900 * GB / 2, "gpu"),
    )
}


def cpu(devices: int) -> Chip:
    """A virtual device of this machine: its share of the memory, and no peak to quote."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Chip("cpu", None, memory / devices, None, None, "cpu")
