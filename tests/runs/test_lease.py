"""The lease of an address: one owner at a time, on stores that create once and that replace."""

from datetime import timedelta

import fsspec
import pytest

from zoo.common.store import Store
from zoo.runs.remote import lease
from zoo.runs.remote.lease import Lease, LeaseError

ADDRESS = "memory://bucket/run"


@pytest.fixture(autouse=True)
def bucket():
    """The objects of the bucket, none at first: path -> bytes."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return lambda: {path.removeprefix("/bucket/run/"): fs.cat_file(path) for path in fs.find("/")}


class Clock:
    """A clock in which sleeping takes no time; and what happens at a time."""

    def __init__(self):
        self.now = 1000.0
        self.during = lambda: None

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.during()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lease, "boot_clock", clock)
    return clock


def make_lease(clock, store=None, **options):
    made = Lease(store or Store(ADDRESS), sleep=clock.sleep, **options)
    made._released.set()  # no thread renews it: the tests do
    return made


class Replacing(Store):
    """A store that does not know how to create only what is not there."""

    def create(self, name, content):
        self.write(name, content)
        return True


@pytest.mark.parametrize("store", [Store, Replacing])
def test_one_process_has_the_lease(store, clock):
    first = make_lease(clock, store(ADDRESS))
    first.acquire()
    first.check()
    clock.during = first._renew
    with pytest.raises(LeaseError, match="training in memory://bucket/run"):
        make_lease(clock, store(ADDRESS)).acquire()
    clock.during = lambda: None
    first.release()
    then = clock.now
    second = make_lease(clock, store(ADDRESS))
    second.acquire()
    assert second.previous == first.owner
    assert clock.now - then <= lease.SETTLE  # it did not wait for the end of one given back
    second.check()


@pytest.mark.parametrize("store", [Store, Replacing])
def test_a_crashed_owner_loses_the_lease_after_its_time(store, clock):
    crashed, said = make_lease(clock, store(ADDRESS)), []
    crashed.acquire()
    then = clock.now
    second = make_lease(clock, store(ADDRESS), say=said.append)
    second.acquire()
    assert lease.SECONDS <= clock.now - then <= lease.SECONDS + 2 + lease.SETTLE
    assert ["waiting for up to 60 s" in x for x in said] == [True]
    with pytest.raises(LeaseError, match=r"taken over .* memory://"):
        crashed.check()  # it was only asleep
    second.check()
    third = make_lease(clock, store(ADDRESS))
    third.acquire(dead=[second.owner])  # known to have ended


@pytest.mark.parametrize("age", [45, 61])
def test_a_starter_waits_for_the_rest_of_a_crashed_owners_time(age, clock):
    crashed, said = make_lease(clock), []
    crashed.acquire()
    fsspec.filesystem("memory").store["/bucket/run/lease/00000001"].modified -= timedelta(0, age)
    then = clock.now
    make_lease(clock, say=said.append).acquire()
    left = max(lease.SECONDS - age, 0)
    assert left - 1 <= clock.now - then <= left + 2 + lease.SETTLE
    assert len(said) == (left > 0)
    assert not [x for x in Store(ADDRESS).names("lease") if not x.isdecimal()]


@pytest.mark.parametrize("store", [Store, Replacing])
@pytest.mark.parametrize("at", ["create", "read", "write", "names"])
def test_two_starters_never_both_win(store, at, clock):
    """The second one starts, and comes to its end, within each request of the first one."""
    outcomes, requests = [], 0
    while True:
        Store(ADDRESS).remove([f"lease/{x}" for x in Store(ADDRESS).names("lease")])
        slow, count = store(ADDRESS), 0
        other = make_lease(clock, store(ADDRESS))
        plain = getattr(slow, at)

        def call(*arguments, plain=plain, other=other, at_request=requests + 1):
            nonlocal count
            count += 1
            if count == at_request:
                other.acquire()
            return plain(*arguments)

        setattr(slow, at, call)
        first = make_lease(clock, slow)
        won = []
        for each in (first,):
            try:
                each.acquire()
                won.append(each)
            except LeaseError:
                pass
        if count <= requests:
            break
        for each in (other, first):
            each._renewed = -1e9  # its next check asks
        alive = []
        for each in (other, *won):
            try:
                each.check()
                alive.append(each)
            except LeaseError:
                pass
        assert len(alive) == 1
        outcomes.append(len(won))
        requests += 1
    assert outcomes


def test_a_slow_starter_waits_until_the_other_one_has_found_out(clock):
    slow, other = Replacing(ADDRESS), make_lease(clock, Replacing(ADDRESS))
    create = slow.create

    def late(name, content):
        if not other._number:
            other.acquire()
            clock.now += 100  # between its looking and its writing
        return create(name, content)

    slow.create = late
    first = make_lease(clock, slow)
    beat = 1000.0 + 100 + lease.SECONDS / 6
    clock.during = lambda: other._renew() if clock.now >= beat else None
    first.acquire()
    with pytest.raises(LeaseError):
        other.check_known()
    first.check()
