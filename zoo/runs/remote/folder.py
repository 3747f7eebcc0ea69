"""A run folder at an address: what the run does in its working folder is copied there.

At the start the newest undamaged checkpoint counts, of the working folder or of the address.
Process 0 talks to the store; the others copy their parts of a checkpoint for it.
"""

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from zoo.common import addresses, files
from zoo.common.configuration import require
from zoo.common.store import Store
from zoo.runs import processes
from zoo.runs.checkpoint import CheckpointError, local_steps
from zoo.runs.processes import RunError
from zoo.runs.remote import shares
from zoo.runs.remote.copies import STEPS, Record, RemoteCopies
from zoo.runs.remote.lease import Lease, LeaseError, boot_clock

_log = logging.getLogger(__name__)
CACHE = Path("~/.cache/zoo/runs")
_SCHEMES = ("s3", "gs", "memory")  # the last one is for tests
MINUTES = 30  # without a success, after which a run stops at its next save
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between one try and the next
_FINAL = (PermissionError, FileNotFoundError)  # no right to write, no bucket


def checked(run_dir: Path | str, work_dir: Path | None) -> Path | str:
    """The folder of a run: a local path, or an address as a text.

    Raises:
        ValueError: an address that can't be written, or a working folder of a local run.
    """
    require(str(run_dir) != "", "run_dir='': a run has a folder of its own; name one")
    place = addresses.location(run_dir, "run_dir")
    if work_dir is not None:
        files.local_path(work_dir, "work_dir")
    if not addresses.is_remote(place):
        require(
            work_dir is None,
            f"work_dir='{work_dir}': it is for a run at an address, and run_dir='{run_dir}' is a "
            "local folder",
        )
        return Path(run_dir)
    require(
        addresses.scheme_of(place) in _SCHEMES,
        f"run_dir='{place}': a run can be in a local folder, or on s3:// or gs://",
    )
    return str(place)


def working_folder(address: str, given: Path | None) -> Path:
    """The local folder in which a run at an address works."""
    if given is not None:
        return files.local_path(given, "work_dir")
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return files.local_path(CACHE, "work_dir") / f"{address.rpartition('/')[2]}-{digest}"


class RemoteFolder:
    """A context in which this process alone writes at an address, from its working folder.

    Its end waits until everything is copied.

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
        meet: Callable[[str], object] = lambda owner: None,
    ):
        """`meet(owner)` is called before anything is fetched; see `check_shared`."""
        self.address, self.folder = address.rstrip("/"), folder
        self._keep, self._say, self._meet = keep, say, meet
        self._store = Store(self.address, "run_dir")
        self.lease = lease or Lease(self._store, say=say)
        self._wanted: int | None = None  # the checkpoint to copy next
        self._copied: int | None = None  # and the one that is being copied

    def __enter__(self) -> "RemoteFolder":
        self._lock = processes.lock(self.folder, self.address)
        self._lock.__enter__()
        try:
            self._open()
        except BaseException as error:
            self._lock.__exit__(type(error), error, None)
            raise
        return self

    def _open(self) -> None:
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
        try:
            if lease.previous not in ended:  # the files at the address may be of another's
                record.copied = {}
            record.owners = [lease.owner]
            copies = RemoteCopies(self.folder, self._store, record, keep=self._keep)
            self._begin(copies, record)
            self._meet(lease.owner)
            self._fetch(copies)
        except BaseException:
            lease.release()
            raise
        self._copies = copies
        self.copier = Copier(self._copy, self.address, self.folder)

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
        shares.begin(self.folder)

    def _fetch(self, copies: RemoteCopies) -> None:
        """Bring the working folder up to the run at the address, as far as it is behind."""
        began = time.monotonic()
        steps = local_steps(self.folder / STEPS)
        fetched = copies.fetch_step(above=max(steps, default=-1))
        if fetched is not None or copies.complete:
            copies.fetch(only_missing=fetched is None)
        else:  # without a checkpoint a run begins anew, if with the same configuration
            copies.fetch(copies.whole(), only_missing=True)
        if fetched is not None:
            seconds = time.monotonic() - began
            self._say(f"fetched step {fetched} from {self.address} in {seconds:.1f} s")

    def fetch_newer(self, step: int) -> bool:
        """Fetch a checkpoint newer than a step, the newest undamaged one; whether there is one."""
        return self._copies.fetch_step(above=step) is not None

    def committed(self, step: int) -> None:
        """Take a checkpoint that is whole: copy it, and what else has changed."""
        self._wanted = step
        self.copier.begin()

    def held(self) -> set[int | None]:
        """The checkpoints that must stay in the working folder, as they are being copied."""
        return {self._wanted, self._copied}

    def settle(self, *, patient: bool = True) -> None:
        """Wait until the last checkpoint, and all files, are copied; see `Copier.wait`."""
        self._wanted = max(local_steps(self.folder / STEPS), default=self._wanted)
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
            self._lock.__exit__(None, None, None)

    def _copy(self) -> None:
        """In the background: copy what has changed, and then a checkpoint of before."""
        check = self.lease.check
        check()
        step = self._copied = self._wanted
        self._copies.copy_files(check)
        if step is not None:
            self._copies.copy_step(step, check)
            if self._wanted == step:
                self._wanted = None
        self._copied = None


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
        """End the thread, after what it is at; whether it has ended."""
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


def check_shared(folder: Path, owner: str) -> None:
    """Raise a RunError unless all processes see the working folder of process 0."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(owner or "0" * 32), np.uint8)
    wanted = bytes(np.asarray(multihost_utils.broadcast_one_to_all(mine))).hex()
    deadline = time.monotonic() + 5  # a shared disk shows a file a little later
    while (sees := wanted in Record.read(folder).owners) is False and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = multihost_utils.process_allgather(np.array([sees])).reshape(-1)
    if not seen.all():
        blind = ", ".join(str(i) for i in np.flatnonzero(~seen))
        raise RunError(
            f"process {blind} does not see {folder}, the working folder of process 0: give "
            "--work-dir, a folder on a disk that all processes share"
        )
