"""A run: its folder, open.

A run folder holds `config.json`, `metrics.jsonl`, `curves.png`, `checkpoints/` and, at the end,
`model/`. The same command on the same folder resumes the run, bit for bit.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, cast

import jax
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums, files, plugins, startup
from zoo.data.datasets import Dataset, check_batch_size, check_row_lengths
from zoo.nn.precision import Precision, check_precision, native_precision
from zoo.runs import processes
from zoo.runs.checkpoint import Checkpointer, NoneUndamaged, read_meta
from zoo.runs.config import Config as Config  # users' programs take it from here, too
from zoo.runs.config import ConfigT, as_json, differences, read_config
from zoo.runs.processes import RunError, Signals
from zoo.runs.remote import folder
from zoo.training.compiled import flag_options

TRACKED = "trackers.json"  # of the run folder: the id that the run has at each tracker


class Run(Generic[ConfigT]):
    """A run's folder, open: `with Run(config) as run: zoo.fit(run, training)`.

    Raises:
        RunError: another configuration in the folder (with the fields that differ), or another
            process at work in it.
    """

    def __init__(self, config: ConfigT):
        self.config = config
        self._is_remote = files.is_remote(config.run_dir) and not config.plan
        if config.plan:  # it leaves nothing behind
            self.folder = Path(tempfile.mkdtemp())
        elif self._is_remote:
            self.folder = folder.working_folder(str(config.run_dir), config.work_dir)
        else:
            self.folder = files.local_path(config.run_dir, "run_dir")
        self.address = str(config.run_dir if self._is_remote else self.folder)
        """The folder as messages name it: the address of one that is remote."""
        self._remote: folder.RemoteFolder | None = None
        self._written_once = [self.folder / "config.json", self.folder / TRACKED]
        self._is_new = False  # as process 0 sees it: nothing in the folder tells of a run before
        self.signals = Signals()  # heeded in `zoo.fit`

    def __enter__(self) -> "Run[ConfigT]":
        config = self.config
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        if startup.is_on_cpu():
            startup.keep_freed_memory()
        if config.distributed:
            processes.join_processes()
        # For a plan JAX computes on this machine's CPU alone from here on.
        native = self.planner.prepare(config.plan) if config.plan else native_precision()
        if config.precision == "auto":
            # Written down, so that a run resumes in it or is refused, and never changes it.
            config = self.config = dataclasses.replace(config, precision=native)
        with contextlib.ExitStack() as stack:
            if self._is_remote:  # brought to the state of the address before anything is read
                if not self.is_main:
                    self.folder = self.folder / f".process_{jax.process_index()}"
                self._remote = folder.RemoteFolder(
                    self.address, self.folder, keep=config.keep_checkpoints, say=self.say
                )
                stack.enter_context(self._remote)
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: contextlib.ExitStack) -> None:
        stored = read_config(self.folder / "config.json") if self.is_main else None
        stored = processes.from_first(stored or {})
        config = self.config = cast(ConfigT, self.config.completed(stored))
        if config.compilation_cache is not None and not config.plan:
            cache = files.local_path(config.compilation_cache, "compilation_cache")
            jax.config.update("jax_compilation_cache_dir", str(cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        rules = sharding.SEQUENCE_PARALLEL if config.sequence_parallel else sharding.RULES
        self.mesh = sharding.make_mesh("" if config.plan else config.mesh)
        self.layout = sharding.Layout(self.mesh, rules)
        if not config.plan:  # of a plan, the target's devices matter
            check_precision(self.precision, self.mesh)
            flag_options(config.xla, self.mesh)  # refuses what the devices lack
        if config.batch_size is not None:  # now, as the data may take long to read
            check_batch_size(config.batch_size, self.mesh, config.accumulate)
        check_row_lengths(config.row_lengths, self.mesh)
        if config.plan:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        if self.is_main:
            if not self._is_remote:
                stack.enter_context(processes.lock(self.folder))
            self._check_config()
            for ending in ("json", "jsonl", "png"):
                for leftover in self.folder.glob(f"*.{ending}.tmp"):  # of a write killed in it
                    leftover.unlink()
            files.remove_unfinished(self.folder)  # of model/ and best/
            self.copy()
        processes.barrier("run folder")
        self.checkpointer = Checkpointer(
            self.folder / "checkpoints", keep=config.keep_checkpoints, copies=self._remote
        )
        stack.push(self._unbind)
        stack.callback(self.checkpointer.close)

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _unbind(self, error: type[BaseException] | None, *_: object) -> None:
        """A run that failed with nothing saved leaves a folder that takes other flags."""
        if error is None or not self.is_main or self.checkpointer.good_steps():
            return
        for path in self._written_once:
            files.remove(path)

    @property
    def precision(self) -> Precision:
        """The dtype of activations and products, decided where the configuration says auto."""
        if self.config.precision == "auto":
            raise RunError("a run decides what precision='auto' is when it opens: `with Run(…)`")
        return self.config.precision

    @property
    def planner(self) -> Any:
        """The planner of the run's step: the last of the group `zoo.planners`."""
        return plugins.find("zoo.planners", plugins.names("zoo.planners")[-1])

    def restore(self, like: PyTree) -> tuple[PyTree, int, dict] | None:
        """The newest undamaged checkpoint, in the folder or at the address.

        See `zoo.runs.checkpoint.Checkpointer.restore`.
        """
        while True:
            found, failure = None, None
            try:
                found = self.checkpointer.restore(like)
            except NoneUndamaged as error:
                failure = error
            step = -1 if found is None else found[1]
            if self._remote is not None and self._remote.fetch_newer(step):
                continue
            if failure is not None:
                raise failure
            return found

    def copy(self) -> None:
        """Begin to copy the changes in the folder to the address, if the run is at one."""
        if self._remote is not None:
            self._remote.copier.begin()

    def steps_of(self, dataset: Dataset) -> int:
        """The optimizer steps in all; for epochs, as many as this dataset's length makes.

        From then on they are the configuration's `steps`, in config.json too.
        """
        if self.config.epochs is not None:
            epochs, batches = self.config.epochs, dataset.batches_per_epoch
            steps = math.ceil(epochs * batches)
            self.say(f"{epochs:g} epochs of {batches:,} batches: {steps:,} steps")
            self.config = dataclasses.replace(self.config, epochs=None, steps=steps)
            if self.is_main:
                self._write_config()
        return self.config.steps

    def settle(self) -> None:
        """Wait for the save under way, and for the copies at the address."""
        self.checkpointer.wait()
        if self._remote is not None:
            self._remote.settle()

    def check_address(self, *, copies: bool = False) -> None:
        """Raise an error if another process has taken over the run, or `copies` fail for long."""
        if self._remote is not None:
            self._remote.check(copies=copies)

    @property
    def status(self) -> str:
        """The progress line's note on copies that are not made; empty if they are."""
        return "" if self._remote is None else self._remote.copier.note()

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which alone writes files and prints."""
        return jax.process_index() == 0

    def say(self, text: str) -> None:
        """Print a line, on process 0 only."""
        if self.is_main:
            print(text, flush=True)

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """A folder of the run that `make` writes at the first start, and that stays.

        Raises:
            RunError: it is damaged, or is there already and nothing tells its run.
        """
        target = self.folder / name
        if self._is_new and target not in self._written_once and target.exists():
            raise RunError(
                f"{target} is there, without the config.json of its run: move it "
                "away, or use another --run-dir"
            )
        self._written_once.append(target)
        if self.is_main and not target.exists():
            partial = target.with_name(f"{name}.tmp")
            files.remove(partial)  # of a start that was killed
            make(partial)
            checksums.write(partial)
            files.sync_all(partial)
            partial.rename(target)
            files.sync(self.folder)
        if self._is_remote:
            processes.hand_on(target)
        processes.barrier(name)
        if problems := checksums.problems(target):
            raise RunError(
                f"{target} is damaged: {'; '.join(problems)}. Put it back from a copy, or remove "
                "it to have it made again of the same data."
            )
        return target

    def _check_config(self) -> None:
        """Refuse another configuration in the folder; write this one."""
        path, checkpoints = self.folder / "config.json", self.folder / "checkpoints"
        # Both: either may have been put there, or taken away, by hand.
        copies = (read_config(path), (read_meta(checkpoints) or {}).get("config"))
        stored = [copy for copy in copies if copy is not None]
        self._is_new = not stored
        if self._is_new:  # ids of another run
            files.remove(self.folder / TRACKED)
        for found in stored:
            if differing := differences(found, self.config):
                raise RunError(
                    f"{self.address} holds a run of another configuration:\n"
                    + "\n".join(differing)
                    + "\nGive the same flags to resume it, or another --run-dir to start anew."
                )
        self._write_config()

    def _write_config(self) -> None:
        text = json.dumps(as_json(self.config), indent=2) + "\n"
        files.replace(self.folder / "config.json", text)


@functools.cache  # reading them takes as long as a hundred small steps
def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    found = {}
    for name in ("equinox", "grain", "jax", "jaxlib", "numpy", "optax", "tensorstore", "zoo"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
