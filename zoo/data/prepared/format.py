"""The files of a prepared corpus.

A folder holds `manifest.json`, which is written last; `tokenizer/`; and per shard, `shards/` with a
number of eight digits and

- `.tokens`: the ids of its documents end to end, little-endian, without begin and end;
- `.train`, `.held_out`: a `RECORD` per document of that part, in the order of their hashes;
- `.sources.json`: the names of the files that its documents come from;
- `.sums`: the xxh3_64 of each block of `.tokens`, `.train` and `.held_out`, one after the other.

The manifest has the digest of each `.sums`: a tree of checksums, so that a start reads the manifest
alone, and a block is verified when it is read.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.base import files
from zoo.base.addresses import Location

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
SHARDS = "shards"
VERSION = 1
SUFFIXES = (".tokens", ".train", ".held_out")  # the files that have sums, in their order
RECORD = np.dtype(
    [
        ("start", "<u8"),  # of its first id in .tokens
        ("length", "<u4"),  # ids
        ("end", "<u8"),  # positions of the shard's documents of this part up to and with this one
        ("hash", "V16"),  # of its text: the first bytes of the SHA-256
        ("source", "<u4"),  # index in .sources.json
        ("record", "<u8"),  # line, row or record there; 0 of a whole file
    ]
)


class CorpusError(ValueError):
    """A folder that is no prepared corpus, or a damaged one, with what to do about it."""


@dataclass(frozen=True)
class PartRecord:
    """The size of a part of a shard; `bytes` are those of its text in UTF-8."""

    documents: int
    tokens: int
    positions: int
    bytes: int


@dataclass(frozen=True)
class ShardRecord:
    """A shard: the bytes of `.tokens`, its parts, and the xxh3_128 of `.sums`."""

    tokens_bytes: int
    train: PartRecord
    held_out: PartRecord
    sums: str


@dataclass(frozen=True)
class Settings:
    """What decides a corpus: equal settings on equal files give equal bytes."""

    splits: str
    """Hash of the names and sizes of all files, and of how they are split."""
    tokenizer: str
    """Hash of the tokenizer's files."""
    vocab_size: int
    frame: int
    """How many of begin and end each document has."""
    field: str
    held_out: float


@dataclass(frozen=True)
class Manifest:
    """A corpus; `frame` says how many of begin and end the tokenizer gives each document."""

    settings: Settings
    dtype: str
    shards: tuple[ShardRecord, ...]
    duplicates: int
    """Documents left out, as an equal one came before them."""
    empty: int
    """Documents left out, as they have no token."""
    first_empty: str
    """The name of the first of them, or nothing."""

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        return self.settings.vocab_size

    @property
    def frame(self) -> int:
        """How many of begin and end each document has."""
        return self.settings.frame

    @property
    def fingerprint(self) -> str:
        """A hash of the whole corpus: equal ones mean equal tokens, in the same parts."""
        return _digest(self.to_json())

    def total(self, part: str, field: str) -> int:
        """The sum of a field of `PartRecord` over the shards."""
        return sum(getattr(getattr(shard, part), field) for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Manifest":
        """The manifest that `to_json` gave."""
        shards = tuple(
            ShardRecord(
                shard["tokens_bytes"],
                PartRecord(**shard["train"]),
                PartRecord(**shard["held_out"]),
                shard["sums"],
            )
            for shard in content["shards"]
        )
        rest = {name: content[name] for name in ("dtype", "duplicates", "empty", "first_empty")}
        return cls(settings=Settings(**content["settings"]), shards=shards, **rest)


def is_prepared(folder: Location) -> bool:
    """Whether a folder holds a prepared corpus."""
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, sealed by a digest of its content, as the last of a corpus' files."""
    content = manifest.to_json()
    text = json.dumps({"sha256": _digest(content), **content}, indent=1)
    files.replace(folder / MANIFEST, lambda temporary: temporary.write_text(text))


def read_manifest(folder: Location) -> Manifest:
    """The manifest of a prepared corpus.

    Raises:
        CorpusError: it is damaged, of a later version, or there is none.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CorpusError(
            f"{folder} has no {MANIFEST}: it is no prepared corpus, or one that is not finished; "
            "run `python -m zoo prepare` again"
        ) from None
    except ValueError as error:
        raise CorpusError(f"{path} is damaged ({error}): {_REMEDY}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise CorpusError(
            f"{path} is of version {version}, and this zoo reads {VERSION}: update it"
        )
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise CorpusError(f"{path} is damaged, or was edited by hand: {_REMEDY}")
    return Manifest.from_json(content)


_REMEDY = "put it back from a copy, or remove it and run `python -m zoo prepare` again"


def shard_stem(folder: Path, number: int) -> Path:
    """The path of a shard's files without their suffix."""
    return folder / SHARDS / f"{number:08}"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
