"""The soak in short, and restoring damaged checkpoints."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.soak import boundaries
from zoo.runs import recorder

# What is left out passes no moment that the others do not; `python -m benchmarks.soak` has all.
LEFT_OUT = "adapters", "classification", "distillation", "DPO of adapters"
KINDS = [kind for kind in boundaries.KINDS if kind not in LEFT_OUT]


def run_recipe(*arguments: Any) -> None:
    """Without the curves, which would take a third of the time of such a run."""
    recorder.plot_curves = lambda *paths: None
    boundaries.run_recipe(*arguments)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[boundaries.Kinds]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundaries, "run_recipe", run_recipe)  # in this process, not in the runs'
        yield boundaries.Kinds(tmp_path_factory.mktemp("kinds"))


def assert_same_after_kills(kinds: boundaries.Kinds, kind: str, chosen: Sequence[str]) -> None:
    """One life, killed at each of the boundaries in turn."""
    left = [*chosen]
    outcomes = boundaries.live(kinds, kind, lambda *_: (left.pop(0), 1) if left else None)
    assert not [outcome.detail for outcome in outcomes if outcome.detail]
    assert [outcome.boundary for outcome in outcomes] == [*chosen]


@pytest.fixture(scope="module")
def shares(kinds) -> dict[str, list[str]]:
    """Each boundary once, of a kind of run that passes it: of the kind with the fewest so far."""
    passed = {kind: {*kinds.straight(kind)[1]} for kind in KINDS}
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted(set.union(*passed.values())):
        having = [kind for kind in found if name in passed[kind]]
        found[min(having, key=lambda kind: len(found[kind]))].append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_at_all_boundaries_match_straight_runs(kind, kinds, shares):
    assert len(shares[kind]) >= 3
    order = [*dict.fromkeys(kinds.straight(kind)[1])]
    assert_same_after_kills(kinds, kind, sorted(shares[kind], key=order.index))


@pytest.mark.slow
def test_every_moment_is_passed_by_some_kind(kinds):
    passed = {name for kind in KINDS for name in kinds.straight(kind)[1]}
    for moment in {*boundaries.MOMENTS} - {"evaluation"}:
        assert {f"before {moment}", f"after {moment}"} <= passed
