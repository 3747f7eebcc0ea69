"""Verification of a prepared corpus, every block of it."""

from pathlib import Path

import numpy as np
import xxhash

from zoo.data.prepared.format import (
    BLOCK,
    MANIFEST,
    SOURCES,
    SUMS,
    DamagedError,
    ShardRecord,
    block_sums,
    check_tokenizer,
    read_manifest,
    shard_file,
)


def is_prepared(folder: Path) -> bool:
    """Whether a folder is a prepared corpus, a damaged one too."""
    return (folder / MANIFEST).is_file()


def verify(folder: Path) -> tuple[int, list[str]]:
    """(how many files there are, a line per missing or damaged one) of a prepared corpus."""
    try:
        manifest = read_manifest(folder)
        check_tokenizer(folder, manifest)
    except DamagedError as error:
        return 0, [str(error)]
    lines = [
        line
        for number, record in enumerate(manifest.shards)
        for line in _problems(folder, number, record)
    ]
    return 1 + 5 * len(manifest.shards), lines


def _problems(folder: Path, number: int, record: ShardRecord) -> list[str]:
    lines, intact = [], {}
    for suffix, digest in ((SUMS, record.sums), (SOURCES, record.sources)):
        path = shard_file(folder, number, suffix)
        if not path.is_file():
            lines.append(f"{path.name} is missing")
        elif xxhash.xxh3_128_hexdigest(path.read_bytes()) != digest:
            lines.append(f"{path.name} is damaged")
        else:
            intact[suffix] = path
    # Without sums that can be trusted, sizes are verified alone.
    sums = np.fromfile(intact[SUMS], "<u8") if SUMS in intact else None
    first = 0
    for suffix, size in record.sizes.items():
        path, blocks = shard_file(folder, number, suffix), -(-size // BLOCK)
        wanted = None if sums is None else sums[first : first + blocks]
        lines += _problem(path, size, wanted)
        first += blocks
    return lines


def _problem(path: Path, size: int, sums: np.ndarray | None) -> list[str]:
    if not path.is_file():
        return [f"{path.name} is missing"]
    if (found := path.stat().st_size) != size:
        return [f"{path.name} has {found:,} bytes instead of {size:,}"]
    if sums is None:
        return []
    differ = np.flatnonzero(np.frombuffer(block_sums(path), "<u8") != sums)
    return [
        f"{path.name} is damaged: block {block} (bytes {block * BLOCK:,} to "
        f"{min(size, (block + 1) * BLOCK) - 1:,})"
        for block in differ.tolist()
    ]
