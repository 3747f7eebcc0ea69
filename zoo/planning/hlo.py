"""A reader of compiled programs, as `compiled.as_text()` prints them: instructions, and loops.

It knows as much of HLO's text as counting needs: computations, the instructions in them with their
types, operands and attributes, which computation calls which, and how often a loop runs.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')


class HLOError(ValueError):
    """A text that is no compiled program, as this reader knows them."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    """The text between the parentheses: of a constant or a parameter, its value or number."""
    attributes: str

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations that it calls, by the attribute that names them."""
        found = _CALLED.findall(self.attributes)
        return {kind: tuple(_NAME.findall(names)) for kind, names in found}

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the traced function it comes from; empty where the compiler made it up."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression found in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's; the last one."""
        return next(reversed(self.instructions.values()))


@dataclass(frozen=True)
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int


@dataclass(frozen=True)
class Visit:
    """A computation at work: how often it runs in a step, and where it was called from.

    Fused computations belong to the instruction that they are fused into: `is_fused`.
    """

    computation: Computation
    times: int
    is_fused: bool
    scope: int
    """Tells apart the loop bodies, branches and calls that a fused computation belongs to."""
    unknown_loops: tuple[str, ...] = ()
    caller: tuple[int, str] | None = None
    """The scope and the name of the instruction that calls it; None of the whole program."""


def read(text: str) -> Program:
    """Read a compiled program.

    Raises:
        HLOError: a text without a program in it.
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in _lines(text):
        if current is None or (line[:1] not in ("", " ", "}") and line.rstrip().endswith("{")):
            match = re.match(r"(ENTRY )?%?([\w.\-]+) ?\(.*->.*\{$", line)
            if match:
                current = computations[match.group(2)] = Computation(match.group(2), {})
                entry = match.group(2) if match.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif " = " in line:
            instruction = _instruction(line.strip())
            current.instructions[instruction.name] = instruction
    if not entry:
        raise HLOError(f"no ENTRY computation in a text that begins {text[:60]!r}")
    partitions = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    return Program(computations, computations[entry], int(partitions.group(1)) if partitions else 1)


def _lines(text: str) -> Iterator[str]:
    """The lines of a text; the metadata of a kernel has line breaks in it, which are joined."""
    line = ""
    for part in text.splitlines():
        if part.startswith(('"', "}}")):
            line += part
            continue
        yield line
        line = part
    yield line


def _instruction(line: str) -> Instruction:
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _balanced(rest, 0) if rest.startswith("(") else rest.find(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    closing = _balanced(rest, opening)
    inside = rest[opening + 1 : closing - 1]
    opcode = rest[:opening]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(name.lstrip("%"), type_, opcode, operands, inside, rest[closing:])


def _balanced(text: str, start: int) -> int:
    """The end of the parenthesis that opens at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise HLOError(f"a parenthesis is not closed: {text[:80]!r}")


def arrays(type_: str) -> list[str]:
    """The types of the arrays in a type, of a tuple or of tuples in it in their order."""
    return [match.group() for match in _ARRAY.finditer(type_)]


def num_bytes(type_: str, *, in_main_memory: bool = False) -> int:
    """The bytes of a type, of a tuple all of it.

    With `in_main_memory` less what lies in a chip's own memory, which a layout marks as `S(1)`.
    """
    total = 0
    for dtype, sizes, layout in _ARRAY.findall(type_):
        if in_main_memory and "S(" in layout:
            continue
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits.group()) if digits else 0)
        if dtype.startswith("c") and digits:
            bits = int(digits.group())
        total += math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size) * bits // 8
    return total


def visits(program: Program) -> Iterator[Visit]:
    """Every computation that a step runs, as often as it is called, with how often that is.

    A loop whose number of turns the text does not give counts once, and is named, for a plan to
    refuse it.
    """
    scopes = iter(range(1 << 62))

    def walk(
        computation: Computation,
        times: int,
        is_fused: bool,
        scope: int,
        values: "_Values",
        caller: tuple[int, str] | None = None,
    ) -> Iterator[Visit]:
        unknown = []
        inner: list[Iterator[Visit]] = []
        for instruction in computation.instructions.values():
            called, here = instruction.called, (scope, instruction.name)
            if instruction.opcode == "while":
                turns = trip_count(program, instruction, values)
                if turns is None:
                    unknown.append(instruction.name)
                body = program.computations[called["body"][0]]
                start = _Values(computation, instruction.operands[0], values)
                inner.append(walk(body, times * (turns or 1), False, next(scopes), start, here))
                continue
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # it counted at its start
            names = called.get("calls", ())
            fuses = instruction.opcode == "fusion"
            if instruction.opcode in ("call", "async-start"):
                names += called.get("to_apply", ())
            for name in names:
                where = scope if fuses else next(scopes)
                into = program.computations[name]
                inner.append(walk(into, times, fuses, where, _Values(), here))
            branches = (
                called.get("branch_computations", ())
                + called.get("true_computation", ())
                + called.get("false_computation", ())
            )
            for name in branches:
                branch = program.computations[name]
                inner.append(walk(branch, times, False, next(scopes), _Values(), here))
        yield Visit(computation, times, is_fused, scope, tuple(unknown), caller)
        for each in inner:
            yield from each

    yield from walk(program.entry, 1, False, next(scopes), _Values())


