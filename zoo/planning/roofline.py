"""The least time of a step by the chip's peaks, and the peak that bounds it.

There are two bounds. That of full overlap takes all products, all of the memory's traffic and all
transfers as if the others were hidden behind the longest of them: no program on the chip is faster.
That by instruction (`schedule.times`) overlaps what the compiler does, and nothing else: this
program is not faster.
"""

from dataclasses import dataclass
from typing import Literal

from zoo.planning import hlo
from zoo.planning.job import Estimate
from zoo.planning.schedule import Times, times

Bound = Literal["compute", "memory", "interconnect"]


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step at each of a chip's peaks, and of its instructions one by one."""

    compute: float
    memory: float
    interconnect: float
    num_devices: int
    tokens: int
    model_flops: float | None
    peak: float
    """FLOP/s of one device."""
    by_op: Times
    """Of each instruction after the other, with no more at once than the program has."""

    @property
    def bound(self) -> Bound:
        """The resource that takes the longest."""
        seconds: dict[Bound, float] = {
            "compute": self.compute,
            "memory": self.memory,
            "interconnect": self.interconnect,
        }
        return max(seconds, key=lambda bound: seconds[bound])

    @property
    def seconds(self) -> float:
        """A step at that bound."""
        return max(self.compute, self.memory, self.interconnect)

    @property
    def tokens_per_second(self) -> float:
        """On all devices together, at the bound of full overlap."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization at the bound of full overlap."""
        return self.utilization(self.seconds)

    def utilization(self, seconds: float) -> float | None:
        """Model FLOPs utilization of a step of so long: recomputation counts for nothing."""
        if self.model_flops is None:
            return None
        return self.model_flops / (seconds * self.peak * self.num_devices)


def roofline(estimate: Estimate) -> Roofline | None:
    """The roofline of an estimate; None where the program or the chip's peaks are not known."""
    chip = estimate.target.chip
    if (
        chip.flops is None
        or chip.bandwidth is None
        or chip.interconnect is None
        or not estimate.text
    ):
        return None
    topology = estimate.topology
    if topology.num_slices > 1 and chip.network is None:
        return None
    return Roofline(
        compute=chip.seconds(estimate.flops, estimate.int8_flops) / estimate.num_devices,
        memory=estimate.traffic / chip.bandwidth,
        interconnect=sum(c.times * topology.transfer(c).seconds for c in estimate.collectives),
        num_devices=estimate.num_devices,
        tokens=estimate.job.tokens,
        model_flops=estimate.model_flops,
        peak=chip.flops,
        by_op=times(hlo.read(estimate.text), topology, estimate.kernels),
    )
