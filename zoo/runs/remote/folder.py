"""A run folder at an address: what the run does in its working folders is copied there.

At the start the newest undamaged checkpoint counts, in the working folders or at the address. Each
process has a folder of its own, with its part of each checkpoint; all else is in that of process 0,
which holds the lease.
"""

import contextlib
import hashlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from zoo.common import files
from zoo.common.configuration import require
from zoo.common.store import SCHEMES, Store, location
from zoo.runs import processes
from zoo.runs.checkpoint import CheckpointError, local_steps, set_aside
from zoo.runs.processes import RunError
from zoo.runs.remote.copies import STEPS, Record, RemoteCopies
from zoo.runs.remote.lease import Lease, LeaseError, boot_clock, newest

_log = logging.getLogger(__name__)
CACHE = Path("~/.cache/zoo/runs")
MINUTES = 30  # without a success, after which a run stops at its next save
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between one try and the next
_PATIENCE = 30.0  # seconds in which a run that failed waits for the others' parts
_FINAL = (PermissionError, FileNotFoundError)  # no right to write, no bucket


def checked(run_dir: Path | str, work_dir: Path | None) -> Path | str:
    """The folder of a run: a local path, or an address as a text.

    Raises:
        ValueError: an address that can't be written, or a working folder of a local run.
    """
    require(str(run_dir) != "", "run_dir='': a run has a folder of its own; name one")
    place = location(run_dir, "run_dir")
    if work_dir is not None:
        files.local_path(work_dir, "work_dir")
    if not files.is_remote(place):
        require(
            work_dir is None,
            f"work_dir='{work_dir}': it is for a run at an address, and run_dir='{run_dir}' is a "
            "local folder",
        )
        return Path(run_dir)
    require(
        SCHEMES[str(files.scheme_of(place))].holds_runs,
        f"run_dir='{place}': a run can be in a local folder, or on s3:// or gs://",
    )
    return str(place)


def working_folder(address: str, given: Path | None) -> Path:
    """The local folder in which process 0 of a run at an address works."""
    if given is not None:
        return files.local_path(given, "work_dir")
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return files.local_path(CACHE, "work_dir") / f"{address.rpartition('/')[2]}-{digest}"


