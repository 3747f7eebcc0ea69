"""Restoring damaged checkpoints, and resuming damaged runs."""

import contextlib
import json
import logging
import random
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.soak import process, runs
from benchmarks.soak.damage import KINDS, hurt, same
from benchmarks.soak.lives import Outcome
from zoo import sharding
from zoo.runs.checkpoint import Checkpointer, CheckpointError

BATCH = 50  # damages to checkpoints in one process
SAVED = (10, 20, 30)  # the steps of a damaged folder
NAMED = ("CheckpointError", "RunError", "PublishError", "ValueError", "FileNotFoundError")
PARTS = {  # of a run's folder, with the relative frequency of damages
    "config.json": 2,
    "metrics.jsonl": 2,
    "tokenizer": 2,
    "checkpoints": 3,
    "model": 1,
    "cache": 1,
    "all of it": 1,
}


def restore_damaged(place: runs.Place, choose: random.Random, count: int = BATCH) -> list[Outcome]:
    """Damage checkpoints `count` times, on one device or a mesh, in a separate process."""
    folder, mesh, seed = place.folder / "damage", choose.choice(runs.MESHES), choose.random()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    running = process.start(folder / "log", _restore_all, folder, mesh, seed, count)
    code = process.finish(running)
    record = folder / "outcomes.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    if len(outcomes) < count:
        said = (folder / "log").read_text(errors="replace")[-3000:]
        detail = f"damage {len(outcomes)} ended the process with {code}:\n{said}"
        outcomes.append(Outcome(_table(mesh), "any", "wrong", detail))
    return outcomes


def _table(mesh: str) -> str:
    return f"damaged checkpoints, restored on {mesh or 'one device'}"


def _restore_all(folder: Path, mesh: str, seed: float, count: int) -> None:
    logging.disable()  # there would be one line per damage
    pristine = folder / "pristine"
    save(pristine, mesh)
    with open(folder / "outcomes.jsonl", "w") as file:
        for index in range(count):
            choose = random.Random(f"{seed} {index}")
            kind = choose.choice(KINDS)
            detail, refused = damage_and_restore(pristine, folder / "copy", mesh, kind, choose)
            outcome = {
                "table": _table(mesh),
                "kind": kind,
                "result": "wrong" if detail else "refused" if refused else "right",
                "detail": detail and f"damage {index}: {detail}",
            }
            file.write(json.dumps(outcome) + "\n")
            file.flush()


def save(folder: Path, mesh: str) -> None:
    """Checkpoints of known values."""
    with contextlib.closing(Checkpointer(folder)) as checkpointer:
        for step in SAVED:
            checkpointer.save(step, make_state(step, mesh), {"step": step})


def damage_and_restore(
    pristine: Path, copy: Path, mesh: str, kind: str, choose: random.Random
) -> tuple[str, bool]:
    """The fault in restoring a damaged copy ("" if none), and whether it was refused."""
    if copy.exists():
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    shutil.copytree(pristine, copy)
    where = choose.choices(("newest", "any", "each"), (2, 2, 1))[0]
    roots = {"newest": [copy / str(max(SAVED))], "any": [copy]}
    for root in roots.get(where, [copy / str(step) for step in SAVED]):
        hurt(kind, root, copy, choose)
    return restore(copy, pristine, mesh)


def restore(folder: Path, pristine: Path, mesh: str) -> tuple[str, bool]:
    """The fault in restoring steps of `pristine` from `folder`, and whether it was refused."""
    steps = [int(path.name) for path in pristine.iterdir()]
    intact = [step for step in steps if same(folder / str(step), pristine / str(step))]
    before = pristine.with_name("before")
    shutil.rmtree(before, ignore_errors=True)
    if folder.is_dir():
        # The remains of an interrupted save are removed first.
        shutil.copytree(folder, before, ignore=shutil.ignore_patterns("*.tmp"))
    try:
        with contextlib.closing(Checkpointer(folder)) as checkpointer:
            restored = checkpointer.restore(make_state(0, mesh))
    except CheckpointError as error:
        if intact:
            return f"it was refused, though {intact} are intact: {error}", True
        kept = not before.exists() or same(folder, before)
        return ("" if kept else "it was refused, and something was written"), True
    except Exception as error:
        # A file in the folder's place is reported before there is a Checkpointer.
        named = folder.is_file() and f"{folder} is a file" in str(error)
        return ("" if named else f"{type(error).__name__}: {error}"), named
    if restored is None:
        left = [path.name for path in folder.iterdir()]
        return (f"nothing was restored, and there are {left}" if left else ""), False
    return _unlike(*restored, intact, mesh), False


def _unlike(state: Any, step: int, meta: dict, intact: Collection[int], mesh: str) -> str:
    """The fault in a restored state; "" if there is none."""
    if step < max(intact, default=0):
        return f"step {step} was restored, and {max(intact)} is intact"
    if meta != {"step": step}:
        return f"step {step} was restored with {meta}"

    def data(leaf: Any) -> bytes:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    expected = make_state(step, mesh)
    differing = [name for name in expected if data(state[name]) != data(expected[name])]
    return f"step {step} was restored with other values in {differing}" if differing else ""


def make_state(step: int, mesh: str) -> dict[str, jax.Array]:
    """Arrays of several dtypes, sharded and replicated, large and small, and a key."""
    rng, devices = np.random.default_rng(step), sharding.make_mesh(mesh)
    rows, whole = sharding.batch_sharding(devices, 2), sharding.replicated(devices)
    return {
        "large": jax.device_put(rng.normal(size=(64, 256)).astype(np.float32), rows),
        "small": jax.device_put(rng.normal(size=(8, 3)).astype(np.float32), rows),
        "half": jax.device_put(jnp.asarray(rng.normal(size=(8, 16)), jnp.bfloat16), whole),
        "step": jax.device_put(np.int32(step), whole),
        "key": jax.device_put(jax.random.key(step), whole),
    }


def resume_damaged(place: runs.Place, choose: random.Random) -> list[Outcome]:
    """Damage a run that was killed half way, or that has finished, and resume it."""
    base = choose.choice((place.half_way(), place.straight("")))
    run = place.folder / "damaged run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(base, run)
    part, kind = choose.choices(list(PARTS), PARTS.values())[0], choose.choice(KINDS)
    root = {"cache": run / "cache", "all of it": run / "run"}.get(part, run / "run" / part)
    hurt(kind, root, run, choose)
    # Metrics have no checksum: a changed number of an earlier step stays.
    log_is_intact = same(run / "run" / "metrics.jsonl", base / "run" / "metrics.jsonl")
    try:
        code = process.finish(place.start(run, ""))
        if code == 0:
            detail = runs.difference(run, place.straight(""), metrics=log_is_intact)
        else:
            detail = "" if _is_named(code, run) else f"it ended with {code}"
    except process.HangError as error:
        code, detail = None, str(error)
    title = "damaged runs, resumed by their command"
    if detail:
        detail = f"{kind}: {detail}; it said:\n{runs.log(run)[-3000:]}"
        return [Outcome(title, part, "wrong", detail)]
    return [Outcome(title, part, "refused" if code else "right")]


def _is_named(code: int, run: Path) -> bool:
    """Whether a run ended with an error of the zoo that names the damaged file."""
    text = runs.log(run)
    named = any(f"{process.RAISED} {name}\n" in text for name in NAMED)
    _, error, message = text.partition("\nerror: ")
    says_where = str(run) in message and not message.startswith("[Errno")
    return code == 1 and named and bool(error) and says_where
