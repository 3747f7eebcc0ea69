"""A reader of compiled programs, as `compiled.as_text()` prints them: instructions, and loops.

It knows as much of HLO's text as counting needs: computations, the instructions in them with their
types, operands and attributes, which computation calls which, and how often a loop runs.
"""

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from zoo.transformer.dispatch import RARELY

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)


Integers = dict[int, int]  # by the index of an element of a loop's tuple


class HLOError(ValueError):
    """A text that is no compiled program, as this reader knows them."""


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    """The text between the parentheses: for a constant or a parameter, its value or number."""
    attributes: str
    home: "Computation"

    @property
    def inputs(self) -> list["Instruction"]:
        """The instructions whose results it takes."""
        return [self.home.instructions[name] for name in self.operands]

    @functools.cached_property
    def called(self) -> dict[str, list["Computation"]]:
        """The computations that it calls, by the attribute that names them."""
        known = self.home.program.computations
        return {
            kind: [known[name] for name in _NAME.findall(names) if name in known]
            for kind, names in _CALLED.findall(self.attributes)
        }

    @property
    def inside(self) -> "Computation":
        """The computation of a fusion, or of what is started."""
        return next(self.called[kind][0] for kind in ("calls", "to_apply") if kind in self.called)

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the traced function it comes from; empty where the compiler made it up."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression found in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None


