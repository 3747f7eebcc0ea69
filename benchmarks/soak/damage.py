"""Random damage to files and folders."""

import filecmp
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path


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


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    if one.is_file() and other.is_file():
        return filecmp.cmp(one, other, shallow=False)
    if not (one.is_dir() and other.is_dir()):
        return False
    names = {path.name for path in one.iterdir()}
    if names != {path.name for path in other.iterdir()}:
        return False
    return all(same(one / name, other / name) for name in names)


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


def _garbage(path: Path, choose: random.Random) -> None:
    path.write_bytes(choose.randbytes(path.stat().st_size))


def _truncate(path: Path, choose: random.Random) -> None:
    os.truncate(path, choose.choice((0, choose.randrange(path.stat().st_size + 1))))


def _append(path: Path, choose: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(choose.randbytes(choose.choice((1, 100))))


def _delete(path: Path, choose: random.Random) -> None:
    path.unlink()


def _to_folder(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if choose.random() < 0.5:
        (path / "file").write_text("text")


def _to_file(path: Path, choose: random.Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(choose.choice((b"", b"text")))


def _empty(path: Path, choose: random.Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _remove(path: Path, choose: random.Random) -> None:
    shutil.rmtree(path)


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


FILES: dict[str, Callable[[Path, random.Random], None]] = {
    "bits flipped": _flip,
    "block zeroed": _zero,
    "file of garbage": _garbage,
    "file truncated": _truncate,
    "file lengthened": _append,
    "file deleted": _delete,
    "file turned into a folder": _to_folder,
}
FOLDERS: dict[str, Callable[[Path, random.Random], None]] = {
    "folder turned into a file": _to_file,
    "folder emptied": _empty,
    "folder deleted": _remove,
}
KINDS = (*FILES, *FOLDERS, "files swapped", "folders swapped")
