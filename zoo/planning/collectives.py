"""The bytes that a compiled step moves between devices, and between a device and its memory.

A collective's bytes are what one device sends if the collective runs around a ring, with S the
bytes of the whole and n the devices of a group: all-gather and reduce-scatter (n-1)/n S,
all-reduce twice that, all-to-all (n-1)/n of what the device holds, collective-permute all of that.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from zoo.planning import hlo
from zoo.planning.hlo import Computation, Instruction, Program, Visit

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
KINDS: tuple[Kind, ...] = get_args(Kind)


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

    @property
    def total(self) -> float:
        """Bytes that a device sends in a step."""
        return self.bytes * self.times


def collectives(program: Program) -> list[Collective]:
    """Every collective of a step; one that is started, or cut over several fusions, counts once."""
    found, seen = [], set()
    for visit in hlo.visits(program):
        for instruction in visit.computation.instructions.values():
            kind = _kind(instruction)
            channel = instruction.attribute(r"channel_id=(\d+)")
            if kind is None or (channel and (visit.scope, channel) in seen):
                continue
            if channel:
                seen.add((visit.scope, channel))
            found.append(_collective(program, visit, instruction, kind))
    return found


def bytes_by_kind(found: list[Collective]) -> dict[Kind, float]:
    """The bytes that a device sends in a step by each kind of collective that there is."""
    totals: dict[Kind, float] = defaultdict(float)
    for collective in found:
        totals[collective.kind] += collective.total
    return {kind: totals[kind] for kind in KINDS if kind in totals}


def unknown_loops(program: Program) -> list[str]:
    """The loops that counted once, as the program does not say how often they run."""
    return [name for visit in hlo.visits(program) for name in visit.unknown_loops]


def _kind(instruction: Instruction) -> Kind | None:
    name = instruction.opcode.removesuffix("-start")
    if name == "ragged-all-to-all":
        return "all-to-all"
    return next((kind for kind in KINDS if kind == name), None)


def _collective(program: Program, visit: Visit, instruction: Instruction, kind: Kind) -> Collective:
    types = [visit.computation.instructions[name].type for name in instruction.operands]
    held = float(sum(map(hlo.num_bytes, types)))
    n = _group_size(instruction, program.num_partitions)
    if kind == "all-reduce" and visit.is_fused and _is_cut(visit.computation, held, n):
        kind = "reduce-scatter"
    sent = {
        "all-gather": (n - 1) * held,
        "reduce-scatter": held * (n - 1) / n,
        "all-reduce": 2 * held * (n - 1) / n,
        "all-to-all": held * (n - 1) / n,
        "collective-permute": held,
    }[kind]
    dtype = types[0].lstrip("(").partition("[")[0]
    return Collective(kind, sent, visit.times, n, dtype, _op_name(visit.computation, instruction))


def _is_cut(fused: Computation, held: float, n: int) -> bool:
    """Whether a fusion around an all-reduce gives but a part of it: so TPUs say reduce-scatter."""
    return n > 1 and hlo.num_bytes(fused.root.type) <= 1.01 * held / n


def _op_name(computation: Computation, instruction: Instruction) -> str:
    """The origin of a collective in the traced step, or of its operands where it has none."""
    nearby = [instruction]
    for found in nearby:  # which grows
        if found.op_name or len(nearby) > 100:
            return found.op_name
        nearby += [computation.instructions[name] for name in found.operands]
    return ""


def _group_size(instruction: Instruction, num_devices: int) -> int:
    """Devices that take part together, from any of the forms in which groups are written."""
    text = instruction.attributes
    if "replica_groups=" not in text or re.search(r"replica_groups=\{\}", text):
        return num_devices
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return len(listed.group(1).split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", text)
    if iota:
        return int(iota.group(1))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1)))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    raise hlo.HLOError(f"{instruction.name}: groups of an unknown form in {text[:200]!r}")


_NO_TRAFFIC = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "opt-barrier", "partition-id", "replica-id", "iota",
}  # fmt: skip

# Copies that are started, and which of the arrays in the type of each is the copy.
_MOVES = {"copy-start": 0, "slice-start": 1}


def memory_traffic(program: Program) -> float:
    """Bytes between a device and its memory in a step: the reads and writes of each fusion.

    A fusion that slices a stack of layers reads the slice, one that writes into it the slice too,
    a lookup the rows that it finds, and a copy that runs beside other work what it moves. Pallas
    kernels are left out: `flops.kernel_bytes` counts them, block by block.
    """
    total = 0.0
    for visit in hlo.visits(program):
        if visit.is_fused:
            continue
        for instruction in visit.computation.instructions.values():
            if instruction.opcode in _NO_TRAFFIC or instruction.opcode.endswith("-done"):
                continue
            if instruction.attribute(r'custom_call_target="(tpu_custom_call)"'):
                continue
            total += visit.times * sum(_accesses(program, visit.computation, instruction))
    return total


def _accesses(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[float]:
    """The bytes that an instruction reads of each operand, and those that it writes."""
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode == "fusion":
        fused = program.computations[instruction.called["calls"][0]]
        parameters = {i.text: i for i in fused.instructions.values() if i.opcode == "parameter"}
        written = 0.0
        for number, operand in enumerate(operands):
            inside = parameters.get(str(number))
            used = None if inside is None else _used(program, fused, inside)
            whole = _memory(operand.type)
            if inside is not None and used is not None and whole:
                yield min(whole, used)
                written += whole if _is_updated(fused, inside) else 0.0
            else:
                yield whole
        # What is written in place is as large as its operand, and only a slice of it is new.
        yield max(_memory(instruction.type) - written, 0.0)
    elif instruction.opcode == "dynamic-slice":
        yield 2 * _memory(instruction.type)
    elif instruction.opcode == "gather":
        yield from (2 * _memory(instruction.type), _memory(operands[1].type))
    elif instruction.opcode in _MOVES:
        moved = hlo.arrays(instruction.type)[_MOVES[instruction.opcode]]
        yield from (hlo.num_bytes(moved) if _memory(operands[0].type) else 0.0, _memory(moved))
    elif instruction.opcode == "dynamic-update-slice":
        yield 2 * _memory(operands[1].type)
    else:
        yield from (_memory(operand.type) for operand in operands)
        yield _memory(instruction.type)


def _memory(type_: str) -> float:
    return float(hlo.num_bytes(type_, in_main_memory=True))


def _used(program: Program, fused: Computation, parameter: Instruction) -> float | None:
    """The bytes that a fusion touches of a parameter that it only slices; None if of all."""
    whole = hlo.num_bytes(parameter.type)
    total, names = 0.0, [parameter.name]
    for name in names:
        all_of_it = hlo.num_bytes(fused.instructions[name].type) or 1  # in another dtype, maybe
        for user in fused.instructions.values():
            if name not in user.operands:
                continue
            if user.opcode in _SAME or _is_same(program, user):
                names.append(user.name)
            elif user.opcode in ("dynamic-slice", "slice") or _looks_up(user, name):
                total += whole * hlo.num_bytes(user.type) / all_of_it
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                update = fused.instructions[user.operands[1]]
                total += whole * hlo.num_bytes(update.type) / all_of_it
            else:
                return None
    return total


_SAME = ("bitcast", "copy", "convert")


def _is_same(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction is a fusion that has its operand in another layout or dtype."""
    if instruction.opcode != "fusion":
        return False
    inside = program.computations[instruction.called["calls"][0]].instructions.values()
    return all(x.opcode in (*_SAME, "parameter") for x in inside)


def _looks_up(instruction: Instruction, name: str) -> bool:
    """Whether an instruction reads rows of a table of that name."""
    return instruction.opcode == "gather" and instruction.operands[0] == name


def _is_updated(fused: Computation, parameter: Instruction) -> bool:
    names = [parameter.name]
    for name in names:
        for user in fused.instructions.values():
            if name in user.operands[:1]:
                if user.opcode == "dynamic-update-slice":
                    return True
                if user.opcode in ("bitcast", "copy"):
                    names.append(user.name)
    return False
