"""Training checkpoints: written in the background, by each process what its devices hold.

A checkpoint is a folder `<step>/` of `arrays/` (see `zoo.runs.stored_arrays`), `meta.json` and
`checksums.json`, which is written last: without it a step is incomplete. It lists every file with
its size, and the small ones with their SHA-256; the arrays' large files have checksums of their
own, which each process writes and verifies for its own devices. A folder is written as
`<step>.tmp/` and then renamed, by process 0 once all have said there that their part is whole.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from zoo.common import checksums, files
from zoo.publishing.tensors import differences
from zoo.runs import stored_arrays
from zoo.runs.stored_arrays import anywhere, part_of

_log = logging.getLogger(__name__)
_NOTHING = -1  # process 0 sends it instead of a step
_SMALL = 2**20  # bytes of the arrays' files that have a SHA-256 too


class CheckpointError(Exception):
    """A checkpoint can't be written or read, or belongs to another model."""


class NoneUndamaged(CheckpointError):
    """There are checkpoints, and all of them are damaged."""


class DamagedExtras(CheckpointError):
    """The extras of the restored step are damaged: the next `restore` leaves that step out."""


@runtime_checkable
class Copies(Protocol):
    """A copier of steps between the processes' own folders and one address."""

    owner: str  # an id of this start in all processes: parts of two starts do not fit together

    def choose(self, step: int) -> None:
        """Agree whether a step that all begin to save is to be copied."""

    def committed(self, step: int) -> Collection[int | None]:
        """Take a step that is whole here, in the background; return the steps that have to stay."""

    def fetch_part(self, step: int, number: int) -> str:
        """Copy the part of that process into a step here; return the reason if it cannot be."""