@dataclass(frozen=True, eq=False)
class Computation:
    """A computation: its instructions by name, in order."""

    name: str
    program: "Program"
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's; the last one."""
        return next(reversed(self.instructions.values()))

    @functools.cached_property
    def parameters(self) -> dict[str, Instruction]:
        """The parameters, by their numbers."""
        return {x.text: x for x in self.instructions.values() if x.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take the result of each, by its name."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for user in self.instructions.values():
            for name in dict.fromkeys(user.operands):
                found[name].append(user)
        return found


@dataclass
class Program:
    """A compiled program."""

    num_partitions: int = 1
    computations: dict[str, Computation] = field(default_factory=dict)
    entry_name: str = ""

    @property
    def entry(self) -> Computation:
        """The computation that a step begins with."""
        return self.computations[self.entry_name]


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
    """The scope and the name of the instruction that calls it; None for the whole program."""


def read(text: str) -> Program:
    """Read a compiled program.

    Raises:
        HLOError: a text without a program in it.
    """
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    program = Program(int(partitions.group(1)) if partitions else 1)
    current: Computation | None = None
    for line in _lines(text):
        if current is None or (line[:1] not in ("", " ", "}") and line.rstrip().endswith("{")):
            match = re.match(r"(ENTRY )?%?([\w.\-]+) ?\(.*->.*\{$", line)
            if match:
                is_entry, name = match.groups()
                current = program.computations[name] = Computation(name, program)
                program.entry_name = name if is_entry else program.entry_name
        elif line.startswith("}"):
            current = None
        elif " = " in line:
            instruction = _instruction(line.strip(), current)
            current.instructions[instruction.name] = instruction
    if not program.entry_name:
        raise HLOError(f"no ENTRY computation in a text that begins {text[:60]!r}")
    return program


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


def _instruction(line: str, home: Computation) -> Instruction:
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _balanced(rest, 0) if rest.startswith("(") else rest.find(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    closing = _balanced(rest, opening)
    inside = rest[opening + 1 : closing - 1]
    opcode = rest[:opening]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(name.lstrip("%"), type_, opcode, operands, inside, rest[closing:], home)


def _balanced(text: str, start: int) -> int:
    """The end of the parenthesis that opens at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise HLOError(f"a parenthesis is not closed: {text[:80]!r}")


def arrays(type_: str) -> list[str]:
    """The types of the arrays in a type, in their order; a tuple may have tuples in it."""
    return [match.group() for match in _ARRAY.finditer(type_)]


def num_bytes(type_: str, *, in_main_memory: bool = False) -> int:
    """The bytes of a type, or of all types in a tuple.

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
    refuse it. A branch that is marked as seldom taken is left out.
    """
    scopes = itertools.count()

    def walk(
        computation: Computation,
        times: int,
        given: Integers,
        caller: tuple[int, str] | None = None,
        fused_in: int | None = None,
    ) -> Iterator[Visit]:
        scope = next(scopes) if fused_in is None else fused_in
        unknown = []
        inner: list[Iterator[Visit]] = []
        for instruction in computation.instructions.values():
            called, here = instruction.called, (scope, instruction.name)
            if instruction.opcode == "while":
                start = _starts(instruction, given)
                turns = _turns(instruction, start)
                if turns is None:
                    unknown.append(instruction.name)
                inner.append(walk(called["body"][0], times * (turns or 1), start, here))
            elif not instruction.opcode.endswith(("-done", "-update")):  # it counted at its start
                applies = instruction.opcode in ("call", "call-start", "async-start")
                kinds = ["calls", *["to_apply"] * applies, *_BRANCHES]
                within = scope if instruction.opcode == "fusion" else None
                for each in itertools.chain.from_iterable(called.get(kind, ()) for kind in kinds):
                    if instruction.opcode != "conditional" or not _is_rare(each):
                        inner.append(walk(each, times, {}, here, within))
        yield Visit(computation, times, fused_in is not None, scope, tuple(unknown), caller)
        for visit in inner:
            yield from visit

    yield from walk(program.entry, 1, {})


_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def _is_rare(branch: Computation) -> bool:
    return any(re.search(rf"\b{RARELY}\b", x.op_name) for x in branch.instructions.values())


def unknown_loops(program: Program) -> list[str]:
    """The loops that counted once, as the program does not say how often they run."""
    return [name for visit in visits(program) for name in visit.unknown_loops]


def _starts(loop: Instruction, outer: Integers) -> Integers:
    """The integers among the elements of the tuple that a loop starts with."""
    made = loop.inputs[0]
    while made.opcode in ("copy", "opt-barrier"):
        made = made.inputs[0]
    return _integers(dict(enumerate(made.inputs)) if made.opcode == "tuple" else {}, outer)


def _integers(elements: dict[int, Instruction], given: Integers) -> Integers:
    """The integers among the elements of a tuple, by their places in it."""
    found = {place: _integer(element, given) for place, element in elements.items()}
    return {place: value for place, value in found.items() if value is not None}


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "and": operator.and_,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip


def _integer(
    made: Instruction, given: Integers, arguments: Sequence[Callable[[], int | None]] = ()
) -> int | None:
    """The value of a scalar instruction, if the elements `given` of a loop's tuple decide it.

    Within a fusion, whose `arguments` are computed as they are asked for.
    """
    if "[]" not in made.type:
        return None
    value = functools.partial(_integer, given=given, arguments=arguments)
    if made.opcode == "constant":
        return int(made.text) if re.fullmatch(r"-?\d+", made.text) else None
    if made.opcode == "parameter":
        return arguments[int(made.text)]() if arguments else None
    if made.opcode == "get-tuple-element":
        return given.get(int(made.attribute(r"index=(\d+)") or 0))
    if made.opcode in ("copy", "bitcast", "convert"):
        return value(made.inputs[0])
    if made.opcode == "fusion":
        inputs = [functools.partial(value, operand) for operand in made.inputs]
        return _integer(made.inside.root, {}, inputs)
    apply = _OPERATORS.get(made.attribute(r"direction=(\w+)") or made.opcode)
    if apply is None or len(made.operands) != 2:
        return None
    left, right = map(value, made.inputs)
    return None if left is None or right is None else int(apply(left, right))


_MOST_TURNS = 1_000_000


def _turns(loop: Instruction, given: Integers) -> int | None:
    """How often a `while` runs: as the text says, or as its condition does; None if neither does.

    The condition is asked, turn after turn, with what the body makes of the integers in its tuple.
    """
    known = loop.attribute(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
    if known:
        return int(known)
    condition, body = (loop.called[kind][0].root for kind in ("condition", "body"))
    if body.opcode != "tuple":
        return None
    made = body.inputs
    for turn in range(_MOST_TURNS):
        goes_on = _integer(condition, given)
        if not goes_on:
            return None if goes_on is None else turn
        given = _integers({place: made[place] for place in given}, given)
    return None
