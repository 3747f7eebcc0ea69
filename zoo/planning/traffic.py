"""The bytes that a compiled step moves between a device and its memory, by instruction."""

from collections import Counter
from collections.abc import Iterator

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
    parts, total = parts_of_collectives(program), 0.0
    for visit in hlo.visits(program):
        if visit.is_fused:
            continue
        for instruction in visit.computation.instructions.values():
            total += visit.times * accessed(program, visit.computation, instruction, parts)
    return total


def parts_of_collectives(program: Program) -> frozenset[str]:
    """The channels of the collectives that run beside several fusions, and so are in each."""
    counts = Counter(
        collectives.channel_of_parts(instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
    )
    return frozenset(channel for channel, count in counts.items() if channel and count > 1)


def accessed(
    program: Program, computation: Computation, instruction: Instruction, parts: frozenset[str]
) -> float:
    """The bytes that an instruction reads and writes, each time; `parts_of_collectives` are given.

    Of a collective that runs beside fusions, its end alone counts, with what it writes.
    """
    if instruction.opcode in _NO_TRAFFIC or instruction.opcode.endswith("-done"):
        return 0.0
    if instruction.attribute(r'custom_call_target="(tpu_custom_call|AllocateBuffer)"'):
        return 0.0
    return sum(_accesses(program, computation, instruction, parts))


def _accesses(
    program: Program, computation: Computation, instruction: Instruction, parts: frozenset[str]
) -> Iterator[float]:
    """The bytes that an instruction reads of each operand, and the bytes that it writes."""
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode == "fusion":
        fused = program.computations[instruction.called["calls"][0]]
        carried = _carried(fused, parts)
        parameters = {i.text: i for i in fused.instructions.values() if i.opcode == "parameter"}
        written = 0.0
        for number, operand in enumerate(operands):
            inside = parameters.get(str(number))
            if inside is not None and inside.name in carried:
                continue
            used = None if inside is None else _used(program, fused, inside)
            whole = _memory(operand.type)
            if inside is not None and used is not None and whole:
                yield min(whole, used)
                written += whole if _is_updated(fused, inside) else 0.0
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
    """Names in a fusion of a collective that runs beside it, and of values handed on to that.

    That is on its way, and is moved once: not by each fusion.
    """
    found = {
        x.name
        for x in fused.instructions.values()
        if collectives.channel_of_parts(x) in parts or "AsyncCollective" in x.attributes
    }
    if not found:
        return found
    ends = {*found, fused.root.name if fused.root.opcode == "tuple" else ""}
    for parameter in [x for x in fused.instructions.values() if x.opcode == "parameter"]:
        users = {x.name for x in fused.instructions.values() if parameter.name in x.operands}
        if users and users <= ends:
            found.add(parameter.name)
    return found


def _written(fused: Computation, carried: set[str]) -> float:
    """The bytes of a fusion's results."""
    root = fused.root
    if root.opcode == "tuple" and carried:
        results = [name for name in root.operands if name not in carried]
        return sum(_memory(fused.instructions[name].type) for name in results)
    ends = "AsyncCollectiveDone" in root.attributes or root.name not in carried
    return _memory(root.type) if ends else 0.0


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
            elif user.opcode == "fusion":
                inside = program.computations[user.called["calls"][0]]
                for parameter in _parameters(inside, user, name):
                    part = _used(program, inside, parameter)
                    if part is None:
                        return None
                    total += whole * part / all_of_it
            else:
                return None
    return total


def _parameters(inside: Computation, fusion: Instruction, name: str) -> list[Instruction]:
    """The parameters of a fusion that an operand of that name is given to."""
    numbers = {str(number) for number, operand in enumerate(fusion.operands) if operand == name}
    found = inside.instructions.values()
    return [x for x in found if x.opcode == "parameter" and x.text in numbers]


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
