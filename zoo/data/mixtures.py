"""Mixtures: the source of row g of a run, and the row's number there, by a closed form of g."""

import bisect
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from zoo.data.datasets import HostBatch, Row, SeededDataset
from zoo.data.token_datasets import TokenDataset

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
            f"weights={[float(weight) for weight in weights]} repeat only after {sum(shares):,} "
            f"rows, and at most {MAX_PERIOD:,} are laid out: give them with fewer digits"
        )
    return tuple(shares)


def rounded(weights: Sequence[float | int]) -> tuple[int, ...]:
    """Positive weights as integers of at least 1, whose sum is at most `MAX_PERIOD`."""
    room = MAX_PERIOD - len(weights)
    shares = [1 + math.floor(room * weight / sum(weights)) for weight in weights]
    return tuple(share // math.gcd(*shares) for share in shares)


def lay_out(shares: Sequence[int]) -> Int64[np.ndarray, "period"]:
    """The source of each grain of a period, in which source s has `shares[s]`.

    Source s with share a of a period D has its j-th grain in [floor(j D / a), ceil((j + 1) D / a)):
    then its count is within one of its weight times g at every g. All of these windows can be met
    on one machine (Baruah et al., "Proportionate progress", 1996), so the earliest deadline first
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

    A grain is a row, or a batch where all rows of a batch are of one source. A stage begins a
    period anew, and each source's numbers continue. Memory: 16 bytes for each grain of the stages'
    periods, and nothing that grows with the steps.
    """

    def __init__(self, stages: Sequence[Stage], per_batch: int = 1):
        starts = [stage.start for stage in stages]
        if starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(
                f"stages begin at {starts}: the first one is at 0, and each later than the one "
                "before"
            )
        self.stages, self.per_batch = tuple(stages), per_batch
        self._begins = [start * per_batch for start in starts]
        self._orders = [lay_out(stage.shares) for stage in stages]
        self._ranks = [_ranks(order) for order in self._orders]  # numbers within the source
        self._before = [np.zeros(len(stages[0].shares), np.int64)]  # of each source, per stage
        for start in starts[1:]:
            self._before.append(self.counts(start))

    def locate(self, grain: int) -> tuple[int, int]:
        """(the source of a grain, the grain's number within the source)."""
        stage, periods, place = self._place(grain)
        source = int(self._orders[stage][place])
        number = periods * self.stages[stage].shares[source] + int(self._ranks[stage][place])
        return source, int(self._before[stage][source]) + number

    def counts(self, batches: int) -> Int64[np.ndarray, "sources"]:
        """The grains of each source in the first `batches` batches."""
        stage, periods, place = self._place(batches * self.per_batch)
        shares = np.asarray(self.stages[stage].shares, np.int64)
        begun = np.bincount(self._orders[stage][:place], minlength=len(shares))
        return self._before[stage] + periods * shares + begun

    def _place(self, grain: int) -> tuple[int, int, int]:
        """(the stage of a grain, the whole periods before it there, its place in its own)."""
        stage = bisect.bisect_right(self._begins, grain, hi=len(self._before)) - 1
        return stage, *divmod(grain - self._begins[stage], len(self._orders[stage]))


def _ranks(order: Int64[np.ndarray, "period"]) -> Int64[np.ndarray, "period"]:
    ranks = np.zeros_like(order)
    for source in np.unique(order):
        ranks[order == source] = np.arange(np.count_nonzero(order == source))
    return ranks


@dataclass(frozen=True)
class Totals:
    """The sums of several corpora."""

    vocab_size: int
    num_documents: int
    num_tokens: int
    num_counted: int
    num_bytes: int

    def __len__(self) -> int:
        return self.num_documents


class MixtureDataset(TokenDataset):
    """Batches of several sources' datasets, in shares that `stages` give them from batch 0 on.

    Packed rows are mixed row by row, and bucketed ones batch by batch. Each source's rows come in
    the order of its own dataset, one epoch of it after the other, whatever the other sources do.

    Raises:
        ValueError: datasets that do not go together.
    """

    corpus: Any  # Totals

    def __init__(self, datasets: Mapping[str, TokenDataset], stages: Sequence[Stage]):
        first = next(iter(datasets.values()))
        corpora = [dataset.corpus for dataset in datasets.values()]
        for name in ("batch_size", "begin_id", "end_id", "seq_len", "vocab_size", "framed"):
            values = {
                source: getattr(dataset if hasattr(dataset, name) else dataset.corpus, name, None)
                for source, dataset in datasets.items()
            }
            if len(set(values.values())) > 1:
                raise ValueError(f"a mixture has one {name}, and its sources have {values}")
        SeededDataset.__init__(self, first.batch_size, first.seed, first.shuffle)
        self.datasets, self.begin_id, self.end_id = dict(datasets), first.begin_id, first.end_id
        self.frame = first.frame
        sums = (
            sum(getattr(corpus, name) for corpus in corpora)
            for name in ("num_tokens", "num_counted", "num_bytes")
        )
        self.corpus = Totals(corpora[0].vocab_size, sum(map(len, corpora)), *sums)
        self._sources = list(datasets.values())
        self._mixes_rows = hasattr(first, "seq_len")
        self.schedule = Schedule(stages, self.batch_size if self._mixes_rows else 1)
        self.buckets = tuple(
            sorted({size for dataset in self._sources for size in dataset.buckets})
        )
        rows = sum(dataset.num_rows for dataset in self._sources)
        self.batches_per_epoch = math.ceil(rows / self.batch_size)
        self.num_rows = self.batches_per_epoch * self.batch_size
        # The mean over the sources, weighted by their numbers of rows.
        self.padding_waste = sum(p.padding_waste * p.num_rows for p in self._sources) / rows

    def _content(self) -> Iterator[Any]:
        yield from ([*self.datasets], self.schedule.stages, self.batch_size)
        yield from (dataset.fingerprint for dataset in self._sources)

    def epochs(self, batches: int) -> dict[str, float]:
        """How often each source has been read in the first `batches` batches."""
        rows = self.schedule.counts(batches) * (1 if self._mixes_rows else self.batch_size)
        return {
            name: int(count) / dataset.num_rows
            for count, (name, dataset) in zip(rows, self.datasets.items(), strict=True)
        }

    def bucket(self, k: int) -> int:
        """The sequence length of batch k."""
        if self._mixes_rows:
            return self.buckets[0]
        source, number = self.schedule.locate(k)
        return self._sources[source].bucket(number)

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket: also `source`, the index of its source."""
        return {**super().row(bucket), "source": ((), np.int32)}

    def _build(self, k: int, rows: range) -> HostBatch:
        located = [self._locate(k, row)[0] for row in rows]
        return {**super()._build(k, rows), "source": np.asarray(located, np.int32)}

    def _fill(self, arrays: HostBatch, k: int, row: int) -> None:
        source, number = self._locate(k, row)
        dataset = self._sources[source]
        dataset.fill_row(arrays, dataset.row_pieces(*divmod(number, dataset.num_rows)))

    def _locate(self, k: int, row: int) -> tuple[int, int]:
        """(the source of a row of batch k, the row's number within the source)."""
        if self._mixes_rows:
            return self.schedule.locate(k * self.batch_size + row)
        source, batch = self.schedule.locate(k)
        return source, batch * self.batch_size + row

    def describe_buckets(self) -> str:
        """One line per bucket of each source that has several; else none."""
        lines = [
            f"{name}: {line}"
            for name, dataset in self.datasets.items()
            for line in dataset.describe_buckets().splitlines()
        ]
        return "\n".join(lines)
