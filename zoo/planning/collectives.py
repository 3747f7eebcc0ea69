"""The bytes that a compiled step moves between devices, and the seconds over the links it has.

A collective's bytes are what one device sends if the collective runs around a ring, with S the
bytes of the whole and n the devices of a group: all-gather and reduce-scatter (n-1)/n S,
all-reduce twice that, all-to-all (n-1)/n of what the device holds, collective-permute all of that.

A slice of TPUs is a grid whose chips have links to their neighbours alone. A dimension closes to a
ring only where the slice has all of it: 16 chips of v5e and v6e; of v4, v5p and 7x every dimension,
if all are multiples of 4 (as the Cloud TPU documentation's page on each version says; that on 7x
refers to v5p). The two devices of a 7x share its links, each with half. GPUs of one machine are
joined by a switch. Between slices, or machines, there is a slower network.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from zoo.planning import hlo
from zoo.planning.hlo import HLOError, Instruction, Program
from zoo.training.chips import Chip

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective of a program, with how often a step runs it."""

    kind: Kind
    bytes: float
    """Bytes that a device sends each time."""
    times: int
    group_size: int
    groups: Groups = ()
    """The devices that take part together, group by group, by their places in the program."""
    pairs: Groups = ()
    """The source and the target of each transfer of a permute."""

    @property
    def total(self) -> float:
        """Bytes that a device sends in a step."""
        return self.bytes * self.times


def collectives(program: Program) -> list[Collective]:
    """Every collective of a step; one that is started, or cut over several fusions, counts once."""
    found, seen = [], set()
    for visit in hlo.visits(program):
        for instruction in visit.computation.instructions.values():
            kind, channel = kind_of(instruction), channel_of_parts(instruction)
            if kind is None or (visit.scope, channel) in seen:
                continue
            if channel:
                seen.add((visit.scope, channel))
            found.append(_collective(instruction, kind, visit.times, visit.is_fused))
    return found


def channel_of_parts(instruction: Instruction) -> str | None:
    """The channel of a collective that a TPU's compiler cuts over several fusions; else None.

    The compiler gives such a collective a chain. A channel alone says nothing: all collectives that
    a `shard_map` calls have the same.
    """
    return instruction.attribute(r"channel_id=(\d+).*chain_id=")


def within(instruction: Instruction, is_fused: bool = False) -> dict[str, Collective]:
    """The collectives that an instruction is, or has in it, by what its parts have in common."""
    kind = kind_of(instruction)
    if kind is not None:
        key = channel_of_parts(instruction) or instruction.name
        return {key: _collective(instruction, kind, 1, is_fused)}
    if instruction.opcode not in ("fusion", "async-start", "call-start"):
        return {}
    found: dict[str, Collective] = {}
    for each in instruction.inside.instructions.values():
        found |= within(each, instruction.opcode == "fusion")
    return found


def bytes_by_kind(
    found: list[Collective], amount: Callable[[Collective], float] = lambda each: each.bytes
) -> dict[Kind, float]:
    """The bytes that a device sends in a step, by kind of collective.

    `amount` gives those of a collective that count, each time; all of them if not given.
    """
    totals: dict[Kind, float] = defaultdict(float)
    for collective in found:
        totals[collective.kind] += amount(collective) * collective.times
    return {kind: totals[kind] for kind in KINDS if kind in totals}


def kind_of(instruction: Instruction) -> Kind | None:
    """The kind of collective that an instruction is, or starts; None for any other."""
    if instruction.opcode == "send":  # to other slices, by the host
        found = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') or ""
        name = found.lower().replace("_", "-")
    else:
        name = instruction.opcode.removesuffix("-start").removeprefix("ragged-")
    return next((kind for kind in KINDS if kind == name), None)


def _collective(instruction: Instruction, kind: Kind, times: int, is_fused: bool) -> Collective:
    types = [x.type for x in instruction.inputs]
    held = float(sum(map(hlo.num_bytes, types)))
    if instruction.opcode == "send":
        types = types[:1]  # the rest is a token
        held, who = float(hlo.num_bytes(types[0])), _slices(instruction)
    else:
        if "ragged" in instruction.opcode:  # from one buffer into another, of which one has room
            held = float(min(map(hlo.num_bytes, types[:2])))
        who = groups(instruction, instruction.home.program.num_partitions)
    n = len(who[0])
    made = hlo.num_bytes(instruction.home.root.type)
    if kind == "all-reduce" and is_fused and n > 1 and made <= 1.01 * held / n:
        kind = "reduce-scatter"  # a fusion that gives but a part of what it reduces: so TPUs say it
    sent = {
        "all-gather": (n - 1) * held,
        "reduce-scatter": held * (n - 1) / n,
        "all-reduce": 2 * held * (n - 1) / n,
        "all-to-all": held * (n - 1) / n,
        "collective-permute": held,
    }[kind]
    return Collective(kind, sent, times, n, who, pairs(instruction))


