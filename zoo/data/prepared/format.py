"""The format of a prepared corpus: its files, of which each block is verified, and its manifest.

A folder has `manifest.json`, which is written last, `tokenizer/`, and per shard in `shards/`:

- `.tokens`: the ids of its documents end to end, without begin and end, in the order of the source;
- `.weights`, for documents of which only some tokens count: a byte per id, 0 where it does not, and
  1 where it does, or 1 + the number of its tag;
- `.train` and `.held_out`: a `RECORD` per document of that part, in the order of their hashes;
- `.sources.json`: the names of the files that the documents are from;
- `.sums`: the xxh3_64 of each `BLOCK` bytes of all but the names, one file after the other.

The manifest has the xxh3_128 of each shard's `.sums` and of its `.sources.json`, and is sealed by
its fingerprint: a block is verified by its sum, the sums by the manifest, and that by itself. All
numbers are little-endian.
"""

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from jaxtyping import Integer, UInt8

from zoo.common.files import Location
from zoo.data.tokenizer import Tokenizer

MANIFEST, TOKENIZER, SHARDS = "manifest.json", "tokenizer", "shards"
TOKENS, WEIGHTS, TRAIN, HELD_OUT = ".tokens", ".weights", ".train", ".held_out"
SUMS, SOURCES = ".sums", ".sources.json"
BLOCK = 2**16  # bytes
VERSION = 2
WORK = "work"  # the folder that a start after a kill goes on with

RECORD = np.dtype(
    [
        ("start", "<u8"),  # the document's first id in .tokens
        ("length", "<u4"),  # in ids
        ("end", "<u8"),  # positions of the shard's part up to and with this document
        ("hash", "V16"),  # the first bytes of the SHA-256 of the text
        ("source", "<u4"),  # index of its file in .sources.json
        ("record", "<u8"),  # line, row or record number; 0 for a text file
        ("label", "<u4"),  # index of its label in the manifest's classes
    ]
)


class DamagedError(ValueError):
    """A file of a prepared corpus has changed since it was written."""


@dataclass(frozen=True)
class PartRecord:
    """The sizes of one part of a shard, training or held out.

    A document has length + frame - 1 `positions`, and some or all of its tokens are `counted`.
    `bytes` is the size of its text in UTF-8, or of the text that counts.
    """

    documents: int
    tokens: int
    counted: int
    positions: int
    bytes: int


@dataclass(frozen=True)
class ShardRecord:
    """Sizes and digests of one shard; `.tokens` also has the ids of documents that are left out."""

    tokens_bytes: int
    train: PartRecord
    held_out: PartRecord
    sums: str
    sources: str
    weights_bytes: int | None = None
    """Bytes of the file of weights, if there is one."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the files that have sums, by suffix, in the order of these."""
        return {
            TOKENS: self.tokens_bytes,
            **({} if self.weights_bytes is None else {WEIGHTS: self.weights_bytes}),
            TRAIN: self.train.documents * RECORD.itemsize,
            HELD_OUT: self.held_out.documents * RECORD.itemsize,
        }


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared corpus.

    `options` are what it was prepared with, `tokenizer` is the digest of its files, `frame` is how
    many of begin and end a document has. Left out are the `duplicates` and the `empty` documents,
    which have no token; `first_empty` names one. `files` is the hash of the versions of the files,
    which is apart from the fingerprint: the same text prepared again is the same corpus.
    """

    options: dict[str, Any]
    tokenizer: str
    dtype: str
    vocab_size: int
    frame: int
    shards: tuple[ShardRecord, ...]
    duplicates: int = 0
    empty: int = 0
    first_empty: str | None = None
    files: str | None = dataclasses.field(default=None, compare=False)
    whole: str | None = None
    """The hash of the only document, in hexadecimal: its end is held out."""
    special_tokens: int = 0
    """Special tokens in the text, or names of them, as `options` has them read."""
    weighted: bool = False
    """Whether only some of the tokens count, as in completions."""
    form: str | None = None
    """The form of rows, in words."""
    framed: bool = False
    """Whether documents have their begin and their end among their tokens, as chats do."""
    classes: tuple[str, ...] = ()
    """The labels of documents, or the tags of tokens, sorted."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all of the content: equal ones mean equal batches."""
        return _digest(_content(self))

    @property
    def reading(self) -> Literal["parse", "text"]:
        """The reading of special tokens' names with which the corpus was prepared."""
        given = self.options.get("special_tokens", "text")
        return given or ("text" if self.framed else "parse")

    def describe_special_tokens(self, flag: str) -> str:
        """The number of special tokens, or of their names that are plain text, in words.

        `flag` says how to have them read otherwise.
        """
        if not self.special_tokens:
            return ""
        if self.reading == "parse":
            return f"{self.special_tokens:,} special tokens parsed"
        return (
            f"the text has {self.special_tokens:,} names of special tokens, read as plain "
            f"characters: {flag} parse makes tokens of them"
        )

    def total(self, part: str) -> PartRecord:
        """The sums of all shards' `train` or `held_out`."""
        parts = [dataclasses.astuple(getattr(shard, part)) for shard in self.shards]
        return PartRecord(*map(sum, zip((0,) * 5, *parts, strict=True)))


