"""Prepared corpora at addresses: written into a local folder first, and copied up by shards."""

import hashlib
from pathlib import Path

from zoo.common.addresses import Location, explained, location
from zoo.data.prepared.format import SHARDS, SOURCES, SUMMED, SUMS, TOKENIZER, work_file

CACHE = Path("~/.cache/zoo/prepare")


def working_folder(address: Location) -> Path:
    """The local folder in which the corpus of an address is prepared."""
    return CACHE.expanduser() / hashlib.sha256(str(address).encode()).hexdigest()[:16]


def copy_shard(number: int, folder: Path, address: str) -> int:
    """Copy the files of a shard up, and return its number; what is there is not copied again."""
    copied = work_file(folder, number, ".copied")
    if not copied.exists():
        for suffix in (*SUMMED, SUMS, SOURCES):
            _copy(folder, address, f"{SHARDS}/{number:08}{suffix}")
        copied.touch()
    return number


def copy_tokenizer(folder: Path, address: str) -> None:
    """Copy the tokenizer's files up."""
    for path in sorted((folder / TOKENIZER).rglob("*")):
        if path.is_file():
            _copy(folder, address, path.relative_to(folder).as_posix())


def _copy(folder: Path, address: str, name: str) -> None:
    target = location(f"{address}/{name}", "out")
    with explained(target):
        target.fs.put_file(str(folder / name), target.path)
