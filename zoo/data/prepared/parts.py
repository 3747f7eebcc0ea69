"""A prepared corpus, opened: the manifest is read at once, shards are mapped when they are used."""

import bisect
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from jaxtyping import Int64, Integer, Shaped, UInt8

from zoo.data.packing import Piece
from zoo.data.prepared.format import BLOCK, RECORD, Manifest, ShardRecord
from zoo.data.tokenizer import Tokenizer, load_tokenizer

OPEN_SHARDS = 32
_AHEAD = 128  # records read at a time: a fraction of a block

PartName = Literal["train", "held_out"]


class DamagedError(ValueError):
    """A file of a prepared corpus that is not what was written."""


class Place(NamedTuple):
    """A position of a part: a document, and the position in it."""

    document: int
    offset: int


class Shard:
    """The files of one shard, memory-mapped; each block of them is verified when first read.

    Any number of threads may read. `verified` has a byte per block, and outlives the maps.
    """

    def __init__(self, stem: Path, record: ShardRecord, verified: bytearray):
        self._stem = stem
        ...

    def read(self, suffix: str, begin: int, end: int) -> UInt8[np.ndarray, "bytes"]:
        """Bytes [begin, end) of a file.

        Raises:
            DamagedError: a block of them is damaged.
        """
        ...


class Part:
    """The documents to train on, or those held out, in the order in which they are stored.

    See `zoo.data.corpus.Tokenized`. Reading a document opens its shard, of which at most
    `OPEN_SHARDS` are open. Memory does not depend on the number of documents.
    """

    counts = None
    framed = False

    num_positions: int

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Integer[np.ndarray, "length"]: ...

    def ids(self, i: int, start: int, stop: int) -> Integer[np.ndarray, "part"]:
        """Ids [start, stop) of document i, or those of them that it has."""
        ...

    def counted(self, i: int) -> None:
        """All tokens of all documents count."""

    def name(self, i: int) -> str:
        """The file of document i and, in a file of several, its line or row."""
        ...

    def locate(self, position: int) -> Place:
        """The place of a position, of which each document has length + frame - 1 or none."""
        ...

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The pieces of documents at positions [begin, end), in the order they are stored in."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus on disk."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: Part
    held_out: Part

    @property
    def fingerprint(self) -> str:
        """A hash of all of its content: equal ones mean equal batches."""
        return self.manifest.fingerprint


def open_prepared(folder: Path) -> Prepared:
    """The prepared corpus in a folder; reads its manifest and tokenizer, and no shard.

    Raises:
        FileNotFoundError: there is no manifest, or a shard is missing.
        DamagedError: the manifest is damaged, or a file has another size than is written there.
    """
    ...