def shard_file(folder: Location, number: int, suffix: str) -> Location:
    """A file of a shard."""
    return folder / SHARDS / f"{number:08}{suffix}"


def work_file(folder: Path, number: int, suffix: str) -> Path:
    """A file of a shard that is needed until the manifest is written."""
    return folder / WORK / f"{number:08}{suffix}"


def dtype_of(vocab_size: int) -> str:
    """The dtype of the ids in `.tokens`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def check_ids(ids: Integer[np.ndarray, "_"], vocab_size: int, name: str) -> None:
    """Raise a ValueError where an id of the document of that name is outside the vocabulary."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        position = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise ValueError(
            f"token id {ids[position]} at position {position} of document {name} is outside the "
            f"vocabulary: vocab_size={vocab_size}"
        )


def block_sums(path: Path) -> bytes:
    """The xxh3_64 of each block of a file."""
    sums = bytearray()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            sums += xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
    return bytes(sums)


def tokenizer_digest(folder: Location) -> str:
    """The digest of the tokenizer's files in a folder, by which a manifest knows its tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in (path.name.encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def digest_of(tokenizer: Tokenizer) -> str:
    """The digest of the files that a tokenizer has in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return tokenizer_digest(Path(folder))


def manifest_text(manifest: Manifest) -> str:
    """The content of a manifest's file."""
    apart = {"fingerprint": manifest.fingerprint, "files": manifest.files}
    return json.dumps({**_content(manifest), **apart}, indent=1) + "\n"


