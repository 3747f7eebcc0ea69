"""A run: its folder and its configuration.

A run folder holds `config.json`, `metrics.jsonl`, `curves.png`, `checkpoints/` and, at the end,
`model/`. The same command on the same folder resumes the run, bit for bit.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from zoo import sharding
from zoo.base import addresses, checksums, configuration, files
from zoo.base.configuration import added, may_differ, require
from zoo.data.plans import check_batch_size
from zoo.nn.precision import Precision, native_precision
from zoo.planning import targets
from zoo.runs import processes
from zoo.runs.checkpoint import Checkpointer, NoneUndamaged, read_meta
from zoo.runs.processes import RunError
from zoo.runs.remote import folder
from zoo.runs.signals import Signals

TRACKER_NAMES = ("wandb", "mlflow", "tensorboard", "trackio")
TRACKED = "trackers.json"  # of the run folder: the id that the run has at each tracker


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags that every recipe has."""

    run_dir: Path | str = may_differ()
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    steps: int = may_differ()
    """Optimizer steps in all; more than before continues a finished run."""
    mesh: str = may_differ("")
    """Devices by axis, such as fsdp=4,tensor=2; data=-1 takes all there are; empty is one."""
    precision: Precision | Literal["auto"] = "auto"
    """Dtype of activations and products; master weights are fp32. auto: bf16 where the hardware
    multiplies it, else fp32."""
    accumulate: int = 1
    """Microbatches per batch, computed one after the other to save memory."""
    clip_norm: float = 1.0
    """Global norm that gradients are clipped to."""
    seed: int = 0
    """Seed of the initialisation, dropout, and the order of the data."""
    on_nonfinite: Literal["stop", "skip"] = may_differ("stop")
    """On a loss, gradient or update that is not finite: stop the run, or skip the step."""
    average: float | None = None
    """Decay of a moving average of the weights, such as 0.999: it is evaluated beside the model,
    as average/eval_loss, and is what is published."""
    patience: int | None = may_differ(None)
    """Evaluations in a row without a better eval_loss, of the average if there is one, after which
    the run ends."""
    keep_best: str | None = may_differ(None)
    """Metric of the evaluations, such as eval_loss or average/eval_loss, by which the best model so
    far is kept as best/ in the run's folder; the highest accuracy is best, and the lowest of
    others."""
    log_every: int = may_differ(10)
    """Steps between lines of metrics.jsonl."""
    eval_every: int = may_differ(100)
    """Steps between evaluations on the held-out part."""
    eval_batches: int = may_differ(16)
    """Batches per evaluation during training; the last one takes the whole held-out part."""
    checkpoint_every: int = may_differ(100)
    """Steps between checkpoints."""
    keep_checkpoints: int = may_differ(3)
    """Checkpoints kept, newest first."""
    copy_every: int = added(1, may_differ=True)
    """Steps, at least, between the checkpoints that are copied to an address; the last one always
    is."""
    work_dir: Path | None = added(None, may_differ=True)
    """Local folder that a run at an address works in; by default one in ~/.cache/zoo/runs. Several
    processes share it."""
    sequence_parallel: bool = may_differ(False)
    """Split activations along the sequence between the tensor-parallel parts."""
    distributed: bool = may_differ(False)
    """One of several processes; docs/guides/launch.md lists the environment variables."""
    plan: str = may_differ("")
    """Train nothing: print the memory and the speed of a step on devices such as v5e:4x4,
    v5p:4x4x4, h200:8 or cpu:8. An empty --mesh is then fsdp=-1."""
    track: str = may_differ("")
    """Trackers to give the metrics to, with commas between them: wandb, mlflow, tensorboard,
    trackio (an extra each). They write local files, unless WANDB_MODE, MLFLOW_TRACKING_URI and
    such variables of theirs say otherwise."""
    tensorboard: bool = may_differ(False)
    """The same as tensorboard in --track."""
    norms_every: int = may_differ(0)
    """Steps between norms of each layer's parameters and updates, in norms.jsonl and norms.png;
    0: none."""
    profile: bool = may_differ(False)
    """Trace steps 10 to 15 of this start into the run folder."""
    compilation_cache: Path | None = may_differ(Path("~/.cache/zoo/jax"))
    """Folder that keeps compiled programs for the next start."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        configuration.check(self)
        for name in (
            "steps",
            "accumulate",
            "log_every",
            "eval_every",
            "eval_batches",
            "checkpoint_every",
            "keep_checkpoints",
            "copy_every",
        ):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")
        require(self.norms_every >= 0, f"norms_every={self.norms_every}: must be at least 0")
        if self.average is not None:
            require(0 <= self.average < 1, f"average={self.average}: must be in [0, 1), as 0.999")
        require(
            self.patience is None or self.patience >= 1,
            f"patience={self.patience}: must be at least 1",
        )
        require(
            self.average is not None or not (self.keep_best or "").startswith("average/"),
            f"keep_best={self.keep_best!r}: without --average there is none",
        )
        # A command line gives paths, and `Path` makes one slash of an address's two.
        object.__setattr__(self, "run_dir", folder.checked(self.run_dir, self.work_dir))
        if self.compilation_cache is not None:
            files.local_path(self.compilation_cache, "compilation_cache")
        require(self.clip_norm > 0, f"clip_norm={self.clip_norm}: must be positive")
        unknown = [name for name in self.trackers if name not in TRACKER_NAMES]
        require(
            not unknown, f"track={self.track!r}: no tracker {unknown}; known are {[*TRACKER_NAMES]}"
        )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names of the trackers, each of them once."""
        names = [name.strip() for name in self.track.split(",") if name.strip()]
        return tuple(dict.fromkeys(names + ["tensorboard"] * self.tensorboard))

    @property
    def batch_size(self) -> int | None:
        """Rows of a global batch, where the configuration says it: checked before data is read."""
        return None

    def completed(self, stored: Mapping[str, Any]) -> "Config":
        """The configuration with the fields that it leaves open.

        `stored` is that of the run in its folder, or empty: what is open is as it is there.
        """
        return self


