"""Records of documents in the order of their hashes: each once, to train on or held out."""

import bisect
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from zoo.common import files
from zoo.data.prepared import format
from zoo.data.prepared.format import PartRecord, ShardRecord

RAW = np.dtype(
    [
        ("high", "<u8"),  # the halves of the hash as numbers, which sort as its bytes do
        ("low", "<u8"),
        ("start", "<u8"),
        ("length", "<u4"),
        ("source", "<u4"),
        ("record", "<u8"),
        ("bytes", "<u8"),
        ("counted", "<u4"),  # tokens
        ("label", "<u4"),  # index in the shard's labels
        ("part", "u1"),
    ]
)
# A record's part; of copies the one that is first in this order stays.
ALWAYS_HELD_OUT, BY_HASH, NEVER_HELD_OUT = range(3)
HASH = np.dtype([("high", ">u8"), ("low", ">u8")])
DUPLICATE = np.dtype([("shard", "<u4"), ("index", "<u8")])

RECORDS = ".records"
SLICE = 2**20  # documents that are sorted at a time

Records: TypeAlias = np.ndarray


def hash_of(text: bytes, of_row: bytes | None = None) -> bytes:
    """The hash of a document, 16 bytes; the last 4, if given, tell the examples `of_row` apart."""
    hashed = hashlib.sha256(text).digest()
    return hashed[:16] if of_row is None else hashed[:12] + of_row


