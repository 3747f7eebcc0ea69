"""The bytes that a compiled step moves between devices.

A collective's bytes are what one device sends if the collective runs around a ring, with S the
bytes of the whole and n the devices of a group: all-gather and reduce-scatter (n-1)/n S,
all-reduce twice that, all-to-all (n-1)/n of what the device holds, collective-permute all of that.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from zoo.planning import hlo
from zoo.planning.hlo import HLOError, Instruction, Program

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
    dtype: str
    op_name: str
    """Where in the traced step it comes from."""
    groups: Groups = ()
    """The devices that take part together, of all groups, by their place in the program."""
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
    """The channel of a collective that a TPU's compiler cuts over several fusions; None of others.

    It gives those a chain. A channel alone says nothing: all collectives that a `shard_map` calls
    have the same.
    """
    return instruction.attribute(r"channel_id=(\d+).*chain_id=")


def within(instruction: Instruction, is_fused: bool = False) -> dict[str, Collective]:
    """The collectives that an instruction is, or has in it, by what its parts have in common."""
    kind = kind_of(instruction)
    if kind is not None:
        key = channel_of_parts(instruction) or instruction.name
        return {key: _collective(instruction, kind, 1, is_fused)}
    if instruction.opcode not in ("fusion", "async-start"):
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
    """The kind of collective that an instruction is, or starts; None of any other."""
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
    dtype = types[0].lstrip("(").partition("[")[0]
    op_name = _op_name(instruction)
    return Collective(kind, sent, times, n, dtype, op_name, who, pairs(instruction))


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


def _op_name(instruction: Instruction) -> str:
    """The origin of a collective in the traced step, or of its operands where it has none."""
    nearby = [instruction]
    for found in nearby:  # which grows
        if found.op_name or len(nearby) > 100:
            return found.op_name
        nearby += found.inputs
    return ""


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
