"""The `Corpus`: token ids of documents on disk and their records, in memory-mapped shards."""

import bisect
import copy
import functools
import itertools
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, UInt8

from zoo.data.prepared import format, hashes
from zoo.data.prepared.format import RECORD, SOURCES, TOKENS, WEIGHTS, Manifest, Shard

OPEN_SHARDS = 32
_AHEAD = 128  # records read at a time: a fraction of a block
_SLICE = 2**15  # documents


class Piece(NamedTuple):
    """Positions [start, stop) of a document between its begin and its end."""

    document: int
    start: int
    stop: int


class Place(NamedTuple):
    """A position of a corpus: a document, and the position in it."""

    document: int
    offset: int


class Corpus:
    """The training or the held-out documents, in the order in which they are stored.

    A document has length + frame - 1 positions, or none, where `frame` is how many tokens, begin
    and end, are put around it; `framed` documents have both among their tokens, as chats do. Of
    `weighted` documents, such as completions, only some tokens count in a loss and in `num_bytes`,
    the size of the text in UTF-8. `opened(number)` is a shard; a document is read from the shard's
    files when it is asked for, and nothing is kept.

    Raises:
        DamagedError: a file that is read has changed since it was written.
    """

    limit = ""  # in words, of the first documents of a corpus

    num_positions: int
    """Positions of all documents."""

    def __init__(self, manifest: Manifest, part: str, opened: Callable[[int], Shard]):
        self.opened, self._suffix, self._whole = opened, f".{part}", manifest.whole
        stored = [getattr(shard, part) for shard in manifest.shards]
        self._documents = _rising([record.documents for record in stored])
        self._positions = _rising([record.positions for record in stored])
        self._ends: list[np.ndarray] | None = None  # of documents, in another frame than is stored
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.vocab_size, self.frame = manifest.vocab_size, manifest.frame
        self.framed, self.weighted = manifest.framed, manifest.weighted
        self.num_tokens = sum(record.tokens for record in stored)
        self.num_counted = sum(record.counted for record in stored)
        self.num_bytes = sum(record.bytes for record in stored)
        self.num_positions = int(self._positions[-1])
        self.fingerprint = f"{manifest.fingerprint} {part}"

    @classmethod
    def from_arrays(
        cls,
        documents: Sequence[Integer[np.ndarray, "_"]],
        vocab_size: int,
        num_bytes: int,
        names: Sequence[str] | None = None,
        counts: Sequence[Bool[np.ndarray, "_"]] | None = None,
        framed: bool = False,
    ) -> "Corpus":
        """A corpus of one array of ids per document, in a temporary folder that goes with it.

        `counts`, if given, are True for the tokens that count; `names` are for messages.

        Raises:
            ValueError: there is no token, or a token is outside the vocabulary.
        """
        if not any(map(len, documents)):
            raise ValueError("the corpus is empty: it has no tokens")
        for i, ids in enumerate(documents):
            name = str(i) if names is None else repr(names[i])
            format.check_ids(ids, vocab_size, name)
        folder = Path(tempfile.mkdtemp(prefix="zoo-corpus-"))
        dtype = format.dtype_of(vocab_size)
        columns = {TOKENS: np.concatenate(documents).astype(f"<{np.dtype(dtype).str[1:]}")}
        if counts is not None:
            columns[WEIGHTS] = np.concatenate(counts).astype(np.uint8)
        raw = np.zeros(len(documents), hashes.RAW)
        raw["length"] = [len(ids) for ids in documents]
        raw["counted"] = raw["length"] if counts is None else [x.sum() for x in counts]
        raw["start"] = np.cumsum(raw["length"], dtype=np.int64) - raw["length"]
        raw["low"] = raw["record"] = np.arange(len(documents))  # as the order has no other reason
        if names is not None:
            raw["source"], raw["record"] = raw["record"], 0
        raw["part"] = hashes.NEVER_HELD_OUT
        frame = 0 if framed else 2
        hashes.write_columns(folder, columns, raw, [] if names is None else [*names])
        _, shard = hashes.write_parts(0, 0, 0, frame, frozenset(), (), folder)
        manifest = Manifest(
            options={},
            tokenizer="",
            dtype=dtype,
            vocab_size=vocab_size,
            frame=frame,
            shards=(shard,),
            framed=framed,
            weighted=counts is not None,
        )
        corpus, _ = parts_of(manifest, functools.partial(format.shard_file, folder, suffix=""))
        corpus.num_bytes = num_bytes
        weakref.finalize(corpus.opened, shutil.rmtree, folder, ignore_errors=True)
        return corpus

    def with_frame(self, frame: int) -> "Corpus":
        """The same documents in another `frame`."""
        if frame == self.frame:
            return self
        other = copy.copy(self)
        lengths = [self._column(shard, "length") for shard in range(len(self._documents) - 1)]
        other._ends = [np.cumsum(np.maximum(x.astype(np.int64) + frame - 1, 0)) for x in lengths]
        other._positions = _rising([int(ends[-1]) if len(ends) else 0 for ends in other._ends])
        other.frame, other.num_positions = frame, int(other._positions[-1])
        return other

    def first(self, documents: int | None = None, tokens: float | None = None) -> "Corpus":
        """The first `documents`, or the documents of the first `tokens`; at least one.

        They come in the order of the shards and, within a shard, of their hashes. The bytes of
        their text are in proportion to their tokens.
        """
        count = len(self) if documents is None else min(documents, len(self))
        if tokens is not None:
            count = min(count, max(1, self._documents_of(tokens)))
        if count == len(self):
            return self
        part = copy.copy(self)
        part.num_positions = self._positions_before(count)
        part.num_tokens = part.num_positions - count * (self.frame - 1)
        part.num_bytes = round(self.num_bytes * part.num_tokens / self.num_tokens)
        part._documents = np.minimum(self._documents, count)
        part._positions = np.minimum(self._positions, part.num_positions)
        part.limit = f" first {count}"
        part.fingerprint = f"{self.fingerprint}{part.limit}"
        return part

    def _documents_of(self, tokens: float) -> int:
        """How many of the first documents have at most `tokens` tokens; reads one shard at most."""
        ends = self._positions - self._documents * (self.frame - 1)
        shard = int(np.searchsorted(ends, tokens, side="right")) - 1
        if shard == len(ends) - 1:
            return len(self)
        first, last = self._documents[shard : shard + 2].tolist()
        tokens_of = lambda i: self._positions_before(i) - i * (self.frame - 1)  # noqa: E731
        return first + bisect.bisect_right(range(first + 1, last), tokens, key=tokens_of)

    def _positions_before(self, i: int) -> int:
        """Positions of the documents before that one."""
        shard, number = self._shard_of(i)
        return int(self._positions[shard]) + self._end_before(shard, number)

    def __len__(self) -> int:
        return int(self._documents[-1])

    def __getitem__(self, i: int) -> Integer[np.ndarray, "length"]:
        return self.ids(i, 0, 2**62)

    def ids(self, i: int, start: int, stop: int) -> Integer[np.ndarray, "part"]:
        """Ids [start, stop) of document i, as far as it has them."""
        shard, number = self._shard_of(i)
        record = self._records(shard, number, number + 1)[0]
        first, stop = int(record["start"]), min(stop, int(record["length"]))
        begin, end = (self._dtype.itemsize * (first + id) for id in (min(start, stop), stop))
        return self.opened(shard).read(TOKENS, begin, end).view(self._dtype)

    def counted(self, i: int) -> Bool[np.ndarray, "length"] | None:
        """Which tokens of document i count; None: all."""
        return self.codes(i) > 0 if self.weighted else None

    def codes(self, i: int) -> UInt8[np.ndarray, "length"]:
        """0 for tokens of document i that do not count; with tags, 1 + the number of the tag."""
        shard, number = self._shard_of(i)
        record = self._records(shard, number, number + 1)[0]
        start, length = int(record["start"]), int(record["length"])
        return self.opened(shard).read(WEIGHTS, start, start + length)

    def labels(self) -> Int32[np.ndarray, "documents"]:
        """The label of each document."""
        shards = range(len(self._documents) - 1)
        return np.concatenate([self._column(shard, "label") for shard in shards]).astype(np.int32)

    def name(self, i: int) -> str:
        """The file of document i and, in a file of several, its line, row or record."""
        shard, number = self._shard_of(i)
        record = self._records(shard, number, number + 1)[0]
        names = json.loads(self.opened(shard).path(SOURCES).read_text())
        if not names:
            return str(record["record"])
        name = names[record["source"]]
        return repr(f"{name}:{record['record']}" if record["record"] else name)

    def hashes(self, begin: int, end: int) -> np.ndarray:
        """The hashes in [begin, end) of its documents' texts, one shard after the other.

        Where a part is the end of the only document, both parts have that document's hash.
        """
        if self._whole is not None:
            kept = begin <= int(self._whole, 16) < end
            return np.frombuffer(bytes.fromhex(self._whole) * kept, hashes.HASH)
        found = [np.zeros(0, "V16")]
        for shard, (first, last) in enumerate(itertools.pairwise(self._documents.tolist())):
            hash_at = lambda i: int.from_bytes(self._records(shard, i, i + 1)["hash"].tobytes())  # noqa: B023, E731
            documents = range(last - first)
            bounds = (bisect.bisect_left(documents, bound, key=hash_at) for bound in (begin, end))
            found.append(self._records(shard, *bounds)["hash"])
        return np.concatenate(found).view(hashes.HASH)  # as HASH it would turn native

    def positions(self, begin: int, end: int) -> Int64[np.ndarray, "documents"]:
        """The positions of each of the documents [begin, end), which are of one shard."""
        shard, first = self._shard_of(begin)
        before = self._end_before(shard, first)
        if self._ends is None:
            ends = self._records(shard, first, first + end - begin)["end"].astype(np.int64)
        else:
            ends = self._ends[shard][first : first + end - begin]
        return np.diff(ends, prepend=before)

    def slices(self, size: int = _SLICE) -> Iterator[range]:
        """All documents in ranges of at most `size`, each of one shard."""
        for begin, end in itertools.pairwise(self._documents.tolist()):
            for first in range(begin, end, size):
                yield range(first, min(first + size, end))

    def locate(self, position: int) -> Place:
        """The document that a position is in, and where in it."""
        if not 0 <= position < self.num_positions:
            raise IndexError(f"position {position} of {self.num_positions}")
        shard = int(np.searchsorted(self._positions, position, side="right")) - 1
        inside = position - int(self._positions[shard])
        count = int(self._documents[shard + 1] - self._documents[shard])
        end_of = lambda i: self._end_before(shard, i + 1)  # noqa: E731
        number = bisect.bisect_right(range(count), inside, key=end_of)
        offset = inside - self._end_before(shard, number)
        return Place(int(self._documents[shard]) + number, offset)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The pieces of documents that positions [begin, end) consist of, in order."""
        document, start = self.locate(begin)
        pieces, left = [], end - begin
        while left:
            last = int(self._documents[self._shard_of(document)[0] + 1])
            for length in self.positions(document, min(document + _AHEAD, last)).tolist():
                if taken := min(length - start, left):
                    pieces.append(Piece(document, start, start + taken))
                left, start, document = left - taken, 0, document + 1
                if not left:
                    break
        return pieces

    def _shard_of(self, i: int) -> tuple[int, int]:
        """(the shard of document i, its number there)."""
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        shard = int(np.searchsorted(self._documents, i, side="right")) - 1
        return shard, i - int(self._documents[shard])

    def _records(self, shard: int, begin: int, end: int) -> np.ndarray:
        size = RECORD.itemsize
        return self.opened(shard).read(self._suffix, begin * size, end * size).view(RECORD)

    def _column(self, shard: int, field: str) -> np.ndarray:
        count = int(self._documents[shard + 1] - self._documents[shard])
        return self._records(shard, 0, count)[field]

    def _end_before(self, shard: int, number: int) -> int:
        """Positions of the documents of a shard before that number."""
        if self._ends is not None:
            return int(self._ends[shard][number - 1]) if number else 0
        return int(self._records(shard, number - 1, number)["end"][0]) if number else 0


def parts_of(manifest: Manifest, stem_of: Callable[[int], Path]) -> tuple[Corpus, Corpus]:
    """The training and the held-out documents; they share the open shards.

    `stem_of(number)` is the path of a shard's files without their suffixes.
    """
    verified: dict[int, bytearray] = {}

    @functools.lru_cache(maxsize=OPEN_SHARDS)
    def opened(number: int) -> Shard:
        record, stem = manifest.shards[number], stem_of(number)
        shard = Shard(stem, record.sizes, record.sums, remedy(stem), verified.get(number))
        verified[number] = shard.verified
        return shard

    return Corpus(manifest, "train", opened), Corpus(manifest, "held_out", opened)


def _rising(counts: list[int]) -> Int64[np.ndarray, "ends"]:
    return np.cumsum([0, *counts], dtype=np.int64)


def remedy(stem: Path) -> str:
    """How to get the files of a shard back."""
    if stem.parent.name != format.SHARDS:
        return f"remove {stem.parent}, which is copied again"
    return (
        f"put {stem.name}.* back from a copy, or remove {stem.parent.parent} and run `python -m "
        "zoo prepare` again"
    )
