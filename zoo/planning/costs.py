"""Costs of a compiled program's instructions: bytes to and from memory, FLOPs of products."""

import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from zoo.planning import collectives, hlo
from zoo.planning.hlo import Computation, Instruction, Program

_NO_TRAFFIC = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "opt-barrier", "partition-id", "replica-id", "iota",
}  # fmt: skip

# What is started, and which of the arrays in its type is the one that it writes.
_MOVES = {"copy-start": 0, "slice-start": 1, "all-gather-start": 1, "collective-permute-start": 1}


def memory_traffic(program: Program) -> float:
    """Bytes between a device and its memory in a step: the reads and writes of each fusion.

    A fusion that slices a stack of layers reads the slice, one that writes into it the slice too,
    a lookup the rows that it finds, and a copy that runs beside other work what it moves. Pallas
    kernels are left out: `flops.of_kernels` counts them, block by block.
    """
    parts = parts_of_collectives(program)
    return sum(
        visit.times * accessed(instruction, parts)
        for visit in hlo.visits(program)
        if not visit.is_fused
        for instruction in visit.computation.instructions.values()
    )


def parts_of_collectives(program: Program) -> frozenset[str]:
    """The channels of the collectives that run beside several fusions, and so are in each."""
    counts = Counter(
        collectives.channel_of_parts(instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
    )
    return frozenset(channel for channel, count in counts.items() if channel and count > 1)


def accessed(instruction: Instruction, parts: frozenset[str]) -> float:
    """The bytes that an instruction reads and writes, each time; `parts_of_collectives` are given.

    For a collective that runs beside fusions, its end alone counts, with what it writes.
    """
    if instruction.opcode in _NO_TRAFFIC or instruction.opcode.endswith("-done"):
        return 0.0
    if instruction.attribute(r'custom_call_target="(tpu_custom_call|AllocateBuffer)"'):
        return 0.0
    return sum(_accesses(instruction, parts))


def _accesses(instruction: Instruction, parts: frozenset[str]) -> Iterator[float]:
    """The bytes that an instruction reads of each operand, and the bytes that it writes."""
    operands = instruction.inputs
    if instruction.opcode == "fusion":
        fused = instruction.inside
        carried, written = _carried(fused, parts), 0.0
        for number, operand in enumerate(operands):
            inside = fused.parameters.get(str(number))
            if inside is not None and inside.name in carried:
                continue
            used = None if inside is None else _used(inside)
            whole = _memory(operand.type)
            if inside is not None and used is not None and whole:
                yield min(whole, used)
                written += whole if _is_updated(inside) else 0.0
            else:
                yield whole
        # What is written in place is as large as its operand, and only a slice of it is new.
        yield max(_written(fused, carried) - written, 0.0)
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


def _carried(fused: Computation, parts: frozenset[str]) -> set[str]:
    """The names, in a fusion, of a collective that runs beside it, and of values handed on to it.

    Such a value is on its way, and is moved once, not by each fusion.
    """
    found = {
        x.name
        for x in fused.instructions.values()
        if collectives.channel_of_parts(x) in parts or "AsyncCollective" in x.attributes
    }
    if not found:
        return found
    ends = {*found, fused.root.name if fused.root.opcode == "tuple" else ""}
    for parameter in fused.parameters.values():
        users = {x.name for x in fused.users[parameter.name]}
        if users and users <= ends:
            found.add(parameter.name)
    return found


def _written(fused: Computation, carried: set[str]) -> float:
    """The bytes of a fusion's results."""
    root = fused.root
    if root.opcode == "tuple" and carried:
        return sum(_memory(x.type) for x in root.inputs if x.name not in carried)
    ends = "AsyncCollectiveDone" in root.attributes or root.name not in carried
    return _memory(root.type) if ends else 0.0


def _memory(type_: str) -> float:
    return float(hlo.num_bytes(type_, in_main_memory=True))


_SAME = {"parameter", "bitcast", "copy", "convert"}


def _used(parameter: Instruction) -> float | None:
    """The bytes that a fusion touches of a parameter that it only slices; None if of all."""
    whole, total, names = hlo.num_bytes(parameter.type), 0.0, [parameter.name]
    for name in names:  # which grows
        values = parameter.home.instructions[name]
        share = whole / (hlo.num_bytes(values.type) or 1)  # in another dtype, maybe
        for user in parameter.home.users[name]:
            inside = user.inside if user.opcode == "fusion" else None
            opcodes = {x.opcode for x in inside.instructions.values()} if inside else {user.opcode}
            is_first = user.operands[0] == name
            takes_rows = is_first and user.opcode == "gather"
            if opcodes <= _SAME:  # in another layout or dtype
                names.append(user.name)
            elif inside:
                for number, operand in enumerate(user.operands):
                    if operand == name and str(number) in inside.parameters:
                        part = _used(inside.parameters[str(number)])
                        if part is None:
                            return None
                        total += share * part
            elif takes_rows or user.opcode in ("dynamic-slice", "slice"):
                total += share * hlo.num_bytes(user.type)
            elif is_first and user.opcode == "dynamic-update-slice":
                total += share * hlo.num_bytes(user.inputs[1].type)
            else:
                return None
    return total


def _is_updated(parameter: Instruction) -> bool:
    """Whether a fusion writes a slice into a parameter in place."""
    names = [parameter.name]
    for name in names:  # which grows
        for user in parameter.home.users[name]:
            if user.operands[0] == name:
                if user.opcode == "dynamic-update-slice":
                    return True
                if user.opcode in ("bitcast", "copy"):
                    names.append(user.name)
    return False


_PASSES = {"high": 3, "highest": 6}  # of bf16, on a TPU


def flops(instruction: Instruction, of: str = "") -> float:
    """FLOPs of an instruction, or of all instructions in a fusion: two per multiply and add.

    `of` is a type of HLO's, such as "s8", that the operands of the products counted have.
    """
    found = (each for each, type_ in products(instruction) if type_.startswith(of))
    return sum(found, start=0.0)


def products(instruction: Instruction) -> Iterator[tuple[float, str]]:
    """The FLOPs of each product of an instruction, or of all in a fusion; its operands' type.

    TPUs write a product as a convolution. One of fp32 that is not to be rounded counts as the
    products of bf16 that they make of it. Kernels are left out: the text says nothing of them.
    """
    if instruction.opcode == "fusion":
        for each in instruction.inside.instructions.values():
            yield from products(each)
        return
    if instruction.opcode not in ("convolution", "dot", "custom-call") or not instruction.operands:
        return
    operands = instruction.inputs[:2]
    type_ = operands[0].type
    if instruction.opcode == "convolution":
        precision = instruction.attribute(r"operand_precision=\{(\w+)") or ""
        passes = _PASSES.get(precision, 1) if type_.startswith("f32") else 1
        yield passes * _convolution([_sizes(x.type) for x in operands], instruction), type_
        return
    contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "custom-call":  # of cuBLAS
        found = instruction.attribute(r'lhs_contracting_dimensions":\[([\d,"]*)\]')
        contracted = found and found.replace('"', "")
    if contracted is not None:
        left = _sizes(type_)
        inner = math.prod(left[int(axis)] for axis in contracted.split(",") if axis)
        yield 2.0 * inner * math.prod(_sizes(hlo.arrays(instruction.type)[0])), type_


def _sizes(type_: str) -> list[int]:
    match = re.search(r"\[([\d,<=]*)\]", type_)
    return [int(size.lstrip("<=")) for size in match.group(1).split(",") if size] if match else []


def _convolution(operands: list[list[int]], instruction: Instruction) -> float:
    labels = instruction.attribute(r"dim_labels=([\w]+_[\w]+->[\w]+)") or ""
    left, right = operands
    inputs, kernel, outputs = re.split(r"_|->", labels)

    def window(name: str, axis: int, default: str = "1") -> str:
        found = instruction.attribute(rf"window=\{{[^}}]*\b{name}=([\dx_\-]+)")
        return found.split("x")[axis] if found else default

    out = _sizes(instruction.type)
    pairs = 1.0
    for axis, label in enumerate(sorted(x for x in kernel if x.isdigit())):
        # How many places of the kernel lie on a value of the input, over all outputs.
        rows, columns = np.arange(out[outputs.index(label)]), np.arange(right[kernel.index(label)])
        start = rows * int(window("stride", axis)) - int(window("pad", axis, "0_0").split("_")[0])
        at = start[:, None] + columns[None, :] * int(window("rhs_dilate", axis))
        spread = int(window("lhs_dilate", axis))
        is_inside = (at >= 0) & (at <= (left[inputs.index(label)] - 1) * spread)
        pairs *= float(np.sum(is_inside & (at % spread == 0)))
    batch_groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    rows_of_batch = left[inputs.index("b")] / batch_groups
    return 2.0 * pairs * rows_of_batch * right[kernel.index("i")] * right[kernel.index("o")]


def picked(instruction: Instruction) -> tuple[float, float]:
    """The keys that an instruction sorts, and the single numbers that it gathers by an index."""
    if instruction.opcode == "fusion":
        found = [picked(each) for each in instruction.inside.instructions.values()]
        keys, numbers = (sum(each, start=0.0) for each in zip(*found, strict=True))
        return keys, numbers
    if instruction.opcode == "sort":
        return float(math.prod(_sizes(instruction.inputs[0].type))), 0.0
    slices = instruction.attribute(r"slice_sizes=\{([\d,]+)\}") or "0"
    single = instruction.opcode == "gather" and math.prod(map(int, slices.split(","))) == 1
    return 0.0, float(math.prod(_sizes(instruction.type))) if single else 0.0
