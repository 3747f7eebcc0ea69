"""A teacher's likeliest tokens at each position of batch k, in a folder: written once, read by k.

The folder has a file per batch, `00000000.npz` and so on, and `about.json`, which says of which
teacher and how they are. Numpy writes a checksum of each array and checks it as it reads. A file is
there as a whole or not at all, so that a pass over the data resumes with the first that is missing.
"""

import contextlib
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, PyTree

from zoo.alignment.distillation_loss import IDS, LOG_PROBS, REST, TEACHER_ENTRIES, top_k
from zoo.common import checksums, files
from zoo.common.files import Transfer
from zoo.data.loader import batches
from zoo.data.plans import HostBatch, Plan, Row, batch_shapes, fingerprint
from zoo.nn.precision import in_precision
from zoo.runs import processes
from zoo.runs.config import Config as RunConfig
from zoo.runs.run import Run
from zoo.sharding.placement import gathered
from zoo.training.compiled import CompiledStep

ABOUT = "about.json"
_ROWS = "rows"  # a checksum of each row's tokens, by which other data is found out


class StoredTopK:
    """A folder of the `top_k` likeliest tokens of a teacher for the batches of a plan.

    `about` is what they depend on besides the tokens: the teacher, and how it was asked.

    Raises:
        ValueError: the folder is of another teacher, or of other data.
    """

    def __init__(self, folder: Path, plan: Plan, top_k: int, about: dict[str, Any]):
        self.folder, self._plan, self.top_k = folder, plan, top_k
        self.about = {**about, "top_k": top_k}
        path = folder / ABOUT
        if not path.exists():
            found = folder.iterdir() if folder.is_dir() else ()
            if any(file.suffix != ".tmp" for file in found):  # which a killed start leaves
                raise ValueError(
                    f"stored='{folder}' has files, and no {ABOUT}: name another folder"
                )
            return
        found = json.loads(path.read_text())
        differing = [x for x in self.about if found.get(x) != self.about[x]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"stored='{folder}' has a teacher's likeliest tokens of {name}="
                f"{found.get(name)!r}, and this run asks for {self.about[name]!r}: name another "
                "folder, or give the same"
            )
        if self.num_batches:
            self.read(0)

    @property
    def num_batches(self) -> int:
        """Batches that are there, up to the first that is missing."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position: ids of 4, log-probabilities of 4, and 4 for the rest's mass."""
        return 8 * self.top_k + 4

    def write(self, k: int, entries: HostBatch) -> None:
        """Write the entries of batch k, atomically."""
        files.make_folder(self.folder, "stored")
        about = self.folder / ABOUT
        if not about.exists():
            files.replace(
                about, lambda new: new.write_text(json.dumps(self.about, indent=1) + "\n")
            )
        arrays: Any = {**entries, _ROWS: _digests(self._plan.batch(k)["tokens"])}

        def save(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)

        files.replace(self._path(k), save)

    def read(self, k: int, rows: slice | None = None) -> HostBatch:
        """Batch k with the entries of the teacher, or some of its rows.

        Raises:
            ValueError: the file is damaged or missing, or of other data.
        """
        path, batch = self._path(k), self._plan.batch(k, rows)
        try:
            with np.load(path) as file:
                found = {name: file[name] for name in (_ROWS, *TEACHER_ENTRIES)}
        except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, OSError, EOFError) as error:
            raise ValueError(
                f"{path} is damaged or missing ({error}): remove it, and start again without a "
                "checkpoint behind it, or put it back; the start writes what is missing"
            ) from error
        found = {name: x[rows or slice(None)] for name, x in found.items()}
        if not np.array_equal(found.pop(_ROWS), _digests(batch["tokens"])):
            raise ValueError(
                f"stored='{self.folder}' has a teacher's likeliest tokens of other data: batch {k} "
                "is of other tokens here. Give the same data, --data.batch-size and --seed, or "
                "name another folder"
            )
        return {**batch, **found}

    def _path(self, k: int) -> Path:
        return self.folder / f"{k:08}.npz"


def _digests(tokens: np.ndarray) -> np.ndarray:
    """A checksum of each row."""
    return np.asarray([zlib.crc32(row.tobytes()) for row in np.ascontiguousarray(tokens)])


class TopKPlan:
    """A plan of token rows, with the stored entries of a teacher in each batch."""

    def __init__(self, plan: Plan, stored: StoredTopK):
        self._plan, self._stored = plan, stored
        self.unit, self.batch_size, self.buckets = plan.unit, plan.batch_size, plan.buckets
        self.batches_per_epoch = plan.batches_per_epoch

    @property
    def fingerprint(self) -> str:
        """A hash of the plan's data, and of what the entries depend on besides."""
        return checksums.of_values([fingerprint(self._plan), self._stored.about])

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        k = self._stored.top_k
        entries: Row = {
            IDS: ((bucket, k), np.int32),
            LOG_PROBS: ((bucket, k), np.float32),
            REST: ((bucket,), np.float32),
        }
        return {**self._plan.row(bucket), **entries}

    def batch(self, k: int, rows: slice | None = None) -> HostBatch:
        """Batch k as numpy arrays [batch, …], or only some of its rows."""
        return self._stored.read(k, rows)


def write_top_k(
    run: Run[RunConfig],
    stored: StoredTopK,
    plan: Plan,
    load: Callable[[], PyTree],
    temperature: float,
) -> None:
    """Write the entries of every batch of the run that is not there yet; one is in memory at once.

    Process 0 writes, in a folder that all of them read.
    """
    start, stop = stored.num_batches, run.config.steps
    processes.barrier("stored batches")
    if start >= stop:
        return run.say(f"the teacher's {stored.top_k} likeliest tokens are in {stored.folder}")
    size = (stop - start) * stored.bytes_per_token * plan.batch_size * max(plan.buckets)
    run.say(
        f"writing the teacher's {stored.top_k} likeliest tokens of batches {start} to {stop - 1} "
        f"to {stored.folder}: {size / 1e6:,.0f} MB at most"
    )
    model = load()

    def teacher_step(batch: PyTree, model: PyTree) -> tuple[None, dict[str, Array]]:
        with in_precision(model, run.precision) as given:
            return None, top_k(given, batch, stored.top_k, temperature)

    step = CompiledStep(teacher_step, mesh=run.layout)
    step.compile(model, *batch_shapes(plan, run.mesh).values())
    with (
        Transfer("the teacher's tokens", size) as done,
        contextlib.closing(batches(plan, run.mesh, start=start, stop=stop)) as stream,
    ):
        for k, batch in stream:
            entries = {name: gathered(x) for name, x in step(model, batch)[1].items()}
            if run.is_main:
                stored.write(k, entries)
                done.add(sum(x.nbytes for x in entries.values()))
    processes.barrier("stored top k")
