"""Sources of text, and the `Corpus` of token ids that the plans in `zoo.data` read."""

import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import sysconfig
import tempfile
import tokenize as python_tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from zoo import checksums
from zoo.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text and its name, relative to the folder it was found in."""

    name: str
    text: str


# --- Reading ----------------------------------------------------------------------------------


def read_documents(pattern: str | Sequence[str], *, field: str = "text") -> list[Document]:
    """Documents of all files that match, sorted by path, read as their suffix says.

    `pattern` is a glob, several separated by commas, or a list of them; `~` and `**` work.
    `.jsonl`: a document a line, its text in `field`; `.parquet`: a document a row, its text in the
    column `field`; `.array_record` and `.arrayrecord`: a document a record; any other file is one
    document. All text is UTF-8.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: the file's format needs an extra that is not installed.
        ValueError: the text cannot be read (the message says where), or there is none.
    """
    patterns = pattern.split(",") if isinstance(pattern, str) else pattern
    names: dict[Path, str] = {}  # a file that two patterns match is read once
    for one in patterns:
        names |= _matching_files(one.strip())
    documents: list[Document] = []
    for path, name in names.items():
        documents += _READERS.get(path.suffix, _read_text)(name, path, field)
    if not any(document.text for document in documents):
        raise ValueError(f"{pattern!r} has {len(documents)} documents and no text in them")
    return documents


def _matching_files(pattern: str) -> dict[Path, str]:
    """The names of the files that match: their paths relative to the glob's fixed folder."""
    expanded = os.path.expanduser(pattern)
    paths = sorted(map(Path, glob.glob(expanded, recursive=True)))
    files = [path for path in paths if path.is_file()]
    if not files:
        folder = f"; {pattern!r} is a folder: add '/**/*.txt' or the like" if paths else ""
        raise FileNotFoundError(f"no file matches {pattern!r} in {Path.cwd()}{folder}")
    parts = Path(expanded).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    root = Path(*parts[:fixed])
    return {path: path.relative_to(root).as_posix() for path in files}


def _decode(data: bytes, where: object) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        ) from error


def _read_text(name: str, path: Path, field: str) -> list[Document]:
    return [Document(name, _decode(path.read_bytes(), path))]


def _read_jsonl(name: str, path: Path, field: str) -> list[Document]:
    documents = []
    # Split on b"\n" alone: str.splitlines also splits at U+2028, which JSON allows in a string.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(_decode(line, where))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        documents.append(Document(f"{name}:{number}", _text_field(record, field, where)))
    return documents


