"""Random damage to files and folders, and restoring damaged checkpoints."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import contents

from zoo import sharding
from zoo.runs.checkpoint import Checkpointer, CheckpointError


def hurt(kind: str, root: Path, within: Path, choose: random.Random) -> None:
    """Damage 1 to 3 random files, or folders, under `root` (or `root` itself) in one way.

    Swaps are with files or folders anywhere in `within`.
    """
    for _ in range(choose.choice((1, 1, 2, 3))):
        wanted = Path.is_dir if kind.startswith("folder") else Path.is_file
        entries = sorted(path for path in [root, *root.rglob("*")] if wanted(path))
        if not entries:
            return
        path = choose.choice(entries)
        if "swapped" in kind:
            _swap(path, within, choose)
        else:
            {**FILES, **FOLDERS}[kind](path, choose)


def _flip(path: Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(choose.choice((1, 1, 2, 16)) if data else 0):
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def _zero(path: Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = choose.randrange(len(data) + 1)
    length = min(choose.choice((1, 16, 512, 4096)), len(data) - start)
    data[start : start + length] = bytes(length)
    path.write_bytes(data)


def _truncate(path: Path, choose: random.Random) -> None:
    os.truncate(path, choose.choice((0, choose.randrange(path.stat().st_size + 1))))


def _append(path: Path, choose: random.Random) -> None:
    path.write_bytes(path.read_bytes() + choose.randbytes(choose.choice((1, 100))))


def _to_folder(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if choose.random() < 0.5:
        (path / "file").write_text("text")


def _to_file(path: Path, choose: random.Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(choose.choice((b"", b"text")))


def _swap(path: Path, within: Path, choose: random.Random) -> None:
    """Swap a file or folder with another, preferably of its name, or a step with another step."""
    others = [p for p in sorted(within.rglob("*")) if p.is_dir() == path.is_dir()]
    others = [p for p in others if p not in (path, *path.parents) and path not in p.parents]
    alike = [p for p in others if p.name == path.name or (p.name + path.name).isdigit()]
    if path != within and others:
        other = choose.choice(alike or others)
        aside = within / "aside"
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


FILES: dict[str, Callable[[Path, random.Random], object]] = {
    "bits flipped": _flip,
    "block zeroed": _zero,
    "file of garbage": lambda path, choose: path.write_bytes(choose.randbytes(path.stat().st_size)),
    "file truncated": _truncate,
    "file lengthened": _append,
    "file deleted": lambda path, _: path.unlink(),
    "file turned into a folder": _to_folder,
}
FOLDERS: dict[str, Callable[[Path, random.Random], object]] = {
    "folder turned into a file": _to_file,
    "folder emptied": lambda path, _: (shutil.rmtree(path), path.mkdir()),
    "folder deleted": lambda path, _: shutil.rmtree(path),
}
KINDS = (*FILES, *FOLDERS, "files swapped", "folders swapped")


def restore(folder: Path, pristine: Path, mesh: str) -> tuple[str, bool]:
    """The fault in restoring steps of `pristine` from `folder`, and whether it was refused."""
    steps = [int(path.name) for path in pristine.iterdir()]
    alike = lambda name: contents(folder / name) == contents(pristine / name)
    intact = [step for step in steps if alike(str(step))]
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
        kept = not before.exists() or contents(folder) == contents(before)
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