def hash_limit(fraction: float) -> int:
    """The number that the hashes of that fraction of all rows are below."""
    return -int(-Fraction(fraction) * 2**96 // 1) << 32


def limit_between(lowest: int, highest: int, fraction: float) -> int:
    """The hash below which documents are held out; of two rows or more, neither part is empty."""
    return min(max(hash_limit(fraction), (lowest >> 32) + 1 << 32), highest >> 32 << 32)


def number_of_key(key: bytes) -> int:
    """The hash of a document's key as a number."""
    return int.from_bytes(hash_of(key), "big")


def number_of(record: Any) -> int:
    """The hash of one record as a number."""
    return (int(record["high"]) << 64) + int(record["low"])


def below(records: Records, limit: int) -> int:
    """How many of the records, which are in order, have a hash below the limit."""
    return bisect.bisect_left(range(len(records)), limit, key=lambda i: number_of(records[i]))


def is_first(records: Records) -> tuple[Records, Records]:
    """(the order of the records, whether each in that order is the first of its hash)."""
    high, low = records["high"], records["low"]
    order = np.lexsort((records["part"], low, high))  # stable
    high, low = high[order], low[order]
    first = np.ones(len(order), bool)
    first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return order, first


def in_order(records: Records) -> Records:
    """Records in the order of their hashes; of equal ones the first."""
    order, first = is_first(records)
    return records[order[first]]


def merged(runs: Sequence[Records]) -> Iterator[Records]:
    """The records of runs that are each in order, in order; of equal ones the first run's."""
    for begin, end in slices(sum(map(len, runs))):
        yield in_order(np.concatenate([run[below(run, begin) : below(run, end)] for run in runs]))


def slices(documents: int, begin: int = 0, end: int = 1 << 128) -> list[tuple[int, int]]:
    """Ranges that [begin, end) consists of, each with about `SLICE` of the documents' hashes."""
    count = max(1, -(-(documents * (end - begin) >> 128) // SLICE))
    bounds = [begin + (end - begin) * i // count for i in range(count + 1)]
    return list(itertools.pairwise(bounds)) if begin < end else []


def mapped(path: Path, dtype: np.dtype) -> Records:
    """The content of a file, memory-mapped."""
    if path.stat().st_size == 0:  # cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)


def find_duplicates(
    number: int, begin: int, end: int, shards: int, folder: Path
) -> tuple[int, int]:
    """Write the documents of all shards with hashes in [begin, end) that are not the first.

    Of equal ones that of the first shard stays. Returns the slice's number, and how many there are.
    """
    path = slice_file(folder, number)
    if not path.exists():
        found, where = [], []
        for shard in range(shards):
            records = mapped(format.work_file(folder, shard, RECORDS), RAW)
            first, last = below(records, begin), below(records, end)
            found.append(records[["high", "low", "part"]][first:last])
            where.append(np.zeros(last - first, DUPLICATE))
            where[-1]["shard"], where[-1]["index"] = shard, np.arange(first, last)
        order, first_of = is_first(np.concatenate(found))
        again = np.sort(order[~first_of])  # in the order of shards, and within these of hashes
        copies = np.concatenate(where)[again]
        files.replace(path, lambda temporary: copies.tofile(temporary))
    return number, path.stat().st_size // DUPLICATE.itemsize


def duplicates_of(shard: int, slices: int, folder: Path) -> Iterator[Records]:
    """The indices of a shard's records that are duplicates, rising, slice by slice."""
    for number in range(slices):
        found = mapped(slice_file(folder, number), DUPLICATE)
        first, last = (
            bisect.bisect_left(range(len(found)), bound, key=lambda i: int(found[i]["shard"]))
            for bound in (shard, shard + 1)
        )
        yield found["index"][first:last].astype(np.int64)


def slice_file(folder: Path, number: int) -> Path:
    """The duplicates of a slice of the hashes."""
    return format.work_file(folder, number, ".duplicates")


PARTED = ".parts.json"


def write_columns(
    folder: Path, columns: Mapping[str, np.ndarray], raw: Records, sources: Sequence[str]
) -> None:
    """Write the columns of the only shard of a folder, by suffix, and what `write_parts` reads."""
    for name in (format.SHARDS, format.WORK):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for suffix, column in columns.items():
        format.shard_file(folder, 0, suffix).write_bytes(column.tobytes())
    sums = b"".join(format.block_sums(format.shard_file(folder, 0, suffix)) for suffix in columns)
    format.work_file(folder, 0, format.SUMS).write_bytes(sums)
    format.work_file(folder, 0, RECORDS).write_bytes(raw.tobytes())
    format.shard_file(folder, 0, format.SOURCES).write_text(json.dumps(sources))


def write_parts(
    number: int,
    limit: int,
    slices: int,
    frame: int,
    without: Set[bytes],
    labels: Sequence[int],
    folder: Path,
) -> tuple[int, ShardRecord]:
    """Write the `.train`, `.held_out` and `.sums` of a shard; return its number and its record.

    Documents with hashes below `limit` are held out unless their part is fixed; what the `slices`
    list as duplicates is left out, and so are hashes `without` which the rest is trained on.
    `labels` are the shard's labels by their numbers in the manifest. A shard that is finished is
    left as it is.
    """
    path = format.work_file(folder, number, PARTED)
    if path.exists():
        return number, format.shard_record(json.loads(path.read_text()))
    raw = mapped(format.work_file(folder, number, RECORDS), RAW)
    duplicates = np.concatenate([np.zeros(0, np.int64), *duplicates_of(number, slices, folder)])
    bound = below(raw, limit)

    def chosen(suffix: str) -> Iterator[Records]:
        for begin in range(0, len(raw), SLICE):
            records = raw[begin : begin + SLICE]
            part, places = records["part"], begin + np.arange(len(records))
            fixed = part != BY_HASH
            held_out = np.where(fixed, part == ALWAYS_HELD_OUT, places < bound)
            kept = held_out if suffix == format.HELD_OUT else ~held_out
            first, last = np.searchsorted(duplicates, [begin, begin + len(records)])
            kept[duplicates[first:last] - begin] = False
            if without and suffix == format.TRAIN:
                found = [hashed.tobytes() in without for hashed in _bytes_of(records)]
                kept &= ~np.array(found, bool)
            yield records[kept]

    parts = {}
    for suffix in (format.HELD_OUT, format.TRAIN):
        out = format.shard_file(folder, number, suffix)
        partial = out.with_name(f"{out.name}.tmp")
        parts[suffix] = _write_part(partial, chosen(suffix), frame, labels)
        files.sync(partial)
        partial.replace(out)
    sums = format.work_file(folder, number, format.SUMS).read_bytes()  # of tokens and weights
    for suffix in (format.TRAIN, format.HELD_OUT):
        sums += format.block_sums(format.shard_file(folder, number, suffix))
    files.replace(format.shard_file(folder, number, format.SUMS), sums)
    sources = format.shard_file(folder, number, format.SOURCES).read_bytes()
    weights = format.shard_file(folder, number, format.WEIGHTS)
    record = ShardRecord(
        tokens_bytes=format.shard_file(folder, number, format.TOKENS).stat().st_size,
        weights_bytes=weights.stat().st_size if weights.exists() else None,
        train=parts[format.TRAIN],
        held_out=parts[format.HELD_OUT],
        sums=xxhash.xxh3_128_hexdigest(sums),
        sources=xxhash.xxh3_128_hexdigest(sources),
    )
    files.replace(path, json.dumps(dataclasses.asdict(record)))
    return number, record


def _write_part(
    path: Path, slices: Iterable[Records], frame: int, labels: Sequence[int]
) -> PartRecord:
    """Write the records of one part, slice by slice."""
    positions, totals = 0, np.zeros(4, np.int64)
    with files.named(path), open(path, "wb") as file:
        for chosen in slices:
            records = np.zeros(len(chosen), format.RECORD)
            for field in ("start", "length", "source", "record"):
                records[field] = chosen[field]
            records["hash"] = _bytes_of(chosen)
            if len(labels):
                records["label"] = np.asarray(labels)[chosen["label"]]
            length = chosen["length"].astype(np.int64)
            ends = positions + np.cumsum(np.maximum(length + frame - 1, 0))
            records["end"] = ends
            positions = int(ends[-1]) if len(ends) else positions
            counted = int(chosen["counted"].sum())
            totals += [len(chosen), length.sum(), counted, int(chosen["bytes"].sum())]
            file.write(records.tobytes())
    documents, tokens, counted, num_bytes = totals.tolist()
    return PartRecord(documents, tokens, counted, positions, num_bytes)


def _bytes_of(raw: Records) -> Records:
    hashed = np.zeros(len(raw), HASH)
    hashed["high"], hashed["low"] = raw["high"], raw["low"]
    return hashed.view("V16")
