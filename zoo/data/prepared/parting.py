"""The last pass over a corpus: the documents of a shard to train on and those held out."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import numpy as np
import xxhash

from zoo.common import files
from zoo.data.prepared import hashes
from zoo.data.prepared.format import (
    HELD_OUT,
    RECORD,
    SOURCES,
    SUMS,
    TOKENS,
    TRAIN,
    PartRecord,
    ShardRecord,
    block_sums,
    shard_file,
    shard_record,
    work_file,
)
from zoo.data.prepared.hashes import Records

PARTED = ".parts.json"


def write_parts(
    number: int, limit: int, slices: int, frame: int, without: Set[bytes], folder: Path
) -> tuple[int, ShardRecord]:
    """Write the `.train`, `.held_out` and `.sums` of a shard; return its number and its record.

    Documents with hashes below `limit` are held out unless their part is fixed; what the `slices`
    list as duplicates is left out, and hashes `without` which the rest is to be trained on. A shard
    that is finished is left as it is.
    """
    path = work_file(folder, number, PARTED)
    if path.exists():
        return number, shard_record(json.loads(path.read_text()))
    raw = hashes.mapped(work_file(folder, number, hashes.RECORDS), hashes.RAW)
    duplicates = np.concatenate([*hashes.duplicates_of(number, slices, folder)])
    bound = hashes.below(raw, limit)

    def chosen(suffix: str) -> Iterator[Records]:
        for begin in range(0, len(raw), hashes.SLICE):
            records = raw[begin : begin + hashes.SLICE]
            part, places = records["part"], begin + np.arange(len(records))
            fixed = part != hashes.BY_HASH
            held_out = np.where(fixed, part == hashes.ALWAYS_HELD_OUT, places < bound)
            kept = held_out if suffix == HELD_OUT else ~held_out
            first, last = np.searchsorted(duplicates, [begin, begin + len(records)])
            kept[duplicates[first:last] - begin] = False
            if without and suffix == TRAIN:
                found = [hashed.tobytes() in without for hashed in _bytes_of(records)]
                kept &= ~np.array(found, bool)
            yield records[kept]

    parts = {}
    for suffix in (HELD_OUT, TRAIN):
        out = shard_file(folder, number, suffix)
        partial = out.with_name(f"{out.name}.tmp")
        parts[suffix] = _write_part(partial, chosen(suffix), frame)
        files.sync(partial)
        partial.replace(out)
    sums = work_file(folder, number, SUMS).read_bytes()  # of the tokens
    for suffix in (TRAIN, HELD_OUT):
        sums += block_sums(shard_file(folder, number, suffix))
    files.replace(shard_file(folder, number, SUMS), lambda path: path.write_bytes(sums))
    record = ShardRecord(
        tokens_bytes=shard_file(folder, number, TOKENS).stat().st_size,
        train=parts[TRAIN],
        held_out=parts[HELD_OUT],
        sums=xxhash.xxh3_128_hexdigest(sums),
        sources=xxhash.xxh3_128_hexdigest(shard_file(folder, number, SOURCES).read_bytes()),
    )
    content = json.dumps(dataclasses.asdict(record))
    files.replace(path, lambda path: path.write_text(content))
    return number, record


def _write_part(path: Path, slices: Iterable[Records], frame: int) -> PartRecord:
    """Write the records of one part, slice by slice."""
    positions, totals = 0, np.zeros(3, np.int64)
    with files.named(path), open(path, "wb") as file:
        for chosen in slices:
            records = np.zeros(len(chosen), RECORD)
            for field in ("start", "length", "source", "record"):
                records[field] = chosen[field]
            records["hash"] = _bytes_of(chosen)
            length = chosen["length"].astype(np.int64)
            ends = positions + np.cumsum(np.maximum(length + frame - 1, 0))
            records["end"] = ends
            positions = int(ends[-1]) if len(ends) else positions
            totals += [len(chosen), length.sum(), int(chosen["bytes"].sum())]
            file.write(records.tobytes())
    documents, tokens, num_bytes = totals.tolist()
    return PartRecord(documents, tokens, positions, num_bytes)


def _bytes_of(raw: Records) -> Records:
    hashed = np.zeros(len(raw), [("high", ">u8"), ("low", ">u8")])
    hashed["high"], hashed["low"] = raw["high"], raw["low"]
    return hashed.view("V16")
