"""Batches of several token plans, mixed by a schedule."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.data.corpus import Corpus, JoinedCorpus, Piece
from zoo.data.mixtures.schedule import Schedule, Stage
from zoo.data.plans import HostBatch, Row
from zoo.data.token_plans import TokenPlan


class MixturePlan(TokenPlan):
    """Batches of several sources' plans, in shares that `stages` give them from batch 0 on.

    Packed rows are mixed row by row, and bucketed ones batch by batch. Each source's rows come in
    the order of its own plan, one epoch of it after the other, whatever the other sources do.

    Raises:
        ValueError: plans that do not go together.
    """

    def __init__(self, plans: Mapping[str, TokenPlan], stages: Sequence[Stage]):
        self.plans, first = dict(plans), next(iter(plans.values()))
        for name in ("batch_size", "begin_id", "end_id", "seq_len"):
            values = {source: getattr(plan, name, None) for source, plan in plans.items()}
            if len(set(values.values())) > 1:
                raise ValueError(f"a mixture has one {name}, and its sources have {values}")
        corpora = [plan.corpus for plan in plans.values() if isinstance(plan.corpus, Corpus)]
        for name in ("vocab_size", "framed"):
            values = dict(zip(plans, (getattr(corpus, name) for corpus in corpora), strict=True))
            if len(set(values.values())) > 1:
                raise ValueError(f"a mixture has one {name}, and its sources have {values}")
        joined = JoinedCorpus(corpora)
        super().__init__(
            joined, (first.begin_id, first.end_id), first.batch_size, first.seed, first.shuffle
        )
        self._sources, self._begins = list(plans.values()), joined.begins
        self._mixes_rows = hasattr(first, "seq_len")
        self.schedule = Schedule(stages, self.batch_size if self._mixes_rows else 1)
        self.buckets = tuple(sorted({size for plan in self._sources for size in plan.buckets}))
        rows = sum(plan.num_rows for plan in self._sources)
        self.batches_per_epoch = math.ceil(rows / self.batch_size)
        self.num_rows = self.batches_per_epoch * self.batch_size
        # That of a batch of each source's average rows, so many as it has.
        self.padding_waste = sum(p.padding_waste * p.num_rows for p in self._sources) / rows

    def _content(self) -> Iterator[Any]:
        yield from ([*self.plans], self.schedule.stages)
        yield from (plan.fingerprint for plan in self._sources)

    def epochs(self, batches: int) -> dict[str, float]:
        """How often each source has been read in the first `batches` batches."""
        rows = self.schedule.counts(batches) * (1 if self._mixes_rows else self.batch_size)
        return {
            name: int(count) / plan.num_rows
            for count, (name, plan) in zip(rows, self.plans.items(), strict=True)
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
        grains = [k * self.batch_size + row if self._mixes_rows else k for row in rows]
        sources = [self.schedule.source_of(grain) for grain in grains]
        return {**super()._build(k, rows), "source": np.asarray(sources, np.int32)}

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row of so many rows as all sources have: the mixture has no epochs."""
        return self._pieces(*divmod(epoch * self.num_rows + row, self.batch_size))

    def _pieces(self, k: int, row: int) -> list[Piece]:
        if self._mixes_rows:
            source, number = self.schedule.locate(k * self.batch_size + row)
        else:
            source, batch = self.schedule.locate(k)
            number = batch * self.batch_size + row
        plan, begin = self._sources[source], self._begins[source]
        pieces = plan.row_pieces(*divmod(number, plan.num_rows))
        return [Piece(begin + document, start, stop) for document, start, stop in pieces]

    def describe_buckets(self) -> str:
        """One line per source and bucket, of sources that have several buckets; else none."""
        lines = [
            f"{name}: {line}"
            for name, plan in self.plans.items()
            for line in plan.describe_buckets().splitlines()
        ]
        return "\n".join(lines)
