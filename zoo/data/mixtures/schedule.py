"""Which source gives grain g of a mixture, and which of its own: a closed form of g.

A grain is a row, or a batch where a batch has rows of one source only.
"""

import bisect
import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

MAX_PERIOD = 65536


def shares_of(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as the smallest integers of the same proportions.

    Raises:
        ValueError: their sum, the length of a period, is above `MAX_PERIOD`.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * scale) for weight in weights]
    shares = [share // math.gcd(*shares) for share in shares]
    if sum(shares) > MAX_PERIOD:
        raise ValueError(
            f"weights={[float(weight) for weight in weights]} repeat after {sum(shares):,} rows "
            f"only, and at most {MAX_PERIOD:,} are laid out: give them with fewer digits"
        )
    return tuple(shares)


def rounded(weights: Sequence[float | int]) -> tuple[int, ...]:
    """Positive weights as integers whose sum is at most `MAX_PERIOD`, each of them 1 at least."""
    room = MAX_PERIOD - len(weights)
    shares = [1 + math.floor(room * weight / sum(weights)) for weight in weights]
    return tuple(share // math.gcd(*shares) for share in shares)


def lay_out(shares: Sequence[int]) -> Int64[np.ndarray, "period"]:
    """The source of each grain of a period, in which source s has `shares[s]`.

    Source s with share a of a period D has its j-th grain in [floor(j D / a), ceil((j + 1) D / a)):
    then its count is within one of its weight times g at every g. Those windows can all be met on
    one machine (Baruah et al., "Proportionate progress", 1996), so the earliest deadline first
    meets them.
    """
    period = sum(shares)
    jobs = sorted(
        (j * period // share, -(-(j + 1) * period // share), source)
        for source, share in enumerate(shares)
        for j in range(share)
    )
    order, ready, following = np.zeros(period, np.int64), list[tuple[int, int]](), 0
    for place in range(period):
        while following < period and jobs[following][0] <= place:
            heapq.heappush(ready, jobs[following][1:])
            following += 1
        order[place] = heapq.heappop(ready)[1]
    return order


class Stage(NamedTuple):
    """Shares of the sources from a batch on."""

    start: int
    shares: tuple[int, ...]


class Schedule:
    """The sources of the grains, `per_batch` of them in each batch, in stages from batch 0 on.

    A stage begins a period anew, and each source's numbers continue. Memory: 16 bytes for each
    grain of the stages' periods, and nothing that grows with the steps.
    """

    def __init__(self, stages: Sequence[Stage], per_batch: int = 1):
        self.stages, self.per_batch = tuple(stages), per_batch
        self._begins = [stage.start * per_batch for stage in stages]
        if self._begins[0] != 0 or sorted(set(self._begins)) != self._begins:
            raise ValueError(
                f"stages begin at {[stage.start for stage in stages]}: the first one is at 0, and "
                "each later than the one before"
            )
        self._tables = [_Table(stage.shares) for stage in stages]
        self._before = [np.zeros(len(stages[0].shares), np.int64)]  # each source's at the begin
        for i, table in enumerate(self._tables[:-1]):
            length = self._begins[i + 1] - self._begins[i]
            self._before.append(self._before[i] + table.counts(length))

    def locate(self, grain: int) -> tuple[int, int]:
        """(the source of a grain, the grain's number within the source)."""
        stage, table, place = self._place(grain)
        source, number = table.locate(place)
        return source, int(self._before[stage][source]) + number

    def source_of(self, grain: int) -> int:
        """The source of a grain."""
        return self.locate(grain)[0]

    def counts(self, batches: int) -> Int64[np.ndarray, "sources"]:
        """The grains of each source in the first `batches` batches."""
        stage, table, place = self._place(batches * self.per_batch)
        return self._before[stage] + table.counts(place)

    def _place(self, grain: int) -> tuple[int, "_Table", int]:
        stage = bisect.bisect_right(self._begins, grain) - 1
        return stage, self._tables[stage], grain - self._begins[stage]


@functools.lru_cache(maxsize=16)
def _layout(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(the source of each grain of a period, its number within the source)."""
    order = lay_out(shares)
    ranks = np.zeros_like(order)
    for source, share in enumerate(shares):
        ranks[order == source] = np.arange(share)
    return order, ranks


class _Table:
    """A period, repeated without end."""

    def __init__(self, shares: tuple[int, ...]):
        self._shares = np.asarray(shares, np.int64)
        self._order, self._ranks = _layout(shares)

    def locate(self, place: int) -> tuple[int, int]:
        periods, place = divmod(place, len(self._order))
        source = int(self._order[place])
        return source, periods * int(self._shares[source]) + int(self._ranks[place])

    def counts(self, length: int) -> Int64[np.ndarray, "sources"]:
        periods, rest = divmod(length, len(self._order))
        begun = np.bincount(self._order[:rest], minlength=len(self._shares))
        return periods * self._shares + begun
