"""The least time of a step by the chip's peaks, and the peak that bounds it."""

from dataclasses import dataclass
from typing import Literal

from zoo.planning.job import Estimate

Bound = Literal["compute", "memory", "interconnect"]


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step at each of a chip's peaks, as if the others were hidden behind it."""

    compute: float
    memory: float
    interconnect: float
    num_devices: int
    tokens: int
    model_flops: float | None
    peak: float
    """FLOP/s of one device."""

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
        """On all devices together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization at that bound: recomputation counts for nothing."""
        if self.model_flops is None:
            return None
        return self.model_flops / (self.seconds * self.peak * self.num_devices)


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
    return Roofline(
        compute=estimate.flops / (chip.flops * estimate.num_devices),
        memory=estimate.traffic / chip.bandwidth,
        interconnect=sum(c.total for c in estimate.collectives) / chip.interconnect,
        num_devices=estimate.num_devices,
        tokens=estimate.job.tokens,
        model_flops=estimate.model_flops,
        peak=chip.flops,
    )
