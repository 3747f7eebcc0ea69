"""The places of a program's devices, the links between them, and the seconds of a collective.

A slice of TPUs is a grid whose chips have links to their neighbours alone. A dimension closes to a
ring only where the slice has all of it: 16 chips of v5e and v6e; of v4, v5p and 7x every dimension,
if all are multiples of 4 (so the pages on each version of the Cloud TPU documentation; that of 7x
refers to v5p). The two devices of a 7x share its links, each with half. GPUs of one machine are
joined by a switch. Between slices, or machines, there is a slower network.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.planning.collectives import Collective
from zoo.training.chips import Chip

_RING = {"v4": 4, "v5e": 16, "v5p": 4, "v6e": 16, "tpu7x": 4}


@dataclass(frozen=True)
class Transfer:
    """A collective at work: its seconds, and the links that are its own for so long."""

    seconds: float
    links: frozenset[str]


@dataclass(frozen=True)
class Topology:
    """The places of a program's devices, in its order, and the speeds of the links."""

    chip: Chip
    shape: tuple[int, ...]
    """Of a slice."""
    slices: tuple[int, ...]
    """The slice of each device."""
    places: tuple[tuple[int, ...], ...]
    """The coordinates of each device in its slice."""

    @property
    def num_slices(self) -> int:
        """Slices, or machines, of the devices."""
        return len(set(self.slices))

    @property
    def rings(self) -> tuple[bool, ...]:
        """Whether each dimension closes to a ring."""
        whole = _RING.get(self.chip.name, 0)
        if self.chip.links == 6:
            return (all(size % whole == 0 for size in self.shape),) * len(self.shape)
        return tuple(size == whole for size in self.shape)

    @property
    def link(self) -> float:
        """Bytes per second of one link, one way."""
        return (self.chip.interconnect or math.inf) / max(self.chip.links, 1)

    def between(self, collective: Collective) -> float:
        """Of the bytes that a device sends each time, those to other slices."""
        if collective.kind == "collective-permute":
            crossing = any(self.slices[a] != self.slices[b] for a, b in collective.pairs)
            return collective.bytes if crossing else 0.0
        group = self._widest(collective)
        n, k = len(group), len({self.slices[device] for device in group})
        if k == 1:
            return 0.0
        # By parts: of an all-gather a slice's chips each fetch their part from the other slices,
        # and share it; an all-to-all has nothing to share.
        parts = n - n / k if collective.kind == "all-to-all" else k - 1
        return collective.bytes * parts / (n - 1)

    def transfer(self, collective: Collective) -> Transfer:
        """The seconds of a collective, each time, with the links to itself.

        Each link moves data both ways at once, and all that a group's devices have in the
        dimensions of the group take part: two of a ring in each dimension, of a line one, as its
        ends have no more. Groups that lie between each other share them. What is for other slices
        goes there at the same time.
        """
        outside = self.between(collective)
        seconds = outside / (self.chip.network or math.inf)
        links = {"network"} if outside else set()
        if not self.chip.links:
            inside = (collective.bytes - outside) / (self.chip.interconnect or math.inf)
            return Transfer(max(seconds, inside), frozenset(links | {"switch"}))
        if collective.kind == "collective-permute":
            loads = Counter(link for pair in collective.pairs for link in self._route(*pair))
            inside = collective.bytes * max(loads.values(), default=0) / self.link
            links |= {f"{axis}{way:+d}" for _, axis, way in loads}
            return Transfer(max(seconds, inside), frozenset(links))
        spans = list(self._spans(self._widest(collective)))
        if collective.kind == "all-to-all":
            # A device's bytes go to all places of a dimension: the middle of a line has the most.
            held = collective.bytes * collective.group_size / max(collective.group_size - 1, 1)
            inside = max((held * n / (8 if ring else 4) * shared for _, n, ring, shared in spans),
                         default=0.0) / self.link  # fmt: skip
        else:
            used = sum((2 if ring else 1) / shared for _, _, ring, shared in spans)
            inside = (collective.bytes - outside) / (used * self.link) if used else 0.0
        links |= {f"{axis}{way:+d}" for axis, *_ in spans for way in (-1, 1)}
        return Transfer(max(seconds, inside), frozenset(links))

    def _widest(self, collective: Collective) -> Sequence[int]:
        """The group that is spread over most slices."""
        return max(collective.groups, key=lambda group: len({self.slices[x] for x in group}))

    def _spans(self, group: Sequence[int]) -> Iterator[tuple[int, int, bool, float]]:
        """Of each dimension over which a group is spread: how many places, whether in a ring, and
        how many groups share its links."""
        here = [self.places[x] for x in group if self.slices[x] == self.slices[group[0]]]
        for axis, size in enumerate(self.shape):
            places = sorted({place[axis] for place in here})
            reach = places[-1] - places[0] + 1
            if len(places) > 1:
                gaps = {b - a for a, b in itertools.pairwise(places)}
                ring = self.rings[axis] and len(gaps) == 1 and len(places) * min(gaps) == size
                yield axis, len(places), ring, (size if ring else reach) / len(places)

    def _route(self, source: int, target: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The links on the way between two devices of a slice, one dimension after the other."""
        if self.slices[source] != self.slices[target]:
            return
        place, goal = list(self.places[source]), self.places[target]
        for axis, size in enumerate(self.shape):
            ahead = goal[axis] - place[axis]
            if self.rings[axis] and abs(ahead) > size / 2:
                ahead -= int(math.copysign(size, ahead))
            for _ in range(abs(ahead)):
                way = 1 if ahead > 0 else -1
                yield tuple(place), axis, way
                place[axis] = (place[axis] + way) % size


def of_devices(chip: Chip, shape: tuple[int, ...], devices: Sequence[Any]) -> Topology:
    """The topology of the devices of a mesh, in its order, by what JAX says of them.

    `shape` is a slice's. Of devices that stand for others, as virtual ones do, each slice has as
    many as follow each other.
    """
    if chip.links:
        places = tuple(tuple(device.coords)[: len(shape)] for device in devices)
        slices = tuple(getattr(device, "slice_index", 0) or 0 for device in devices)
        return Topology(chip, shape, slices, places)
    size = math.prod(shape)
    ids = {device: place for place, device in enumerate(sorted(devices, key=lambda d: d.id))}
    found = [ids[device] for device in devices]
    return Topology(
        chip,
        shape,
        tuple(place // size for place in found),
        tuple((place % size,) for place in found),
    )