def _text_field(record: object, field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object")
    if field not in record:
        raise ValueError(f"{where} has no field {field!r}: its fields are {sorted(record)}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but no text
        raise ValueError(f"{where}: lone surrogate at character {error.start}") from error
    return text


def _read_parquet(name: str, path: Path, field: str) -> list[Document]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"{path} needs the extra: pip install 'zoo[parquet]'") from error
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    columns = file.schema_arrow.names
    if field not in columns:
        raise ValueError(f"{path} has no column {field!r}: its columns are {columns}")
    texts = file.read(columns=[field]).column(field).to_pylist()
    bad = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
    if bad is not None:
        kind = type(texts[bad]).__name__
        raise ValueError(f"{path}, row {bad}: column {field!r} is a {kind}, not a string")
    return [Document(f"{name}:{row}", text) for row, text in enumerate(texts)]


def _read_array_record(name: str, path: Path, field: str) -> list[Document]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise ImportError(f"{path} needs the extra: pip install 'zoo[array-record]'") from error
    reader = ArrayRecordReader(str(path))
    if not reader.ok():
        raise ValueError(f"{path} is no ArrayRecord file")
    records = reader.read_all()
    reader.close()
    return [
        Document(f"{name}:{row}", _decode(record, f"{path}, record {row}"))
        for row, record in enumerate(records)
    ]


_READERS: dict[str, Callable[[str, Path, str], list[Document]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".array_record": _read_array_record,
    ".arrayrecord": _read_array_record,
}

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_NOT_LIBRARY |= {"pydoc_data"}  # one generated file, 6% of all bytes: help texts, no source


def standard_library() -> list[Document]:
    """The Python files of this interpreter's standard library, sorted by name.

    Without its tests and generated help texts: about 11 MB. Line breaks become "\\n", and a file
    that does not decode is left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if _NOT_LIBRARY.intersection(name.parts[:-1]):
            continue
        data = path.read_bytes()
        try:
            encoding, _ = python_tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):
            continue
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        documents.append(Document(name.as_posix(), text))
    if not documents:
        raise FileNotFoundError(
            f"this Python has no library source in {root}: give text files of your own"
        )
    return sorted(documents)


# --- Splitting and comparing ------------------------------------------------------------------


def held_out_split(
    documents: Sequence[Document], fraction: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, with about `fraction` of them held out.

    A hash of its name decides for each document, so the split is the same on every machine and a
    new document moves no other. Neither part is ever empty: with too few documents the one with
    the nearest hash changes sides. A single document is split into its head and its tail.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"held-out fraction={fraction} must lie between 0 and 1")
    if not documents:
        raise ValueError("there is no document to split")
    if len(documents) == 1:
        [(name, text)] = documents
        cut = len(text) - max(1, round(fraction * len(text)))
        if cut < 1:
            raise ValueError(f"{name} has {len(text)} characters: too few to hold any out")
        logger.warning("%s is the only document: its last %.0f%% is held out", name, 100 * fraction)
        return [Document(name, text[:cut])], [Document(name, text[cut:])]
    hashes = [_unit_hash(document.name) for document in documents]
    # With duplicated names both ends can tie, and then the order decides.
    order = sorted(range(len(documents)), key=hashes.__getitem__)
    held = {i for i in order[:-1] if hashes[i] < fraction} | {order[0]}
    return (
        [document for i, document in enumerate(documents) if i not in held],
        [document for i, document in enumerate(documents) if i in held],
    )


def _unit_hash(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def compressed_size(documents: Sequence[Document], method: Literal["gzip", "xz"]) -> int:
    """Bytes of the documents compressed one by one by `gzip -9` or `xz -9`."""
    compress = {
        "gzip": lambda data: gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lambda data: lzma.compress(data, preset=9),
    }[method]
    return sum(len(compress(document.text.encode())) for document in documents)


# --- Tokens -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of all documents end to end, without separators.

    `tokens` comes in any integer dtype and is kept in the smallest unsigned one. Document i is
    `tokens[offsets[i]:offsets[i + 1]]`, or `corpus[i]`. `num_bytes` is the size of the text in
    UTF-8, for bits per byte. Names are for messages.

    Raises:
        ValueError: there is no token, the offsets do not fit, or a token is outside the vocabulary.
    """

    tokens: Integer[np.ndarray, "num_tokens"]
    offsets: Int64[np.ndarray, "num_offsets"]
    num_bytes: int
    vocab_size: int
    names: Sequence[str] | None = None

    def __post_init__(self):
        if len(self.tokens) == 0:
            raise ValueError("the corpus is empty: it has no tokens")
        ends = (self.offsets[0], self.offsets[-1])
        if ends != (0, len(self.tokens)) or np.any(np.diff(self.offsets) < 0):
            raise ValueError(
                f"offsets must rise from 0 to {len(self.tokens)}, the number of tokens; they go "
                f"from {ends[0]} to {ends[1]}"
            )
        if self.tokens.max() >= self.vocab_size or self.tokens.min() < 0:
            wrong = (self.tokens < 0) | (self.tokens >= self.vocab_size)
            position = int(np.argmax(wrong))
            document = int(np.searchsorted(self.offsets, position, side="right")) - 1
            raise ValueError(
                f"token id {self.tokens[position]} at position "
                f"{position - self.offsets[document]} of document {self.name(document)} is outside "
                f"the vocabulary: vocab_size={self.vocab_size}"
            )
        dtype = np.min_scalar_type(self.vocab_size - 1)
        object.__setattr__(self, "tokens", self.tokens.astype(dtype, copy=False))

    @classmethod
    def from_arrays(
        cls,
        documents: Sequence[Integer[np.ndarray, "_"]],
        vocab_size: int,
        num_bytes: int,
        names: Sequence[str] | None = None,
    ) -> "Corpus":
        """A corpus of one array of ids a document."""
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
        return cls(tokens, offsets, num_bytes, vocab_size, names)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Integer[np.ndarray, "length"]:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def name(self, i: int) -> str:
        """The name of document i, or its number."""
        return str(i) if self.names is None else repr(self.names[i])


def tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer, cache_folder: Path | None = None
) -> Corpus:
    """The corpus of the documents; kept in, and next time read from, a cache if there is a folder.

    The key of the cache is a hash of the tokenizer and of all names and texts. Any number of
    processes may share the folder. A damaged entry is made anew, with a warning.
    """
    if cache_folder is None:
        return _tokenize(documents, tokenizer)
    entry = Path(cache_folder).expanduser() / _cache_key(documents, tokenizer)
    if (cached := _read_entry(entry)) is not None:
        return cached
    corpus = _tokenize(documents, tokenizer)
    _write_entry(entry, corpus)
    cached = _read_entry(entry)  # memory-mapped, unlike what it was written from
    return corpus if cached is None else cached


def _tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    arrays: list[np.ndarray] = []
    for start in range(0, len(documents), 1024):  # bounds the memory of the encodings
        arrays += tokenizer.encode_batch([d.text for d in documents[start : start + 1024]])
    num_bytes = sum(len(document.text.encode()) for document in documents)
    names = [document.name for document in documents]
    return Corpus.from_arrays(arrays, tokenizer.vocab_size, num_bytes, names)


def _cache_key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()

    def add(part: bytes) -> None:  # with its length, so that no two lists of parts hash alike
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for file in sorted(Path(folder).iterdir()):
            add(file.read_bytes())
    for document in documents:
        add(document.name.encode())
        add(document.text.encode())
    return digest.hexdigest()


def _read_entry(entry: Path) -> Corpus | None:
    """The corpus of a cache entry, memory-mapped; None if there is none, or a damaged one."""
    if not entry.exists():
        return None
    if problems := checksums.problems(entry):
        logger.warning("the cached corpus %s is made anew: %s", entry, "; ".join(problems))
        return None
    try:
        return Corpus(
            tokens=np.load(entry / "tokens.npy", mmap_mode="r"),
            offsets=np.load(entry / "offsets.npy"),
            **json.loads((entry / "corpus.json").read_text()),
        )
    except FileNotFoundError:  # another process has just moved it away
        return None


def _write_entry(entry: Path, corpus: Corpus) -> None:
    """Put a cache entry in place by a rename, so that no process ever sees half of one."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".partial-") as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        new.mkdir()
        np.save(new / "tokens.npy", corpus.tokens)
        np.save(new / "offsets.npy", corpus.offsets)
        fields = ("num_bytes", "vocab_size", "names")
        (new / "corpus.json").write_text(json.dumps({f: getattr(corpus, f) for f in fields}))
        checksums.write(new)
        with contextlib.suppress(OSError):  # another process may be doing the same
            if entry.exists() and checksums.problems(entry):
                entry.rename(old)
            new.rename(entry)  # refused where another process was faster