class RemoteFolder:
    """A context in which this run alone writes at an address, from its working folders.

    All processes enter it, each with its own folder. Its end waits until everything is copied.

    Raises:
        RunError: another process is at work there, or the two folders are of two runs.
        CheckpointError: what could not be copied, and where it is.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        *,
        keep: int,
        say: Callable[[str], object],
        lease: Lease | None = None,
    ):
        self.address, self.folder = address.rstrip("/"), folder
        self._keep, self._say = keep, say
        self._is_main = jax.process_index() == 0
        self._store = Store(self.address, "run_dir")
        self.lease = lease or Lease(self._store, say=say)  # of process 0
        self.owner = ""
        self._wanted: int | None = None  # the checkpoint to copy, as all have agreed
        self._copied: int | None = None  # the last one that was
        self._until = math.inf  # when others' parts are waited for no longer

    def __enter__(self) -> "RemoteFolder":
        with contextlib.ExitStack() as stack:
            stack.enter_context(processes.lock(self.folder, self.address))
            with contextlib.ExitStack() as failed:
                failed.callback(self.lease.release)
                copies = self._open_first() if self._is_main else None
                self.owner = processes.from_first({"owner": self.lease.owner})["owner"]
                self._copies = copies or self._open_other()
                self._fetch(self._copies)
                failed.pop_all()
            self._lock = stack.pop_all()
        self.copier = Copier(self._copy, self.address, self.folder)
        return self

    def _open_first(self) -> RemoteCopies:
        record, host = Record.read(self.folder), socket.gethostname()
        lease = self.lease
        # Whoever worked in this folder on this machine has ended: the folder's lock is free.
        ended = record.owners if record.host == host else []
        if not record.owners and (self.folder / "config.json").exists():
            raise RunError(
                f"{self.folder} holds a run of its own, and can't be the working folder of one at "
                "an address; give another --work-dir"
            )
        record.host, record.owners = host, [*record.owners[-1:], lease.owner]
        record.write(self.folder)
        lease.acquire(dead=ended)
        if lease.previous not in ended:  # the files at the address may be of another's
            record.copied = {}
        record.owners = [lease.owner]
        copies = RemoteCopies(self.folder, self._store, record, owner=lease.owner, keep=self._keep)
        self._begin(copies, record)
        return copies

    def _open_other(self) -> RemoteCopies:
        record = Record.read(self.folder)
        copies = RemoteCopies(self.folder, self._store, record, owner=self.owner, keep=self._keep)
        if record.id != copies.id:  # parts of another run, which process 0 knows nothing of
            files.remove(self.folder / STEPS)
        Record(id=copies.id).write(self.folder)
        return copies

    def _begin(self, copies: RemoteCopies, record: Record) -> None:
        """Refuse an address of another run than the working folder's, and mark it as this one's."""
        steps = local_steps(self.folder / STEPS)
        if steps and record.id != copies.id:
            there = "holds another run" if copies.id else "holds no run any more"
            raise RunError(
                f"{self.address} {there}, and its working folder {self.folder} has step "
                f"{steps[-1]} of one that was there. Move that folder away, or give another "
                f"--work-dir (and --run-dir {self.folder} continues what is in it)."
            )
        if not copies.id and copies.complete:
            raise RunError(
                f"run_dir='{self.address}': it has checkpoints/, but no run.json that says of "
                "which run they are; use another --run-dir"
            )
        copies.begin()
        record.write(self.folder)

    def _fetch(self, copies: RemoteCopies) -> None:
        """Bring the working folders up to the run at the address, as far as they are behind."""
        began = time.monotonic()
        fetched = copies.fetch_step(above=self._newest_of_all(copies))
        if not self._is_main:
            return
        if fetched is not None or copies.complete:
            copies.fetch(only_missing=fetched is None)
        else:  # without a checkpoint a run begins anew, if with the same configuration
            copies.fetch(copies.whole(), only_missing=True)
        if fetched is not None:
            seconds = time.monotonic() - began
            self._say(f"fetched step {fetched} from {self.address} in {seconds:.1f} s")

    def _newest_of_all(self, copies: RemoteCopies) -> int:
        """The newest checkpoint in the folders of all processes, or -1; newer ones are put aside.

        A process's part is gone if its machine has lost its disk, or is another one now.
        """
        steps = local_steps(self.folder / STEPS)
        mine = np.array(([-1] * 100 + steps)[-100:])
        rows = np.reshape(multihost_utils.process_allgather(mine), (-1, 100))
        newest = max(set.intersection(*({-1, *row.tolist()} for row in rows)))
        for step in (x for x in steps if x > newest):
            within = self.folder / STEPS / str(step)
            if step in copies.complete:
                files.remove(within)
            else:
                _log.warning("Not all processes have step %d: now %s", step, set_aside(within))
        return newest

    def fetch_newer(self, step: int) -> bool:
        """Fetch the newest undamaged checkpoint after a step; return whether there is one."""
        return self._copies.fetch_step(above=step) is not None

    def fetch_part(self, step: int, number: int) -> str:
        """Fetch another process's part of a step; return the reason if it cannot be."""
        return self._copies.fetch_part(step, number)

    def choose(self, step: int) -> None:
        """Agree to copy a step if the one before is there; all processes call it."""
        is_free = self._wanted == self._copied and step not in self._copies.good
        if processes.from_first({"chosen": is_free})["chosen"]:
            self._wanted = step

    def committed(self, step: int) -> set[int | None]:
        """Take a checkpoint that is whole: copy it, if it was chosen, and what else has changed.

        Returns the one that has to stay in the working folder, as it is being copied.
        """
        self.copier.begin()
        return {self._wanted}

    def check(self, *, copies: bool) -> None:
        """Raise an error if the lease is known to be lost, or `copies` fail for long."""
        if self._is_main:
            self.lease.check_known()
        if copies:
            self.copier.check()

    def settle(self, *, patient: bool = True) -> None:
        """Wait until the last checkpoint, and all files, are copied; see `Copier.wait`.

        All processes call it, but one alone where it is not patient.
        """
        if not patient:
            self._until = time.monotonic() + _PATIENCE
        if patient or jax.process_count() == 1:
            last = max(local_steps(self.folder / STEPS), default=None)
            is_there = last is None or last in self._copies.good
            if not processes.from_first({"there": is_there})["there"] or self._is_main:
                self._wanted = last
        self.copier.begin()
        self.copier.wait(self._say, patient=patient)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None or issubclass(kind, SystemExit):
                self.settle()
                if kind is None:
                    self._say(f"everything is copied to {self.address}")
            elif not issubclass(kind, KeyboardInterrupt | LeaseError | CheckpointError):
                try:
                    self.settle(patient=False)
                except (CheckpointError, LeaseError) as failure:  # the other error comes first
                    _log.warning("%s", failure)
        finally:
            at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
            if self.copier.close(0.0 if at_once else 60.0):
                self.lease.release()
            self._lock.close()

    def _copy(self) -> None:
        """In the background: copy what has changed, and then a checkpoint of before."""
        check = self.lease.check if self._is_main else self._check_owner
        step = self._wanted
        if self._is_main:
            check()
            self._copies.copy_files(check)
        if step is not None and step != self._copied and step in local_steps(self.folder / STEPS):
            check()
            self._copies.copy_step(
                step, check, lambda: self._wanted == step and time.monotonic() < self._until
            )
            self._copied = step

    def _check_owner(self) -> None:
        """Raise a LeaseError if process 0 has lost the lease."""
        _, lease = newest(self._store)
        if lease is None or lease["owner"] != self.owner:
            raise LeaseError(f"another process has taken over the run in {self.address}")


