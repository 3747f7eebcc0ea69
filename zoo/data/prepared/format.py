"""Provisional: part prepare's."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

RECORD = np.dtype(
    [
        ("start", "<u8"),
        ("length", "<u4"),
        ("end", "<u8"),
        ("hash", "V16"),
        ("source", "<u4"),
        ("record", "<u8"),
    ]
)


@dataclass(frozen=True)
class PartRecord:
    documents: int
    tokens: int
    positions: int
    bytes: int


@dataclass(frozen=True)
class ShardRecord:
    tokens_bytes: int
    train: PartRecord
    held_out: PartRecord
    sums: str


@dataclass(frozen=True)
class Manifest:
    dtype: str
    vocab_size: int
    frame: int
    shards: tuple[ShardRecord, ...]
    fingerprint: str


def read_manifest(folder) -> Manifest:
    found = json.loads((folder / "manifest.json").read_text())
    shards = tuple(
        ShardRecord(
            s["tokens_bytes"], PartRecord(**s["train"]), PartRecord(**s["held_out"]), s["sums"]
        )
        for s in found["shards"]
    )
    return Manifest(**{**found, "shards": shards})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
