"""How a run began to read its text, and so resumes: into memory, or prepared on disk."""

import json
from collections.abc import Callable
from pathlib import Path

from zoo.data.prepared.choice import Wanted, is_for_memory, is_small, was_prepared
from zoo.runs.checkpoint import read_meta
from zoo.runs.config import Config
from zoo.runs.processes import RunError
from zoo.runs.run import Run

RECORD = "text"  # a folder of the run; runs on small text have none
_FILE = "held.json"


def for_memory(run: Run[Config]) -> Callable[[Wanted, Path | None], bool]:
    """A function like `is_for_memory` of a run's text, which answers as when the run was begun.

    A run without a record is of a version that prepared no text by itself, unless the cache has
    its text prepared.
    """

    def decide(wanted: Wanted, cache: Path | None) -> bool:
        meta = read_meta(run.folder / "checkpoints")

        def make(folder: Path) -> None:
            begun = meta is None or was_prepared(wanted, cache, meta["fingerprint"])
            folder.mkdir(parents=True)
            (folder / _FILE).write_text(json.dumps({"in_memory": not begun}))

        if not (run.folder / RECORD).exists() and (
            is_for_memory(wanted, cache) if meta is None else is_small(wanted)
        ):
            return True
        in_memory = json.loads((run.once(RECORD, make) / _FILE).read_text())["in_memory"]
        if not in_memory and cache is None:
            raise RunError(
                f"{run.address} was begun on text that was prepared in data.cache, and "
                "data.cache=None would read it into memory: give the folder, or leave the flag out"
            )
        return in_memory

    return decide