class Checkpointer:
    """The checkpoints of one run, in one folder that all processes share and one run writes.

    With `copies` each process has a folder of its own, of which copies make one at an address.
    Leaving the program without `wait` or `close` loses the save under way.
    """

    def __init__(self, folder: Path, *, keep: int = 3, copies: Copies | None = None):
        """Open or make `folder`, clear up after a killed save, and keep the last `keep` steps."""
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint has to be kept")
        self.folder = files.local_path(folder, "folder").absolute()
        self._keep, self._copies = keep, copies
        self._index = 0 if copies is not None else jax.process_index()  # in the folder
        self._others = range(1, 1 if copies is not None else jax.process_count())
        self._newest: int | None = None
        self._damaged: dict[int, str] = {}  # the step whose extras are, and how
        self.extras: dict[str, str] = {}
        """Name -> dtype and shape of the extras of the step that was restored."""
        self._parts: dict[str, stored_arrays.Boxes] = {}  # of that step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._commit: Future | None = None
        if self._index == 0:
            files.make_folder(self.folder, "folder")
            for leftover in self.folder.glob("*.tmp"):
                _log.warning("Removing %s: a save that was interrupted", leftover)
                files.remove(leftover)
        if self._others:
            multihost_utils.sync_global_devices("checkpoints")

    def save(self, step: int, state: PyTree, meta: dict, extras: PyTree = None) -> None:
        """Save the arrays in `state`, typed keys too, and `meta` (JSON) as `step`.

        The arrays in `extras`, whose names must differ, are for `restore_extras`. It returns once
        the arrays are safe from donation; the rest happens in the background, and what fails there
        is raised by the next call. A step just saved or restored is left alone.
        """
        self.wait()
        if step == self._newest:
            return
        arrays, more = _arrays(state), _arrays(extras)
        stored = {
            name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
            for name, leaf in {**arrays, **more}.items()
        }
        record = {"step": step, "meta": meta, "saved_by": getattr(self._copies, "owner", "")}
        record |= {"arrays": _describe(arrays), "extras": _describe(more)}
        record |= {"parts": {name: stored_arrays.boxes(array) for name, array in stored.items()}}
        text = json.dumps(record)
        partial = self.folder / f"{step}.tmp"
        if self._index == 0 and (target := self.folder / str(step)).exists():
            raise CheckpointError(
                f"{target} exists already. Restore from this folder before saving in it, or save "
                "in another."
            )
        with self._explained(step):
            partial.mkdir(exist_ok=True)
            held = stored_arrays.held(stored)
        if self._copies is not None:
            self._copies.choose(step)
        self._newest = step
        self._commit = self._pool.submit(self._finish, partial, text, held)

    def restore(self, like: PyTree) -> tuple[PyTree, int, dict] | None:
        """The newest undamaged (state, step, meta), or None where nothing has been saved.

        `like` is a state, or one of `jax.ShapeDtypeStruct` with shardings: its shardings are used
        whatever the mesh of the save, and leaves that are no arrays are taken from it. Damaged
        steps are reported and set aside as `<step>.damaged`. Raises CheckpointError where no step
        is undamaged (and leaves them), or where the arrays differ in name, shape or dtype.
        """
        self.wait()
        failures, self._damaged = self._damaged, {}
        while (step := self._newest_listed(failures)) != _NOTHING:
            folder = self.folder / str(step)
            record = json.loads((folder / "meta.json").read_text())
            _check_same(folder, record["arrays"], _describe(_arrays(like)))
            state, problem = self._read(step, like, record["parts"])
            if not anywhere(bool(problem)):
                break
            failures[step] = f"step {step}: {problem or 'another process cannot read its arrays'}"
        else:
            if not failures:
                return None
            reasons = "\n  ".join(failures.values())
            raise NoneUndamaged(
                f"No checkpoint in {self.folder} is undamaged:\n  {reasons}\nPut back the files "
                "from a copy, or move the folder away to start again from step 0."
            )
        for bad, failure in failures.items() if self._index == 0 else ():
            if (self.folder / str(bad)).exists():  # and not in another process's folder alone
                aside = set_aside(self.folder / str(bad))
                _log.warning(
                    "Damaged checkpoint, %s. It is now %s, and step %d is used instead.",
                    failure,
                    aside,
                    step,
                )
        self._newest, self.extras = step, record["extras"]
        self._parts = record["parts"]
        return state, step, record["meta"]

    def restore_extras(self, like: PyTree, names: Collection[str]) -> PyTree:
        """The extras of these names in the step that `restore` has returned, placed as in `like`.

        Raises CheckpointError where the arrays differ in name, shape or dtype, and DamagedExtras
        where they are damaged.
        """
        folder, wanted = self.folder / str(self._newest), _describe(_arrays(like))
        _check_same(folder, {name: self.extras[name] for name in names}, wanted)
        assert self._newest is not None
        state, problem = self._read(self._newest, like, self._parts) if wanted else (like, "")
        if anywhere(bool(problem)):
            reason = f"step {self._newest}: {problem or 'another process cannot read its arrays'}"
            self._damaged = {self._newest: reason}
            raise DamagedExtras(reason)
        return state

    def good_steps(self) -> list[int]:
        """The steps whose save is complete, oldest first; only restore verifies their bytes."""
        return local_steps(self.folder)

    def wait(self) -> None:
        """Wait for the save under way, and raise the error that it ended with."""
        commit, self._commit = self._commit, None
        if commit is not None:
            with self._explained(self._newest):
                commit.result()

    def close(self) -> None:
        """Wait for the save under way, then end the background threads."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    @contextlib.contextmanager
    def _explained(self, step: int | None) -> Iterator[None]:
        """Within, an error in a save becomes a CheckpointError, which names a full disk as such."""
        try:
            yield
        except Exception as error:
            self._newest = None
            reason = str(error)
            if any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT)):
                good = self.good_steps()
                reason = (
                    "the disk is full. Free some space, or keep fewer checkpoints; "
                    f"{f'step {good[-1]} is' if good else 'no step is'} there to resume from"
                )
            raise CheckpointError(
                f"Step {step} could not be saved in {self.folder}: {reason}"
            ) from error

    def _finish(self, partial: Path, record: str, held: stored_arrays.Held) -> None:
        """In the background: write this process's part; on process 0 then seal, commit and prune.

        Process 0 waits for a file of each other process, with its error if it has one.
        """
        part = partial / "arrays" / str(jax.process_index())
        said = {number: partial / f"{number}.said" for number in self._others}
        files.remove(part)  # of a save that failed
        failure = None
        try:
            stored_arrays.write(part, held)
        except Exception as error:
            failure = error
        if self._index:
            temporary = partial / f"{self._index}.saying"
            temporary.write_text(str(failure or ""))
            temporary.rename(said[self._index])
        if failure is not None:
            raise failure
        if self._index:
            return
        for number, path in said.items():
            while not path.exists():
                time.sleep(0.05)
            if problem := path.read_text():
                raise CheckpointError(f"process {number}: {problem}")
            path.unlink()
        (partial / "meta.json").write_text(record)
        seal(partial)
        files.sync_all(partial)  # TensorStore syncs its files, but not their folders
        partial.rename(partial.with_suffix(""))
        files.sync(self.folder)
        held_back = () if self._copies is None else self._copies.committed(int(partial.stem))
        for old in {*self.good_steps()[: -self._keep]} - {*held_back}:
            # Renamed first: a half deleted step must not look like a damaged one.
            shutil.rmtree((self.folder / str(old)).rename(self.folder / f"{old}.tmp"))

    def _newest_listed(self, failures: dict[int, str]) -> int:
        """The newest step whose files are as its list has them, without the ones in `failures`.

        Process 0 chooses, and each one with a folder looks; `failures` gets steps with a problem.
        """
        while True:
            left = [step for step in self.good_steps() if step not in failures]
            newest = np.int32(max(left, default=_NOTHING))
            step = int(multihost_utils.broadcast_one_to_all(newest))
            if step == _NOTHING:
                return step
            folder, problem = self.folder / str(step), ""
            if self._index == 0 and not (problem := "; ".join(checksums.problems(folder))):
                named = json.loads((folder / "meta.json").read_text())["step"]
                problem = "" if named == step else f"the folder holds step {named}"
            if not anywhere(bool(problem)):
                return step
            failures[step] = f"step {step}: {problem or 'another process says why'}"

    def _read(
        self, step: int, like: PyTree, parts: dict[str, stored_arrays.Boxes]
    ) -> tuple[PyTree, str]:
        """(what is stored for `like`, nothing), or (`like`, why this process cannot read it).

        All processes call it. Files that may be whole, and that one of them has no right to read,
        are an error in all.
        """
        folder, refused, problem = self.folder / str(step), None, ""
        targets = {name: _struct(leaf) for name, leaf in _arrays(like).items()}
        if self._copies is not None:
            here = {part_of(name) for name in checksums.listed(folder)}
            for number in sorted(stored_arrays.processes_of(targets, parts) - here):
                problem = problem or self._copies.fetch_part(step, number)
            if anywhere(bool(problem)):
                return like, problem
        state = like
        try:
            state = _replace_arrays(like, stored_arrays.read(folder / "arrays", targets, parts))
        except stored_arrays.ArraysError as error:
            problem = str(error)
        except OSError as error:
            refused = error
        if anywhere(refused is not None):
            other = CheckpointError(f"{folder} cannot be read by another process, which says why")
            raise refused or other
        return state, problem


def problems(folder: Path) -> list[str]:
    """A line per damaged or missing file of a step's folder; every byte is read."""
    if found := checksums.problems(folder):
        return found
    parts = json.loads((folder / "meta.json").read_text())["parts"]
    return stored_arrays.problems(folder / "arrays", parts)


