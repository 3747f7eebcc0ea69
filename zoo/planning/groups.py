"""The devices that take part in a collective together, as a compiled program writes them."""

import re

import numpy as np

from zoo.planning.hlo import HLOError, Instruction

Groups = tuple[tuple[int, ...], ...]


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
