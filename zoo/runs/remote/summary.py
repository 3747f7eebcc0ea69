"""A run in a few lines, read from its folder or its address."""

import json
from collections.abc import Iterator
from typing import Any

from zoo.base import addresses, files
from zoo.runs.metrics import read_metrics
from zoo.runs.processes import RunError
from zoo.runs.remote import lease
from zoo.runs.remote.metric_parts import MetricParts
from zoo.runs.remote.steps import RemoteSteps, local_steps
from zoo.runs.remote.store import Store


def summary(run_dir: str) -> Iterator[str]:
    """Lines on a run: its checkpoints, its last numbers, and whether a process is at work.

    Raises:
        RunError: there is no run.
    """
    if addresses.is_remote(addresses.location(run_dir, "run_dir")):
        yield from _remote(Store(run_dir))
    else:
        folder = files.local_path(run_dir, "run_dir")
        path = folder / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        yield from _lines(run_dir, local_steps(folder / "checkpoints"), records)


def _remote(store: Store) -> Iterator[str]:
    steps = sorted(RemoteSteps(store, keep=1).committed)
    yield from _lines(store.address, steps, [json.loads(x) for x in MetricParts(store).lines])
    _, found = lease.newest(store)
    if found is not None:
        yield (
            "no process is at work" if found["released"] else "a process is at work, or was killed"
        )


def _lines(run_dir: str, steps: list[int], records: list[dict[str, Any]]) -> Iterator[str]:
    if not steps and not records:
        raise RunError(f"run='{run_dir}': there is neither a checkpoint nor a metric of a run")
    yield f"checkpoints {', '.join(map(str, steps)) or 'none'}"
    last: dict[str, Any] = {}
    for record in records:
        last |= record
    yield ", ".join(f"{name} {value}" for name, value in last.items())