def read_manifest(folder: Location) -> Manifest:
    """The manifest of a prepared corpus.

    Raises:
        FileNotFoundError: the folder has none.
        DamagedError: it is not what was written, or of a later version; or the folder's tokenizer
            is not the one of its token ids.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{folder} is no prepared corpus: it has no {MANIFEST}; `python -m zoo prepare` "
            "writes it last, and resumes after a kill"
        ) from None
    try:
        content = json.loads(text)
        sealed, files = content.pop("fingerprint"), content.pop("files", None)
        version = content["version"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DamagedError(f"{path} is damaged: it is no manifest of a prepared corpus") from None
    if sealed != _digest(content):
        raise DamagedError(
            f"{path} is damaged: its content is not what was written; put it back from a copy, or "
            "remove it and run `python -m zoo prepare` again"
        )
    if version != VERSION:
        raise DamagedError(f"{path} has version {version}, and this zoo reads version {VERSION}")
    del content["version"]
    content["shards"] = tuple(map(shard_record, content["shards"]))
    content["classes"] = tuple(content["classes"])
    manifest = Manifest(**content, files=files)
    if tokenizer_digest(folder / TOKENIZER) != manifest.tokenizer:
        raise DamagedError(
            f"{folder / TOKENIZER} is not the tokenizer that the manifest names, and its ids would "
            "mean other text; put the folder back from a copy"
        )
    return manifest


def shard_record(content: dict[str, Any]) -> ShardRecord:
    """The record of a shard, from what `dataclasses.asdict` gave."""
    parts = {part: PartRecord(**content[part]) for part in ("train", "held_out")}
    return ShardRecord(**{**content, **parts})


def _content(manifest: Manifest) -> dict[str, Any]:
    content = {"version": VERSION, **dataclasses.asdict(manifest)}
    del content["files"]
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Shard:
    """The maps of files with a common stem. Any number of threads may read them.

    `sizes` are the files' sizes by suffix; `stem.sums` has the xxh3_64 of each of their blocks,
    and `digest` is its xxh3_128. `verified`, a byte per block, is passed on where the files are
    mapped again, so that no block is hashed twice. `remedy` says in an error how to get them back.
    """

    def __init__(
        self,
        stem: Path,
        sizes: Mapping[str, int],
        digest: str,
        remedy: str,
        verified: bytearray | None = None,
    ):
        self._stem, self._sizes, self._remedy = stem, dict(sizes), remedy
        self._maps: dict[str, np.ndarray] = {}
        self._first, count = {}, 0
        for suffix, size in sizes.items():
            self._first[suffix], count = count, count - -size // BLOCK
        self._sizes[SUMS] = 8 * count
        self.verified = bytearray(count) if verified is None else verified
        sums = self._map(SUMS)
        if xxhash.xxh3_128_hexdigest(sums.data) != digest:
            raise DamagedError(f"{stem}{SUMS} is not what was written: {remedy}")
        self._sums = sums.view("<u8")

    def path(self, suffix: str) -> Path:
        """The file of that suffix."""
        return Path(f"{self._stem}{suffix}")

    def read(self, suffix: str, begin: int, end: int) -> UInt8[np.ndarray, "bytes"]:
        """Bytes [begin, end) of a file, not to be written to.

        Raises:
            DamagedError: a block of them is not what was written.
            FileNotFoundError: the file is missing.
        """
        content = self._map(suffix)
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            if not self.verified[self._first[suffix] + block]:
                self._verify(suffix, block, content[block * BLOCK : (block + 1) * BLOCK])
        return content[begin:end]

    def _verify(self, suffix: str, block: int, content: UInt8[np.ndarray, "bytes"]) -> None:
        number = self._first[suffix] + block
        if xxhash.xxh3_64_intdigest(content.data) != self._sums[number]:
            first = block * BLOCK
            raise DamagedError(
                f"{self._stem}{suffix}: block {block} (bytes {first:,} to "
                f"{first + len(content) - 1:,}) is not what was written: {self._remedy}"
            )
        self.verified[number] = 1

    def _map(self, suffix: str) -> UInt8[np.ndarray, "bytes"]:
        if suffix not in self._maps:
            path, size = self.path(suffix), self._sizes[suffix]
            check_size(path, size, self._remedy)
            # No bytes cannot be mapped.
            mapped = np.memmap(path, np.uint8, "r").view(np.ndarray) if size else np.zeros(0, "u1")
            self._maps[suffix] = mapped
        return self._maps[suffix]


def check_size(path: Path, size: int, remedy: str) -> None:
    """Raise an error where a file is missing, or has another size than was written."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {remedy}") from None
    if found != size:
        raise DamagedError(f"{path} has {found:,} bytes instead of {size:,}: {remedy}")


def write_sums(stem: Path, suffixes: Sequence[str]) -> str:
    """Write the sums of the files with a stem, and return their digest."""
    sums = b"".join(block_sums(Path(f"{stem}{suffix}")) for suffix in suffixes)
    Path(f"{stem}{SUMS}").write_bytes(sums)
    return xxhash.xxh3_128_hexdigest(sums)
