"""zoo.data.mixtures: counts within one of the weights, the same batches anywhere, what is refused."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.data.corpus import Corpus
from zoo.data.mixtures.plan import MixedSource, MixturePlan
from zoo.data.mixtures.schedule import Schedule, Stage, rounded, shares_of
from zoo.data.mixtures.spec import parse
from zoo.data.plans import Plan
from zoo.data.token_plans import BucketPlan, PackedPlan

weight = st.integers(0, 300).map(lambda share: Fraction(share, 100))
weights = st.lists(weight, min_size=2, max_size=8).filter(any)


def check_stage(
    schedule: Schedule, stage: int, begin: int, rows: int, before: list[int]
) -> list[int]:
    """Every count of a stage, and the numbers of its rows; the counts after it."""
    shares = [x / sum(schedule.stages[stage].weights) for x in schedule.stages[stage].weights]
    counts = [0] * len(shares)
    for row in range(rows):
        source, number = schedule.place(begin + row)
        assert number == before[source] + counts[source]  # without a gap
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - share * (row + 1)) <= 1
        assert schedule.counts(begin + row + 1) == [a + b for a, b in zip(before, counts)]
    return [a + b for a, b in zip(before, counts, strict=True)]


@settings(max_examples=40, deadline=None)
@given(st.lists(weights.filter(lambda x: len(x) == 3), min_size=1, max_size=3), st.integers(1, 7))
def test_counts_are_within_one_of_the_weights(stages: list[list[Fraction]], per_batch: int):
    starts = [0, 11, 40][: len(stages)]
    chosen = [Stage(start, tuple(x)) for start, x in zip(starts, stages, strict=True)]
    schedule = Schedule(chosen, per_batch)
    before, ends = [0, 0, 0], [*starts[1:], starts[-1] + 30]
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        rows = (end - start) * per_batch
        before = check_stage(schedule, stage, start * per_batch, rows, before)


@settings(max_examples=60, deadline=None)
@given(weights, st.integers(0, 10**12))
def test_a_row_far_away_is_where_it_belongs(chosen: list[Fraction], row: int):
    schedule = Schedule([Stage(0, tuple(chosen))], 1)
    source, number = schedule.place(row)
    assert number == schedule.counts(row)[source]
    for count, x in zip(schedule.counts(row), chosen, strict=True):
        assert abs(count - x / sum(chosen) * row) <= 1


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 20_000), min_size=2, max_size=12).filter(any))
def test_periods_of_very_different_weights(shares: list[int]):
    total = sum(shares)
    if total > 60_000:
        shares = [share // 4 for share in shares]
    if not any(shares):
        return
    schedule = Schedule([Stage(0, tuple(map(Fraction, shares)))], 1)
    check_stage(schedule, 0, 0, min(total, 3000), [0] * len(shares))


def test_shares_and_what_they_cannot_be():
    assert shares_of([Fraction("0.7"), Fraction("0.3")]) == (7, 3)
    assert shares_of([Fraction(2), Fraction(0), Fraction(4)]) == (1, 0, 2)
    with pytest.raises(ValueError, match="are all zero"):
        shares_of([Fraction(0)] * 2)
    with pytest.raises(ValueError, match="must not be negative"):
        shares_of([Fraction(1), Fraction(-1)])
    with pytest.raises(ValueError, match="fewer digits"):
        shares_of([Fraction("0.1234567"), Fraction("0.3")])
    assert sum(rounded([1e-9, 5.0, 7.0])) == 1
    assert min(rounded([1e-9, 5.0, 7.0])) > 0
    with pytest.raises(ValueError, match=r"stages start at \[0, 5, 5\]"):
        Schedule([Stage(start, (Fraction(1),)) for start in (0, 5, 5)], 1)


def corpus(lengths: list[int], first: int) -> Corpus:
    documents = [np.full(n, first + i, np.int32) for i, n in enumerate(lengths)]
    return Corpus.from_arrays(documents, 60, sum(lengths))


def plan_of(stages: list[tuple[int, list[int]]], by_batch: bool = False, **options) -> MixturePlan:
    rng = np.random.default_rng(0)
    corpora = [corpus(rng.integers(3, 30, 20).tolist(), first) for first in (1, 30)]
    if by_batch:
        plans = [BucketPlan(c, 0, (16, 32), 4, seed=3) for c in corpora]
    else:
        plans = [PackedPlan(c, 0, 16, 4, seed=3) for c in corpora]
    chosen = [Stage(start, tuple(map(Fraction, x))) for start, x in stages]
    sources = [
        MixedSource("low", plans[0], **options),
        MixedSource("high", plans[1]),
    ]
    return MixturePlan(sources, Schedule(chosen, 1 if by_batch else 4), by_batch)


def source_of(row: np.ndarray) -> int:
    return int(row[row > 0].max() >= 30)


@pytest.mark.parametrize("by_batch", [False, True], ids=["packed", "bucketed"])
def test_batches_are_functions_of_their_number(by_batch: bool):
    plan = plan_of([(0, [3, 1]), (9, [1, 4])], by_batch)
    assert isinstance(plan, Plan)
    batches = [plan.batch(k) for k in range(30)]
    again = plan_of([(0, [3, 1]), (9, [1, 4])], by_batch)
    for k in reversed(range(30)):
        for name, array in batches[k].items():
            np.testing.assert_array_equal(again.batch(k)[name], array)
            parts = [again.batch(k, slice(i, i + 1))[name] for i in range(4)]
            np.testing.assert_array_equal(np.concatenate(parts), array)
    rows = [row for batch in batches for row in batch["tokens"] if row.any()]
    assert 0.2 < np.mean([source_of(row) for row in rows[:36]]) < 0.3
    assert 0.7 < np.mean([source_of(row) for row in rows[36:]]) < 0.9


def test_each_epoch_of_a_source_has_all_of_it():
    plan = plan_of([(0, [3, 1])])
    low = plan.sources[0]
    rows = [
        row.tolist()
        for k in range(40)
        for row in plan.batch(k)["tokens"]
        if not row.any() or source_of(row) == 0
    ]
    epochs = [rows[i * low.num_rows : (i + 1) * low.num_rows] for i in range(3)]
    wanted = sorted(low.plan.corpus.tokens.tolist())
    for epoch in epochs:
        assert sorted(token for row in epoch for token in row if token) == wanted
    assert epochs[0] != epochs[1]
    assert plan.epochs(40)["low"] == pytest.approx(120 / low.num_rows)
    assert plan.progress(40)["low/epoch"] == pytest.approx(120 / low.num_rows, abs=1e-4)


def test_a_limit_takes_the_same_rows_in_each_epoch():
    plan = plan_of([(0, [1, 0])], limit=48)
    assert plan.sources[0].num_rows == 3
    rows = [tuple(row.tolist()) for k in range(30) for row in plan.batch(k)["tokens"]]
    epochs = [rows[i : i + 3] for i in range(0, 120, 3)]
    assert {frozenset(epoch) for epoch in epochs} == {frozenset(epochs[0])}
    assert len(set(epochs[0])) == 3
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_more_epochs_than_allowed_are_refused_in_advance():
    plan = plan_of([(0, [3, 1])], max_epochs=2)
    plan.check_epochs(8)
    with pytest.raises(
        ValueError, match=r"40 steps read the source 'low' 5\.\d\d times, and its max_epochs=2"
    ):
        plan.check_epochs(40)


def test_descriptions_on_the_command_line():
    spec = parse("code=src/**/*.py,more/*.py:0.7,help=s3://bucket/x:0.3")
    assert spec is not None
    assert [(s.name, s.files, s.weight) for s in spec.sources] == [
        ("code", "src/**/*.py,more/*.py", Fraction("0.7")),
        ("help", "s3://bucket/x", Fraction("0.3")),
    ]
    for plain in ("a/*.txt,b/*.txt", "s3://bucket/a=b/*.txt", "./a=b/*.txt", ""):
        assert parse(plain) is None


TABLE = """
[sources.code]
files = "src/*.py"
weight = 0.7
max_epochs = 4
[sources.help]
files = "docs/*.md"
weight = 0.3
limit = 1000
[[stages]]
start = 40
weights = {code = 1, help = 1}
[[stages]]
last = 10
weights = {help = 1}
"""


def test_descriptions_in_a_table(tmp_path: Path):
    path = tmp_path / "mixture.toml"
    path.write_text(TABLE)
    spec = parse(str(path))
    assert spec is not None
    assert spec.sources[1].limit == 1000
    stages = spec.resolved([1, 1], 100)
    assert [stage.start for stage in stages] == [0, 40, 90]
    assert stages[2].weights == (0, 1)
    with pytest.raises(ValueError, match=r"a stage with last=10 \(start=35\) comes after one that"):
        spec.resolved([1, 1], 45)
    path.write_text(TABLE.replace("weight = 0.7", "").replace("weight = 0.3", "").split("[[")[0])
    with pytest.raises(ValueError, match=r"\[sources.code\]: give each source a weight"):
        parse(str(path))
    path.write_text(
        f"temperature = 2\n{TABLE}".replace("weight = 0.7", "").replace("weight = 0.3", "")
    )
    spec = parse(str(path))
    assert spec is not None
    [first, *_] = spec.resolved([400, 100], 100)
    assert [float(x) for x in first.weights] == pytest.approx([2 / 3, 1 / 3], abs=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=x:0,b=y:0", "are all zero"),
        ("a=x:-1,b=y:1", "must not be negative"),
        ("a=x:nan,b=y:1", "weight='nan' must be a finite number"),
        ("a=x,b=y:1", "the source 'a' has no weight"),
        ("a=x:1,a=y:1", "names the source 'a' twice"),
        ("a=:1,b=y:1", "the source 'a' has no files"),
    ],
)
def test_impossible_mixtures_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("limit = 1000", "limit = 0", r"\[sources.help\] limit=0: must be positive"),
        ("limit", "limits", r"has the key 'limits': known are"),
        ('files = "src/*.py"', "", r"\[sources.code\] has no files"),
        ("help = 1}\n[[", "hel = 1}\n[[", r"a stage has weights of \['hel'\]: the sources are"),
        ("start = 40", "", "a stage needs weights, and start or last"),
        ("start = 40", "start = 0", "start or last=0: give a positive number"),
        ("[sources.code]", "[sources.code", "is no TOML"),
        ("weight = 0.7", 'weight = "x"', "weight='x' is no number"),
    ],
)
def test_impossible_tables_are_refused(tmp_path: Path, old: str, new: str, message: str):
    assert old in TABLE
    path = tmp_path / "mixture.toml"
    path.write_text(TABLE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        parse(str(path))
