"""The lock of an address: a lease, which its owner renews and which a crashed owner loses.

The lease with the highest number counts, such as `lease/00000007`. A new owner creates the next
number, once the last lease was given back or was not renewed for `seconds`, by the store's clock or
by the time that a starter has watched it. Where a store can create an object only if there is none,
one starter alone succeeds. Elsewhere the last writer reads itself back after a wait, and an earlier
one finds another's name, there or when it renews.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

from zoo.common.store import Store
from zoo.runs.processes import RunError

SECONDS = 60.0  # for which a lease outlives its owner
SETTLE = 3.0  # for which a starter waits before it reads itself back, on stores that need it
_BEATS = 6  # renewals in the seconds of a lease


def boot_clock() -> float:
    """Seconds that go on while the machine is suspended, where there is such a clock."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class LeaseError(RunError):
    """Another process is at work at the address."""


class Lease:
    """One process' right to write at an address, from `acquire` to `release`."""

    def __init__(
        self,
        store: Store,
        *,
        seconds: float = SECONDS,
        settle: float = SETTLE,
        say: Callable[[str], object] = lambda text: None,
        sleep: Callable[[float], object] = time.sleep,
    ):
        self.owner = uuid.uuid4().hex
        self.previous: str | None = None
        """The owner before this one, if there was one."""
        self._store, self._seconds, self._settle = store, seconds, settle
        self._say, self._sleep = say, sleep
        self._number, self._beats, self._renewed = 0, 0, 0.0
        self._lost: LeaseError | None = None
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)

    def acquire(self, dead: Collection[str] = ()) -> None:
        """Become the owner; after a crashed one, at the latest when its lease runs out.

        `dead` are owners that are known to have ended.

        Raises:
            LeaseError: another process renews the lease, or was quicker.
        """
        first = watched = None
        ends = 0.0
        while True:
            began = boot_clock()
            number, found = newest(self._store)
            first = number if first is None else first
            alive = found is not None and not found["released"] and found["owner"] not in dead
            if alive and found != watched:
                if watched is not None or number != first:
                    raise LeaseError(
                        f"another process is training in {self._store.address}; use another "
                        "--run-dir"
                    )
                watched, ends = found, began + self._seconds - self._age(number)
                if ends > began:
                    self._say(
                        f"{self._store.address}: another process is at work, or was killed there; "
                        f"waiting for up to {ends - began:.0f} s to see which"
                    )
            if not alive or boot_clock() >= ends:
                self.previous = None if found is None else found["owner"]
                if self._create(number + 1, began):
                    break
                continue
            self._sleep(min(1.0, self._seconds / 20))
        older = [_name(n) for n in _numbers(self._store) if n < self._number]
        self._store.remove(older)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseError if the lease is lost; renew it first if that is due.

        Whatever is written at the address is written after a check. Errors of the store, which
        leave it unknown, are raised too.
        """
        if self._lost is None and boot_clock() - self._renewed > self._seconds / 2:
            self._renew()
        self.check_known()

    def check_known(self) -> None:
        """Raise LeaseError if the lease is known to be lost, without asking the store."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Give the lease back, where the store answers and it is not lost."""
        self._released.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(Exception), self._lock:
            if self._lost is None and self._is_mine():
                self._store.write(_name(self._number), self._content(released=True))

    def _renew_regularly(self) -> None:
        while not self._released.wait(self._seconds / _BEATS) and self._lost is None:
            with contextlib.suppress(Exception):  # `check` says so, once it matters
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            began = boot_clock()
            if not self._is_mine():
                self._lost = LeaseError(
                    f"another process has taken over the run in {self._store.address}, as this "
                    f"one had not renewed its lease for {self._seconds:.0f} s (or the lease was "
                    "removed by hand). This process stops, and writes nothing there any more."
                )
                return
            self._beats += 1
            self._store.write(_name(self._number), self._content())
            self._renewed = began

    def _is_mine(self) -> bool:
        number, found = newest(self._store)
        return number == self._number and found is not None and found["owner"] == self.owner

    def _create(self, number: int, began: float) -> bool:
        """Try to become the owner by a lease of this number, which was free when this `began`."""
        name, content = _name(number), self._content()
        self._store.create(name, content)
        # False may be this one's own object too, after an answer that was lost on its way.
        if self._store.create(name, content):
            # The store replaces it: a slow one of two may have written over one that is at work,
            # and then waits until that one has found out.
            quick = boot_clock() - began < self._settle
            self._sleep(self._settle if quick else self._seconds)
        self._number, self._renewed = number, boot_clock()
        if not self._is_mine():
            return False
        self._store.write(name, self._content())
        return True

    def _age(self, number: int) -> float:
        """The seconds since a lease was renewed, by the clock of the store alone."""
        probe = f"lease/now-{self.owner}"
        self._store.write(probe, b"")
        now, then = self._store.modified(probe), self._store.modified(_name(number))
        self._store.remove([probe])
        if now is None or then is None:  # it was taken over in this moment
            return 0.0
        return (now - then).total_seconds()

    def _content(self, *, released: bool = False) -> bytes:
        content = {"owner": self.owner, "renewals": self._beats, "released": released}
        return json.dumps(content).encode()


def newest(store: Store) -> tuple[int, dict[str, Any] | None]:
    """The highest number and its lease; 0 and None without one."""
    while True:
        number = max(_numbers(store), default=0)
        found = store.read(_name(number)) if number else None
        if found is not None or not number:
            return number, None if found is None else json.loads(found)


def _numbers(store: Store) -> list[int]:
    return [int(name) for name in store.names("lease") if name.isdecimal()]


def _name(number: int) -> str:
    return f"lease/{number:08}"
