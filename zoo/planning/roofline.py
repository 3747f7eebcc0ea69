"""The least time of a step by the chip's peaks, and the peak that bounds it.

There are two bounds. That of full overlap takes all products, all of the memory's traffic and all
transfers as if the others were hidden behind the longest of them: no program on the chip is faster.
That by instruction (`times`) takes instruction after instruction, in the order of the compiled
program, overlaps what the compiler does, and nothing else: this program is not faster. It has flash
kernels at the best share of the peak that was measured, and all else at the peaks. What is to be
expected (`Roofline.expected`) has all at the measured shares (`EFFICIENCIES`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from zoo.planning import collectives, costs, hlo
from zoo.planning.collectives import Topology, Transfer
from zoo.planning.efficiency import PEAKS, Efficiency, efficiency
from zoo.planning.hlo import Instruction, Program, Visit
from zoo.planning.job import Estimate


@dataclass(frozen=True)
class Times:
    """Seconds of a step by what the device waits for, one after the other."""

    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum over all of these."""
        return self.compute + self.memory + self.links

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.compute + other.compute, self.memory + other.memory, self.links + other.links
        )

    def __mul__(self, times: float) -> "Times":
        return Times(self.compute * times, self.memory * times, self.links * times)


def times(
    program: Program,
    topology: Topology,
    kernels: dict[str, tuple[float, float]],
    shares: Efficiency = PEAKS,
    row: int = 1,
) -> Times:
    """The least time of a step in which no instruction runs beside another one.

    Each instruction (a fusion, a kernel, a copy) takes its FLOPs at the chip's peak or its bytes at
    the memory's bandwidth, whichever is longer, and a collective its transfer over the links; loops
    as often as they run. The exceptions are the compiler's own: what it starts and ends with other
    instructions in between (a collective or a copy between memories, by `-start` and `-done` or as
    parts of fusions) moves while these run, behind what has the same links and was started earlier;
    its end waits for what is left.

    `kernels` has the FLOPs and bytes of a device's Pallas kernels in a step, by their names;
    `shares` of the peaks are reached, and rows have `row` tokens.
    """
    visits = [visit for visit in hlo.visits(program) if not visit.is_fused]
    parts = costs.parts_of_collectives(program)
    timer = _Timer(topology, kernels, visits, parts, shares, row)
    inner: dict[tuple[int, str], list[Times]] = defaultdict(list)
    total = Times()
    turns = {visit.scope: visit.times for visit in visits}
    for visit in reversed(visits):  # what is called comes after its caller
        total = timer.run(visit, inner)
        if visit.caller is not None:
            inner[visit.caller].append(total * (visit.times / turns[visit.caller[0]]))
    missing = [x for name, x in timer.kernels.items() if not timer.calls[name]]  # in its text
    return sum(missing, start=total)


@dataclass
class _Queue:
    """Transfers under way, the first started first."""

    waiting: dict[str, Transfer] = field(default_factory=dict)

    def go_on(self, seconds: float) -> None:
        """Move for so long what may move."""
        while seconds > 0 and self.waiting:
            moving = self._moving()
            step = min(seconds, *(self.waiting[key].seconds for key in moving))
            for key in moving:
                left = self.waiting[key].seconds - step
                if left > 0:
                    self.waiting[key] = Transfer(left, self.waiting[key].links)
                else:
                    del self.waiting[key]
            seconds -= step

    def until(self, key: str) -> Iterator[float]:
        """Seconds to pass, one after the other, until a transfer has ended."""
        while key in self.waiting:
            yield min(self.waiting[key].seconds for key in self._moving())

    def _moving(self) -> list[str]:
        """The names of the transfers whose links no earlier transfer uses."""
        taken: set[str] = set()
        found = []
        for key, transfer in self.waiting.items():
            if not taken & transfer.links:
                found.append(key)
            taken |= transfer.links
        return found


