"""A reader of compiled programs, as `compiled.as_text()` prints them: instructions, and loops.

It knows as much of HLO's text as counting needs: computations, the instructions in them with their
types, operands and attributes, which computation calls which, and how often a loop runs.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')


Integers = dict[int, int]  # by the index of an element of a loop's tuple


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
        given: Integers,
        caller: tuple[int, str] | None = None,
    ) -> Iterator[Visit]:
        unknown = []
        inner: list[Iterator[Visit]] = []
        for instruction in computation.instructions.values():
            called, here = instruction.called, (scope, instruction.name)
            if instruction.opcode == "while":
                start = _starts(computation, instruction.operands[0], given)
                turns = _turns(program, instruction, start)
                if turns is None:
                    unknown.append(instruction.name)
                body = program.computations[called["body"][0]]
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
                inner.append(walk(into, times, fuses, where, {}, here))
            branches = (
                called.get("branch_computations", ())
                + called.get("true_computation", ())
                + called.get("false_computation", ())
            )
            for name in branches:
                branch = program.computations[name]
                inner.append(walk(branch, times, False, next(scopes), {}, here))
        yield Visit(computation, times, is_fused, scope, tuple(unknown), caller)
        for each in inner:
            yield from each

    yield from walk(program.entry, 1, False, next(scopes), {})


def _starts(computation: Computation, name: str, outer: Integers) -> Integers:
    """The integers among the elements of the tuple that a loop starts with."""
    made = computation.instructions[name]
    while made.opcode in ("copy", "opt-barrier"):
        made = computation.instructions[made.operands[0]]
    elements = made.operands if made.opcode == "tuple" else ()
    found = {i: _integer(computation, x, outer) for i, x in enumerate(elements)}
    return {i: value for i, value in found.items() if value is not None}


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "and": operator.and_,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip


def _integer(
    computation: Computation,
    name: str,
    given: Integers,
    program: Program | None = None,
    arguments: Sequence[Callable[[], int | None]] = (),
) -> int | None:
    """The value of a scalar instruction, if the elements `given` of a loop's tuple decide it.

    Within a fusion, whose `arguments` are computed as they are asked for.
    """
    made = computation.instructions[name]
    value = functools.partial(
        _integer, computation, given=given, program=program, arguments=arguments
    )
    if made.opcode == "constant":
        return int(made.text) if re.fullmatch(r"-?\d+", made.text) else None
    if made.opcode == "parameter":
        return arguments[int(made.text)]() if arguments else None
    if made.opcode == "get-tuple-element":
        return given.get(int(made.attribute(r"index=(\d+)") or 0))
    if made.opcode in ("copy", "bitcast", "convert"):
        return value(made.operands[0])
    if made.opcode == "fusion" and program is not None:
        fused = program.computations[made.called["calls"][0]]
        inputs = [functools.partial(value, operand) for operand in made.operands]
        return _integer(fused, fused.root.name, {}, program, inputs)
    apply = _OPERATORS.get(made.attribute(r"direction=(\w+)") or made.opcode)
    if apply is None or len(made.operands) != 2:
        return None
    left, right = map(value, made.operands)
    return None if left is None or right is None else int(apply(left, right))


_MOST_TURNS = 1_000_000


def _turns(program: Program, loop: Instruction, given: Integers) -> int | None:
    """How often a `while` runs: as the text says, or as its condition does; None if neither does.

    The condition is asked, turn after turn, with what the body makes of the integers in its tuple.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition = program.computations[loop.called["condition"][0]]
    body = program.computations[loop.called["body"][0]]
    if body.root.opcode != "tuple":
        return None
    for turn in range(_MOST_TURNS):
        goes_on = _integer(condition, condition.root.name, given, program)
        if not goes_on:
            return None if goes_on is None else turn
        moved = {i: _integer(body, body.root.operands[i], given, program) for i in given}
        given = {i: value for i, value in moved.items() if value is not None}
    return None