ConfigT = TypeVar("ConfigT", bound=Config, covariant=True)


def check_seed(seed: int) -> None:
    """Raise a ValueError where two seeds would give the same numbers."""
    # Of more bits JAX takes the lower 32, and of more than 64 none.
    require(0 <= seed < 2**32, f"seed={seed}: must be in 0 to {2**32 - 1}")


class Run(Generic[ConfigT]):
    """A run's folder, open: `with Run(config) as run: zoo.fit(run, training)`.

    Raises:
        RunError: another configuration in the folder (with the fields that differ), or another
            process at work in it.
    """

    def __init__(self, config: ConfigT):
        self.config = config
        self._is_remote = addresses.is_remote(config.run_dir) and not config.plan
        if config.plan:  # it leaves nothing behind
            self.folder = Path(tempfile.mkdtemp())
        elif self._is_remote:
            self.folder = folder.working_folder(str(config.run_dir), config.work_dir)
        else:
            self.folder = files.local_path(config.run_dir, "run_dir")
        self.address = str(config.run_dir if self._is_remote else self.folder)
        """The folder as messages name it: the address of one that is remote."""
        self._remote: folder.RemoteFolder | None = None  # of process 0
        self._written_once = [self.folder / "config.json", self.folder / TRACKED]
        self._is_new = False  # to process 0: nothing says that there was one in the folder
        self.signals = Signals()  # heeded in `zoo.fit`

    def __enter__(self) -> "Run[ConfigT]":
        config = self.config
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        logging.getLogger("absl").addFilter(_has_no_traceback)
        if processes.is_on_cpu():
            processes.keep_freed_memory()
        if config.distributed:
            processes.join_processes()
        # For a plan JAX computes on this machine's CPU alone from here on.
        native = targets.prepare(config.plan).precision if config.plan else native_precision()
        if config.precision == "auto":
            # Written down, so that a run resumes in it or is refused, and never changes it.
            config = self.config = dataclasses.replace(config, precision=native)
        with contextlib.ExitStack() as stack:
            if self._is_remote:
                self._open_remote(stack)
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: contextlib.ExitStack) -> None:
        stored = _read_config(self.folder / "config.json") or {}
        config = self.config = cast(ConfigT, self.config.completed(stored))
        if config.compilation_cache is not None and not config.plan:
            cache = files.local_path(config.compilation_cache, "compilation_cache")
            jax.config.update("jax_compilation_cache_dir", str(cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        self.rules = sharding.SEQUENCE_PARALLEL if config.sequence_parallel else sharding.RULES
        self.mesh = sharding.make_mesh("" if config.plan else config.mesh)
        if config.batch_size is not None:  # now, as the data may take long to read
            check_batch_size(config.batch_size, self.mesh, config.accumulate)
        if config.plan:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        if self.is_main:
            if not self._is_remote:
                stack.enter_context(processes.lock(self.folder))
            self._check_config()
            for ending in ("json", "jsonl", "png"):
                for leftover in self.folder.glob(f"*.{ending}.tmp"):  # of a write killed in it
                    leftover.unlink()
            self.copy()
        processes.barrier("run folder")
        self.checkpointer = Checkpointer(
            self.folder / "checkpoints",
            keep=config.keep_checkpoints,
            committed=self._remote.committed if self._remote else None,
        )
        stack.push(self._unbind)
        stack.callback(self.checkpointer.close)

    def _open_remote(self, stack: contextlib.ExitStack) -> None:
        """Bring the working folder to the state of the address, before anything is read there."""
        config, owner = self.config, ""
        if self.is_main:
            self._remote = folder.RemoteFolder(
                self.address,
                self.folder,
                keep=config.keep_checkpoints,
                every=config.copy_every,
                say=self.say,
            )
            owner = stack.enter_context(self._remote).owner
        folder.check_shared(self.folder, owner)

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
            newer = self._remote is not None and self._remote.fetch_newer(step)
            if self._is_remote:  # all of them restore again, or none
                newer = bool(multihost_utils.broadcast_one_to_all(np.int32(newer)))
            if newer:
                continue
            if failure is not None:
                raise failure
            return found

    def copy(self) -> None:
        """Begin to copy what has changed in the folder to the address, if the run is at one."""
        if self._remote is not None:
            self._remote.copy()

    def settle(self) -> None:
        """Wait for the save under way, and for the copies at the address."""
        self.checkpointer.wait()
        if self._remote is not None:
            self._remote.settle()

    def check_address(self, *, copies: bool = False) -> None:
        """Raise an error if another process has taken over the run, or `copies` fail for long."""
        if self._remote is not None:
            self._remote.check()
            if copies:
                self._remote.check_copies()

    @property
    def status(self) -> str:
        """What the progress line says of copies that are not made; empty if they are."""
        return "" if self._remote is None else self._remote.note()

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
            RunError: it is damaged, or it is there and nothing says of which run it is.
        """
        target = self.folder / name
        if self._is_new and target not in self._written_once and target.exists():
            raise RunError(
                f"{target} is there, without the config.json of the run that it is of: move it "
                "away, or use another --run-dir"
            )
        self._written_once.append(target)
        if self.is_main and not target.exists():
            partial = target.with_name(f"{name}.tmp")
            make(partial)
            checksums.write(partial)
            files.sync_all(partial)
            partial.rename(target)
            files.sync(self.folder)
        processes.barrier(name)
        # Runs of earlier versions have no list there.
        is_listed = (target / checksums.NAME).exists() or not any(target.glob("*"))
        if is_listed and (problems := checksums.problems(target)):
            raise RunError(
                f"{target} is damaged: {'; '.join(problems)}. Put it back from a copy, or remove "
                "it to have it made again of the same data."
            )
        return target

    def _check_config(self) -> None:
        """Refuse another configuration in the folder; write this one."""
        path, checkpoints = self.folder / "config.json", self.folder / "checkpoints"
        # Both: either may have been put there, or taken away, by hand.
        copies = (_read_config(path), (read_meta(checkpoints) or {}).get("config"))
        stored = [copy for copy in copies if copy is not None]
        self._is_new = not stored
        if self._is_new:  # ids of another run
            files.remove(self.folder / TRACKED)
        for found in stored:
            if differing := _difference(found, self.config):
                raise RunError(
                    f"{self.address} holds a run of another configuration:\n"
                    + "\n".join(differing)
                    + "\nGive the same flags to resume it, or another --run-dir to start anew."
                )
        text = json.dumps(as_json(self.config), indent=2) + "\n"
        files.replace(path, lambda temporary: temporary.write_text(text))


def _difference(found: dict[str, Any], config: Config) -> list[str]:
    """The fields of a stored configuration that forbid a run to resume with this one."""
    found = configuration.current(type(config), found)
    old, new = flatten(found), flatten(as_json(config))
    differing = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    return [
        f"  {name}: was {old.get(name)!r}, is {new.get(name)!r}"
        for name in sorted(differing - configuration.names_that_may_differ(config))
    ]


def _read_config(path: Path) -> dict[str, Any] | None:
    """The fields of a run's config.json; None if there is none."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IsADirectoryError) as error:
        raise RunError(
            f"{path} is damaged ({error}); put it back (meta.json of each checkpoint has "
            "a copy), or use another --run-dir"
        ) from error


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Orbax and each of its threads also log the errors that they raise."""
    return record.exc_info is None or bool(os.environ.get("ZOO_TRACEBACK"))


def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    packages = {"zoo", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy"}
    installed = packages & {d.name for d in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in sorted(installed)}


def as_json(config: Any) -> dict[str, Any]:
    """A configuration as JSON has it: paths as texts, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration as JSON has it, with dotted names and no configurations in it."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