class Copier:
    """Calls `copy` in the background, as often as `begin` asks for it and until it succeeds."""

    def __init__(self, copy: Callable[[], object], address: str, working_folder: Path):
        self._copy, self._address, self._working_folder = copy, address, working_folder
        self._wanted = self._busy = self._closed = False
        self._failure: Exception | None = None  # the last one, since then without a success
        self._failing_since = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Ask for a copy of what has changed."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what keeps the copies from being made, once it has lasted too long.

        Raises:
            CheckpointError: the store refuses them, or has not answered for `MINUTES`.
            LeaseError: the lease is lost.
        """
        failure = self._failure
        if isinstance(failure, LeaseError):
            raise failure
        is_final = isinstance(failure, _FINAL) or isinstance(
            getattr(failure, "__cause__", None), _FINAL
        )
        if failure is not None and (is_final or self._failing_seconds() > MINUTES * 60):
            raise CheckpointError(self._explanation(failure)) from failure

    def wait(self, say: Callable[[str], object], *, patient: bool = True) -> None:
        """Wait until nothing is left to copy, and `say` every 15 s what it waits for.

        Without patience no failure is waited for.

        Raises:
            CheckpointError, LeaseError: as `check`.
        """
        told = time.monotonic()
        with self._changed:
            while self._wanted or self._busy:
                self.check()
                if self._failure is not None and not patient:
                    raise CheckpointError(self._explanation(self._failure)) from self._failure
                self._changed.wait(0.2)
                if time.monotonic() - told > 15:
                    told = time.monotonic()
                    say(f"copying to {self._address}{'; ' * bool(self.note())}{self.note()}")

    def note(self) -> str:
        """How long the store has not taken a copy; empty if it does."""
        if self._failure is None:
            return ""
        return (
            f"no copy to {self._address} for {self._failing_seconds() / 60:.0f} of at most "
            f"{MINUTES} min ({self._reason(self._failure)})"
        )

    def close(self, seconds: float = 60.0) -> bool:
        """End the thread, after its present work; return whether it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        tries = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._wanted, self._busy = False, True
            failure: Exception | None = None
            try:
                self._copy()
            except Exception as error:
                failure = error
            with self._changed:
                if failure is not None and self._failure is None:
                    self._failing_since = boot_clock()
                self._failure, self._busy = failure, False
                if failure is not None:
                    self._wanted = True
                self._changed.notify_all()
                if isinstance(failure, LeaseError):
                    return
                if failure is not None:
                    pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
                    self._changed.wait_for(lambda: self._closed, pause)
            tries = 0 if failure is None else tries + 1

    def _failing_seconds(self) -> float:
        return 0.0 if self._failure is None else boot_clock() - self._failing_since

    def _explanation(self, failure: Exception) -> str:
        minutes = int(self._failing_seconds() / 60)
        lasting = f" for {minutes} minutes" if minutes else ""
        return (
            f"nothing could be copied to {self._address}{lasting}: {self._reason(failure)}. "
            f"Nothing is lost: all of it is in {self._working_folder}, and the same command, on "
            "this machine, copies it and resumes the run"
        )

    def _reason(self, failure: Exception) -> str:
        return str(failure).removeprefix(f"{self._address}: ")
