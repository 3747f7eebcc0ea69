"""The soak in short."""

from collections.abc import Sequence

import pytest
import soak

# What is left out passes no moment that the others do not; `python tests/soak.py` has all.
LEFT_OUT = "adapters", "classification", "distillation", "DPO of adapters"
KINDS = [kind for kind in soak.KINDS if kind not in LEFT_OUT]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> soak.Kinds:
    return soak.Kinds(tmp_path_factory.mktemp("kinds"))


def assert_same_after_kills(kinds: soak.Kinds, kind: str, chosen: Sequence[str]) -> None:
    """One life, killed at each of the boundaries in turn."""
    left = [*chosen]
    outcomes = soak.live(kinds, kind, lambda *_: (left.pop(0), 1) if left else None)
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
    for moment in {*soak.MOMENTS} - {"evaluation"}:
        assert {f"before {moment}", f"after {moment}"} <= passed
