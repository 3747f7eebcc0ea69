"""A run folder at an address: what the run does in its working folder is copied there.

At the start the newest undamaged checkpoint counts, of the working folder or of the address. One
process, process 0, talks to the store.
"""

import hashlib
import logging
import socket
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
from zoo.runs.remote.copier import Copier
from zoo.runs.remote.copies import METRICS, STEPS, Record, RemoteCopies
from zoo.runs.remote.lease import Lease, LeaseError

_log = logging.getLogger(__name__)
CACHE = Path("~/.cache/zoo/runs")
_SCHEMES = ("s3", "gs", "memory")  # the last one is for tests


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
        every: int,
        say: Callable[[str], object],
        lease: Lease | None = None,
    ):
        self.address, self.folder = address.rstrip("/"), folder
        self._keep, self._every, self._say = keep, every, say
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
            self._fetch(record)
        except BaseException:
            lease.release()
            raise
        self.copier = Copier(self._copy, self.address, self.folder)

    def _fetch(self, record: Record) -> None:
        """Make the working folder that of the run at the address, as far as it is behind."""
        copies = self._copies = RemoteCopies(self.folder, self._store, record, keep=self._keep)
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
        began = time.monotonic()
        fetched = copies.fetch_step(above=max(steps, default=-1))
        if fetched is not None or copies.complete:
            copies.fetch(only_missing=fetched is None)
        else:  # without a checkpoint a run begins anew, if with the same configuration
            copies.fetch(["config.json", METRICS], only_missing=True)
        if fetched is not None:
            seconds = time.monotonic() - began
            self._say(f"fetched step {fetched} from {self.address} in {seconds:.1f} s")

    def fetch_newer(self, step: int) -> bool:
        """Fetch a checkpoint newer than a step, the newest undamaged one; whether there is one."""
        return self._copies.fetch_step(above=step) is not None

    def committed(self, step: int) -> None:
        """Take a checkpoint that is whole: copy it if that is due, and what else has changed."""
        known = {self._wanted or 0, *self._copies.good}
        if step - max((x for x in known if x <= step), default=0) >= self._every:
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