@dataclass(frozen=True)
class _Values:
    """The input of a loop's body: the tuple that it starts with, and where that comes from."""

    computation: Computation | None = None
    tuple_name: str = ""
    outer: "_Values | None" = None

    def start(self, index: int) -> int | None:
        """The integer that an element of the tuple starts as, if that is a constant."""
        if self.computation is None:
            return None
        made = self.computation.instructions[self.tuple_name]
        while made.opcode in ("copy", "opt-barrier"):
            made = self.computation.instructions[made.operands[0]]
        if made.opcode != "tuple":
            return None
        return _integer(self.computation, made.operands[index], self.outer or _Values())


def _integer(computation: Computation, name: str, values: _Values) -> int | None:
    """The value of a scalar instruction, if it is a constant, or one that a loop is given."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return int(instruction.text) if re.fullmatch(r"-?\d+", instruction.text) else None
    if instruction.opcode == "get-tuple-element":
        return values.start(_index(instruction))
    return None


def _index(instruction: Instruction) -> int:
    return int(instruction.attribute(r"index=(\d+)") or 0)


def trip_count(program: Program, loop: Instruction, values: _Values | None = None) -> int | None:
    """How often a `while` runs: as the text says, or as its condition has it; None if neither does.

    The condition compares a counter with a limit, the body adds a constant to the counter.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known.group(1))
    holder = next(
        (c for c in program.computations.values() if c.instructions.get(loop.name) is loop), None
    )
    given = _Values(holder, loop.operands[0], values)
    condition = program.computations[loop.called["condition"][0]]
    body = program.computations[loop.called["body"][0]]
    compare = _comparison(program, condition)
    if compare is None:
        return None
    (counter, limit), direction = compare
    index = _element(condition, counter)
    stop = _integer(condition, limit, given)
    if index is None or body.root.opcode != "tuple":
        return None
    start, step = given.start(index), _step(program, body, index, given)
    if start is None or stop is None or not step or direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    inclusive = 1 if direction in ("LE", "GE") else 0
    return max(0, math.ceil((abs(stop - start) + inclusive) / abs(step)))


def _comparison(program: Program, condition: Computation) -> tuple[tuple[str, str], str] | None:
    """The counter, the limit and the direction of a condition, also of one that is fused."""
    root = condition.root
    if root.opcode == "fusion":
        inner = program.computations[root.called["calls"][0]]
        compare = inner.root
        if compare.opcode != "compare":
            return None
        outside = []
        for name in compare.operands:
            made = inner.instructions[name]
            if made.opcode == "constant":  # as if it stood outside
                condition.instructions.setdefault(name, made)
            outside.append(root.operands[int(made.text)] if made.opcode == "parameter" else name)
        return (outside[0], outside[1]), compare.attribute(r"direction=(\w+)") or ""
    if root.opcode != "compare":
        return None
    return (root.operands[0], root.operands[1]), root.attribute(r"direction=(\w+)") or ""


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the loop's tuple an instruction is."""
    made = computation.instructions[name]
    while made.opcode in ("copy", "bitcast", "convert"):
        made = computation.instructions[made.operands[0]]
    return _index(made) if made.opcode == "get-tuple-element" else None


def _step(program: Program, body: Computation, index: int, given: _Values) -> int | None:
    """The increment per turn of an element of the loop's tuple."""
    computation, name = body, body.root.operands[index]
    made = computation.instructions[name]
    while made.opcode in ("copy", "bitcast", "convert"):
        made = computation.instructions[made.operands[0]]
    operands: tuple[str, ...] = made.operands
    if made.opcode == "fusion":
        inner = program.computations[made.called["calls"][0]]
        added, outer = inner.root, operands
        if added.opcode not in ("add", "subtract"):
            return None
        operands = ()
        for name in added.operands:
            part = inner.instructions[name]
            if part.opcode == "constant":
                body.instructions.setdefault(name, part)
            operands += (outer[int(part.text)] if part.opcode == "parameter" else name,)
        made = added
    if made.opcode not in ("add", "subtract"):
        return None
    amounts = [
        _integer(body, name, given)
        for name in operands
        if name in body.instructions and _element(body, name) != index
    ]
    return amounts[0] if amounts else None