class _Timer:
    """The times of a program's computations."""

    def __init__(
        self,
        topology: Topology,
        kernels: dict[str, tuple[float, float]],
        visits: list[Visit],
        parts: frozenset[str],
        shares: Efficiency,
        row: int,
    ):
        self.topology, self.chip, self.parts = topology, topology.chip, parts
        self.shares = shares
        self.kernels = {
            name: self._times(flops / shares.of_kernel(name, row), moved)
            for name, (flops, moved) in kernels.items()
        }
        self.calls: dict[str, int] = defaultdict(int)
        for visit in visits:
            for instruction in visit.computation.instructions.values():
                self.calls[self._kernel(instruction)] += visit.times

    def run(self, visit: Visit, inner: dict[tuple[int, str], list[Times]]) -> Times:
        """The time of a computation run once; `inner` are the times of the ones that it calls."""
        links, copies, total = _Queue(), _Queue(), Times()
        instructions = list(visit.computation.instructions.values())
        moves = [collectives.within(x) for x in instructions]
        last = {key: index for index, found in enumerate(moves) for key in found}
        started: dict[str, list[str]] = {}
        begun: set[str] = set()

        def wait(queue: _Queue, key: str) -> Times:
            waited = 0.0
            for seconds in queue.until(key):
                links.go_on(seconds)
                copies.go_on(seconds)
                waited += seconds
            return Times(links=waited) if queue is links else Times(memory=waited)

        for index, instruction in enumerate(instructions):
            for key, collective in moves[index].items():
                if key not in begun:
                    begun.add(key)
                    transfer = self.topology.transfer(collective)
                    if transfer.seconds > 0:
                        seconds = self.shares.start + transfer.seconds / self.shares.links
                        links.waiting[key] = Transfer(seconds, transfer.links)
            own = self._own(instruction, inner.get((visit.scope, instruction.name), []))
            if instruction.opcode in ("copy-start", "slice-start", "call-start"):
                if own.seconds > 0:
                    moved = Transfer(own.seconds, frozenset({"memory"}))
                    copies.waiting[instruction.name] = moved
                own = Times()
            total += own
            links.go_on(own.seconds)
            copies.go_on(own.compute + own.links)  # the memory is busy for the rest
            if instruction.opcode.endswith("-start") or instruction.opcode in _STARTS:
                before = [key for name in instruction.operands for key in started.get(name, [])]
                started[instruction.name] = [*before, *moves[index], instruction.name]
                continue
            ended = [key for name in instruction.operands for key in started.get(name, [])]
            for key in (*ended, *moves[index]):
                if key in links.waiting and (key in ended or last[key] == index):
                    total += wait(links, key)
                elif key in copies.waiting:
                    total += wait(copies, key)
        for queue in (links, copies):
            for key in list(queue.waiting):
                total += wait(queue, key)
        return total

    def _own(self, instruction: Instruction, called: list[Times]) -> Times:
        """The time of an instruction by itself, without its collectives.

        `called` are the times of the computations that it calls.
        """
        if instruction.opcode == "conditional":
            return max(called, key=lambda x: x.seconds, default=Times())
        if instruction.opcode in ("while", "call"):
            return sum(called, start=Times())
        if instruction.opcode == "call-start":  # of another core
            return Times() if collectives.within(instruction) else sum(called, start=Times())
        name = self._kernel(instruction)
        if name in self.kernels:
            return self.kernels[name] * (1 / self.calls[name])
        if collectives.kind_of(instruction) or instruction.opcode.startswith("async-"):
            return Times()  # its bytes go from memory to memory while they move
        flops = {"s8": 0.0, "all": 0.0}
        for each, type_ in costs.products(instruction):
            for kind in {type_[:2], "all"} & flops.keys():
                flops[kind] += each / self.shares.of_product(each)
        keys, numbers = costs.picked(instruction)
        rare = keys * self.shares.per_key + numbers * self.shares.per_number
        own = self._times(flops["all"], costs.accessed(instruction, self.parts), flops["s8"])
        return own if own.seconds > rare else Times(memory=rare)

    def _times(self, flops: float, moved: float, int8: float = 0.0) -> Times:
        compute = self.chip.seconds(flops, int8)
        memory = moved / (self.chip.bandwidth or math.inf) / self.shares.memory
        return Times(compute=compute) if compute >= memory else Times(memory=memory)

    def _kernel(self, instruction: Instruction) -> str:
        """The name of the kernel that an instruction calls: its own, less the number behind it."""
        is_kernel = instruction.attribute(r'custom_call_target="(tpu_custom_call)"')
        return instruction.name.rsplit(".", 1)[0] if is_kernel else ""


_STARTS = ("async-update", "send")


Bound = Literal["compute", "memory", "interconnect"]


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step at each of a chip's peaks, and of its instructions one by one."""

    compute: float
    memory: float
    interconnect: float
    by_op: Times
    """The instructions one after the other, with no more at once than the program has."""
    expected: Times
    """The same, with all at the measured shares of the peaks."""

    @property
    def bound(self) -> Bound:
        """The resource that takes the longest."""
        return max(get_args(Bound), key=lambda bound: getattr(self, bound))

    @property
    def seconds(self) -> float:
        """A step at that bound."""
        return max(self.compute, self.memory, self.interconnect)


def roofline(estimate: Estimate) -> Roofline | None:
    """The roofline of an estimate; None where the program or the chip's peaks are not known."""
    chip, topology = estimate.target.chip, estimate.topology
    if not (chip.flops and chip.bandwidth and chip.interconnect and estimate.text):
        return None
    if topology.num_slices > 1 and chip.network is None:
        return None
    program = hlo.read(estimate.text)
    measured = efficiency(chip)
    by_op, expected = (
        times(program, topology, estimate.kernels, shares, estimate.job.row)
        for shares in (measured.best_flash, measured)
    )
    return Roofline(
        compute=chip.seconds(estimate.flops, estimate.int8_flops) / estimate.num_devices,
        memory=estimate.traffic / chip.bandwidth,
        interconnect=sum(c.times * topology.transfer(c).seconds for c in estimate.collectives),
        by_op=by_op,
        expected=expected,
    )
