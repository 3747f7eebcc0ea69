"""Chips by their vendors' numbers: peak FLOP/s, memory, and the speed of memory and links."""

import re
from dataclasses import dataclass

import jax

from zoo.nn.precision import Precision

GB, GiB, MiB, TERA = 1e9, 2.0**30, 2.0**20, 1e12


@dataclass(frozen=True)
class Chip:
    """One device of a mesh, by its vendor's numbers; None where the vendor quotes no number."""

    name: str
    """Its name in a target."""
    kind: str
    """The compiler's platform: tpu, gpu or cpu."""
    memory: float
    """Bytes of device memory that a program may have."""
    flops: float | None = None
    """Peak of dense bf16 products, FLOP/s."""
    bandwidth: float | None = None
    """Bytes per second between the device and that memory."""
    interconnect: float | None = None
    """Bytes per second that the device sends to others of its slice, over all of its links."""
    network: float | None = None
    """Bytes per second that the device sends to other slices, or to other machines."""
    int8: float | None = None
    """Peak of dense products of int8, op/s."""
    links: int = 0
    """Links to its neighbours, which share `interconnect`; 0 where a switch joins a slice."""
    devices: int = 1
    """Devices, in JAX's sense, per place of a slice."""

    def seconds(self, flops: float, int8: float = 0.0) -> float:
        """The least time of so many FLOPs, of which `int8` are of int8; 0 where no peak is known.

        int8 counts at the peak of bf16 where its own is not known.
        """
        if self.flops is None:
            return 0.0
        return (flops - int8) / self.flops + int8 / (self.int8 or self.flops)


# One line per device: the names that JAX has for it (a pattern of words), its name in a target ("-"
# for none), then in TFLOP/s the dense peaks of bf16, fp16, fp32 and int8; memory in GiB (TPU) or
# MiB (GPU); GB/s of the memory, of all links one way, and of the network; and the links.
#
# TPUs: memory is what libtpu 0.0.42.1 says is available for a program, in its error for one that
# needs more. The rest: the tables of specifications at docs.cloud.google.com/tpu/docs/v4, v5e, v5p,
# v6e and tpu7x. Links: half of "Bidirectional inter-chip interconnect (ICI) bandwidth per chip"
# (400 GB/s of v5e, 1200 of v5p, 800 of v6e, 1200 of 7x; of v4 the former "Interchip Interconnect
# BW", 2400 Gbps, one way). Network: "Data center network (DCN) bandwidth", 6.4 Tbps for the 256
# chips of a v5e pod, per chip 50 Gbps of v5p, 100 of v6e and 7x (v4: none). A chip of v2, v3 and 7x
# is two devices, each with half of its numbers. The link between the two of a 7x is not counted.
# int8: "Peak compute per chip (Int8)" (v4: "bf16 or int8"; 7x: none, its fp8 is no int8).
#
# GPUs: the vendors' data sheets and, for GeForce, NVIDIA's whitepapers of the architectures, with
# fp32 accumulation; int8 without sparsity. Memory: the total of `nvidia-smi` (MI300X: AMD's data
# sheet). Links: half of NVLink's 600, 900 or 1800 GB/s, which are both ways, or of PCI Express's 64
# or 128. Network: of the DGX A100 200 Gb/s per GPU, of the DGX H100, H200 and B200 400.
_TABLE = """
TPU v2             -       22.5   -      -      -      -      -    -   -     0
TPU v3             -       61.5   -      -      -      -      -    -   -     0
TPU v4$            v4      275    -      -      275    30.75  1228 300 -     6
TPU v5 ?(lite|e)   v5e     197    -      -      393    15.75  819  200 3.125 4
TPU v5p?$          v5p     459    -      -      918    95.74  2765 600 6.25  6
TPU v6 ?(lite|e)   v6e     918    -      -      1836   31.25  1638 400 12.5  4
TPU7x              tpu7x   1153.5 -      -      -      94.75  3690 300 6.25  6
A10                a10     125    125    31.2   250    23028  600  32  -     0
A100.*40GB         a100-40 312    312    19.5   624    40960  1555 300 25    0
A100               a100-80 312    312    19.5   624    81920  2039 300 25    0
L4                 l4      121    121    30.3   242    23034  300  32  -     0
L40S               l40s    362    362    91.6   733    46068  864  32  -     0
H100 PCIe          -       756    756    51     -      -      -    -   -     0
H100               h100    989    989    67     1979   81559  3350 450 50    0
GH200|H200         h200    989    989    67     1979   143771 4800 450 50    0
B200               b200    2250   2250   75     4500   183359 8000 900 50    0
GB200              -       2500   2500   80     -      -      -    -   -     0
RTX 3090           rtx3090 71     71     35.6   284    24576  936  32  -     0
RTX 4090           rtx4090 165.2  165.2  82.6   660.6  24564  1008 32  -     0
RTX 5090           rtx5090 209.5  209.5  104.8  838    32607  1792 64  -     0
MI300X             mi300x  1307.4 1307.4 163.4  2614.9 196608 5300 448 50    0
V100               -       -      125    15.7   -      -      -    -   -     0
T4                 -       -      65     8.1    -      -      -    -   -     0
"""


def _read(line: str) -> tuple[re.Pattern[str], dict[str, float | None], Chip | None]:
    """The pattern of a line, its peaks by dtype, and the chip of a target."""
    pattern, (name, *cells) = re.split(r" {2,}", line)[0], line.split()[-10:]
    numbers = [None if cell == "-" else float(cell) for cell in cells]
    bf16, fp16, fp32, int8, memory, bandwidth, interconnect, network, links = numbers
    compiled = re.compile(rf"\b({pattern})(?!\w)")
    peaks = {"bf16": bf16, "fp16": fp16, "fp32": fp32}
    if memory is None:
        return compiled, peaks, None
    kind, unit = ("tpu", GiB) if "TPU" in pattern else ("gpu", MiB)
    chip = Chip(
        name,
        kind,
        memory * unit,
        bf16 and bf16 * TERA,
        bandwidth and bandwidth * GB,
        interconnect and interconnect * GB,
        network and network * GB,
        int8 and int8 * TERA,
        links=int(links or 0),
        devices=2 if name == "tpu7x" else 1,
    )
    return compiled, peaks, chip


_LINES = [_read(line) for line in _TABLE.strip().splitlines()]
CHIPS = {chip.name: chip for _, _, chip in _LINES if chip is not None}


def peak_flops(device: jax.Device, dtype: Precision) -> float | None:
    """The published dense peak of a device in FLOP/s; None where it is not known, as on a CPU.

    fp32 is the peak outside the tensor cores. JAX computes fp32 products on recent GPUs as TF32
    unless told otherwise, and may then be several times faster. For int8 it is bf16's, so that runs
    in both compare.
    """
    for pattern, peaks, _ in _LINES:
        if pattern.search(device.device_kind):
            peak = peaks["bf16" if dtype == "int8" else dtype]
            return None if peak is None else peak * TERA
    return None


def of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`; None for one that is no target."""
    found = (chip for pattern, _, chip in _LINES if pattern.search(device_kind))
    return next(found, None)