def _slices(instruction: Instruction) -> Groups:
    """The devices of the same place in each slice: `_xla_megascale_target="{1,2}x{0:15}"`."""
    target = instruction.attribute(r'_xla_megascale_target="\{([\d,:]+)\}x\{0:\d+\}"') or ""
    last = int(instruction.attribute(r'_xla_megascale_target="[^"]*x\{0:(\d+)\}"') or 0)
    ends = [list(map(int, part.split(":"))) for part in target.split(",") if part]
    slices = sum(end[-1] - end[0] + 1 for end in ends)
    if slices < 2:
        raise HLOError(f"{instruction.name}: slices of an unknown form: {target!r}")
    size = last + 1
    return tuple(tuple(place + size * k for k in range(slices)) for place in range(size))


def groups(instruction: Instruction, num_devices: int) -> Groups:
    """The groups of a collective, each of its devices by their place in the program.

    Raises:
        HLOError: groups of a form that is not known.
    """
    text = instruction.attributes
    if "replica_groups=" not in text or re.search(r"replica_groups=\{\}", text):
        return (tuple(range(num_devices)),)
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text)
    if listed:
        found = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return tuple(tuple(map(int, each.split(","))) for each in found)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return _rows(_iota(iota.group(3), iota.group(4)).reshape(-1, int(iota.group(2))))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](.*?) ?\{([^}]*)\}", text)
    if named:
        return _of_mesh(*named.groups())
    raise HLOError(f"{instruction.name}: groups of an unknown form in {text[:200]!r}")


def pairs(instruction: Instruction) -> Groups:
    """The source and the target of each transfer of a permute."""
    found = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", instruction.attributes)
    listed = re.findall(r"\{(\d+),(\d+)\}", found.group(1)) if found else []
    return tuple((int(source), int(target)) for source, target in listed)


def _of_mesh(axes: str, order: str, chosen: str) -> Groups:
    """`mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x','y':(1)2}`: axes, or parts of them.

    `'y':(1)2` is a part of 2 with 1 of the axis before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
    devices = _iota(*ids.groups()) if ids else np.arange(np.prod([*sizes.values()], dtype=int))
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    ]
    shape: list[int] = []
    picked: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for _, before, part in sorted(p for p in parts if p[0] == name):
            shape += [before // done, part]
            picked[name, before] = len(shape) - 1
            done = before * part
        shape.append(size // done)
    together = [picked[name, before] for name, before, _ in parts]
    apart = [axis for axis in range(len(shape)) if axis not in together]
    members = int(np.prod([shape[axis] for axis in together], dtype=int))
    return _rows(devices.reshape(shape).transpose(apart + together).reshape(-1, members))


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = [int(size) for size in shape.split(",")]
    counted = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    return counted if order is None else counted.transpose([int(x) for x in order.split(",")])


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(int(x) for x in row) for row in table)


# --- Links ---------------------------------------------------------------------------------------

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
        """How many of the bytes that a device sends each time go to other slices."""
        if collective.kind == "collective-permute":
            crossing = any(self.slices[a] != self.slices[b] for a, b in collective.pairs)
            return collective.bytes if crossing else 0.0
        group = self._widest(collective)
        n, k = len(group), len({self.slices[device] for device in group})
        if k == 1:
            return 0.0
        # By parts: for an all-gather a slice's chips each fetch their part from the other slices,
        # and share it; an all-to-all has nothing to share.
        parts = n - n / k if collective.kind == "all-to-all" else k - 1
        return collective.bytes * parts / (n - 1)

    def transfer(self, collective: Collective) -> Transfer:
        """The seconds of a collective, each time, with the links to itself.

        Each link moves data both ways at once, and all that a group's devices have in the
        dimensions of the group take part: two in each dimension of a ring, one in a line, as its
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
        """For each dimension over which a group is spread: how many places, whether in a ring, and
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


def topology_of(chip: Chip, shape: tuple[int, ...], devices: Sequence[Any]) -> Topology:
    """The topology of the devices of a mesh, in its order, by what JAX says of them.

    `shape` is a slice's. Of devices that stand in for others, such as virtual ones, each slice has
    the same number, one after another.
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