def seal(folder: Path) -> None:
    """Write the list of a step's files, which completes it; large arrays' own sums are trusted."""
    checksums.write(folder, trusted=lambda x, size: x.startswith("arrays/") and size > _SMALL)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint."""
    return (folder / "arrays").is_dir() and (folder / "meta.json").is_file()


def read_meta(folder: Path) -> dict | None:
    """The meta of the newest step in `folder` whose `meta.json` is undamaged, else None."""
    for step in reversed(local_steps(folder)):
        if not checksums.problems(folder / str(step), only="meta.json"):
            return json.loads((folder / str(step) / "meta.json").read_text())["meta"]
    return None


def local_steps(folder: Path) -> list[int]:
    """The steps whose save in a folder is complete, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def set_aside(folder: Path) -> Path:
    """Rename a damaged step so that it can be saved again, and never over an earlier one."""
    aside, count = folder.with_name(f"{folder.name}.damaged"), 1
    while aside.exists():
        count += 1
        aside = folder.with_name(f"{folder.name}.damaged-{count}")
    return folder.rename(aside)


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _arrays(tree: PyTree) -> dict[str, Any]:
    """Name -> array; a flat dict, so that no container's class matters to what is stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = [(_name(path), leaf) for path, leaf in leaves if _is_array(leaf)]
    arrays = dict(named)
    if len(arrays) < len(named):
        raise CheckpointError("Two arrays of the state have the same dotted name")
    return arrays


def _replace_arrays(like: PyTree, restored: dict[str, jax.Array]) -> PyTree:
    def replace(path: tuple, leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        array = restored[_name(path)]
        return jax.random.wrap_key_data(array, impl=_key_impl(leaf)) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(replace, like)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _struct(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _key_impl(leaf: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """`jax.random.key_impl`, which refuses a ShapeDtypeStruct."""
    found: list = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _describe(arrays: dict[str, Any]) -> dict[str, str]:
    """Name -> dtype and shape, as in `float32[8, 16]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}


def _check_same(folder: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    if saved != wanted:
        lines = differences(saved, wanted, "in the checkpoint", "in this run")
        raise CheckpointError(
            f"{folder} is a checkpoint of another model or optimizer:\n  " + "\n  ".join(lines)
        )
