"""The first pass over a corpus: a split of its text becomes the token ids of a shard."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from zoo.common import files
from zoo.data import letters
from zoo.data.chats import ChatTemplate, Part
from zoo.data.documents import functions_of
from zoo.data.formats import SourceDocument, read_split
from zoo.data.prepared import format, hashes
from zoo.data.rows import Counted, Form, RowOptions, encode_parts, mismatched, read_rows
from zoo.data.special_tokens import AS_TEXT
from zoo.data.splits import Given, Split
from zoo.data.tags import encode_tags
from zoo.data.tokenizer import BPETokenizer, Reading, Tokenizer, load_tokenizer, reading, unframed

BATCH = 2**20  # characters that are tokenized at a time
PIECE = 2**22  # of one document
CONTEXT = 2**10  # around a piece, so that its ends have the tokens that they have in the whole
DONE = ".json"


@dataclass(frozen=True)
class Spec:
    """The options on which the content of a shard depends, beside its split."""

    tokenizer: str
    """Digest of the files in `tokenizer/`."""
    field: str
    special_tokens: Reading | None = "text"
    """If not given, text for chats, and parse for rows of texts."""
    functions: int | None = None
    """A document is a function; functions of files with a hash below this are held out."""
    cut: int | None = None
    """Characters of the only document that are trained on; the rest is held out."""
    label: str | None = None
    """The field of a document's label."""
    rows: RowOptions | None = None
    """How rows of a format become examples."""


@dataclass
class Tokenized:
    """The record of a split whose shard is whole: it is not tokenized again.

    `documents` have a token and are no `duplicates` of others of the shard; `tokens` are all in
    the file. `labels` have their numbers in the records.
    """

    split: str
    spec: Spec
    documents: int = 0
    duplicates: int = 0
    empty: int = 0
    first_empty: str | None = None
    tokens: int = 0
    special_tokens: int = 0
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    form: str | None = None
    """The form of rows, in words."""
    framed: bool = False


def prepare_shard(
    split: Split | Given, number: int, spec: Spec, folder: Path
) -> tuple[int, Tokenized]:
    """Write the `.tokens` of a split in `folder`, and the records of its documents.

    Returns the shard's number, and what became of the split. A pure function of its split: a shard
    that is finished is left as it is, and one that is not is begun anew. Memory does not grow with
    the split, but with its longest document.
    """
    if (done := finished(split, number, spec, folder)) is not None:
        return number, done
    tokenizer = _tokenizer(folder, spec.tokenizer)
    kinds = (format.TOKENS, format.WEIGHTS, ".runs", ".raw")
    tokens, weights, runs, records = (_partial(folder, number, kind) for kind in kinds)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.named(tokens))
        opened = [stack.enter_context(open(path, "wb")) for path in (tokens, weights, runs)]
        writer = _Writer(split, spec, tokenizer, *opened)
        for batch in _batches(_examples(split, spec, tokenizer)):
            writer.add(batch)
        writer.end_run()
    done, documents = writer.done, _merge(runs, writer.runs, records)
    done.documents, done.duplicates = documents, done.documents - documents
    sums = format.block_sums(tokens)
    if spec.rows is None:
        weights.unlink()
    else:
        sums += format.block_sums(weights)
        _finish(weights, format.shard_file(folder, number, format.WEIGHTS))
    files.replace(format.work_file(folder, number, format.SUMS), sums)
    files.replace(format.shard_file(folder, number, format.SOURCES), json.dumps(split.names))
    _finish(records, format.work_file(folder, number, hashes.RECORDS))
    _finish(tokens, format.shard_file(folder, number, format.TOKENS))
    files.replace(format.work_file(folder, number, DONE), json.dumps(dataclasses.asdict(done)))
    return number, done


def finished(split: Split | Given, number: int, spec: Spec, folder: Path) -> Tokenized | None:
    """The record of a split if its shard is whole, else None."""
    try:
        content = json.loads(format.work_file(folder, number, DONE).read_text())
        done = Tokenized(**{**content, "spec": Spec(**content["spec"])})
        sizes = [
            format.shard_file(folder, number, format.TOKENS).stat().st_size,
            format.work_file(folder, number, hashes.RECORDS).stat().st_size,
        ]
    except (FileNotFoundError, ValueError, TypeError, LookupError):
        return None
    dtype = np.dtype(format.dtype_of(_tokenizer(folder, spec.tokenizer).vocab_size))
    wanted = [done.tokens * dtype.itemsize, done.documents * hashes.RAW.itemsize]
    return done if (done.split, done.spec, sizes) == (split.version, spec, wanted) else None


def key_of(split: Split | Given, document: SourceDocument) -> bytes:
    """The text of a document, or the name of a given one: its hash says whether it is held out."""
    if isinstance(split, Given):
        return source_name(split.names[document.source], document.record).encode()
    return document.text.encode()


class _Example(NamedTuple):
    """A document, or an example of a row, in parts of which some count, with its hash."""

    document: SourceDocument
    parts: list[Part]
    hashed: bytes
    part: int = hashes.BY_HASH
    form: Form | None = None


def _examples(split: Split | Given, spec: Spec, tokenizer: Tokenizer) -> Iterator[_Example]:
    if spec.rows is not None:
        assert isinstance(split, Split)
        now = None if spec.rows["now"] is None else datetime.fromisoformat(spec.rows["now"])
        make = functools.partial(ChatTemplate, tokenizer, now, spec.special_tokens or "text")
        found = read_rows(split, spec.rows["format"], make, spec.rows["names"])
        for row in mismatched(found) if spec.rows["format"] == "unpaired" else found:
            labels = [] if row.label is None else [row.label]
            content = json.dumps([*row.examples, *labels]).encode()
            for number, parts in enumerate(row.examples):
                text = "".join(text for text, _ in parts)
                hashed = hashes.hash_of(content, number.to_bytes(4, "big"))
                document = SourceDocument(row.source, row.record, text, row.label)
                yield _Example(document, parts, hashed, form=row.form)
        return
    for document, part in _documents(split, spec):
        label = document.label
        of_label = None if label is None else hashes.hash_of(label.encode())[:4]
        hashed = hashes.hash_of(key_of(split, document), of_label)
        yield _Example(document, [(document.text, True)], hashed, part)


def _documents(split: Split | Given, spec: Spec) -> Iterator[tuple[SourceDocument, int]]:
    """The documents, each with the part that it is in."""
    for document in read_split(split, spec.field, spec.label):
        if spec.cut is not None:
            head, tail = document.text[: spec.cut], document.text[spec.cut :]
            yield document._replace(text=head), hashes.NEVER_HELD_OUT
            yield document._replace(text=tail), hashes.ALWAYS_HELD_OUT
        elif spec.functions is not None:
            held_out = hashes.number_of_key(key_of(split, document)) < spec.functions
            part = hashes.ALWAYS_HELD_OUT if held_out else hashes.NEVER_HELD_OUT
            for line, text in functions_of(split.names[document.source], document.text):
                yield document._replace(record=line, text=text), part
        else:
            yield document, hashes.BY_HASH


class _Writer:
    """Examples to ids and their weights in two files, and to their records in runs in a third."""

    def __init__(
        self,
        split: Split | Given,
        spec: Spec,
        tokenizer: Tokenizer,
        tokens: BinaryIO,
        weights: BinaryIO,
        runs: BinaryIO,
    ):
        self._names, self._spec = split.names, spec
        self._keeps_empty = isinstance(split, Given) or spec.rows is not None
        self._tokenizer = reading(tokenizer, spec.special_tokens or "parse")
        self._token_file, self._weights_file, self._run_file = tokens, weights, runs
        self._dtype = np.dtype(format.dtype_of(tokenizer.vocab_size)).newbyteorder("<")
        self._pending: list[tuple[int, ...]] = []
        self.runs: list[int] = []  # their lengths
        self.done = Tokenized(split.version, spec)

    def add(self, batch: list[_Example]) -> None:
        done = self.done
        if (form := batch[0].form) is not None:
            done.form, done.framed = form.described, form.is_chat
        quoted = done.framed and self._spec.special_tokens != "parse"
        for example, (ids, counted) in zip(batch, self._encoded(batch), strict=True):
            document = example.document
            name = source_name(self._names[document.source], document.record)
            if len(ids) == 0 and not self._keeps_empty:
                done.empty += 1
                done.first_empty = done.first_empty or name
                continue
            format.check_ids(ids, self._tokenizer.vocab_size, repr(name))
            if getattr(self._tokenizer, "is_of_letters", False):
                letters.check_known(self._tokenizer, document.text, ids, name)
            done.special_tokens += count_special(self._tokenizer, document.text, ids, quoted)
            label = 0
            if document.label is not None:
                label = done.labels.setdefault(document.label, len(done.labels))
            halves = np.frombuffer(example.hashed, hashes.HASH)[0].item()
            place = (done.tokens, len(ids), document.source, document.record)
            sizes = (counted_bytes(example.parts), int(np.count_nonzero(counted)))
            self._pending.append((*halves, *place, *sizes, label, example.part))
            self._token_file.write(np.ascontiguousarray(ids, self._dtype).data)
            if self._spec.rows is not None:
                self._weights_file.write(counted.astype(np.uint8).data)
            done.documents += 1
            done.tokens += len(ids)
        if len(self._pending) >= hashes.SLICE // 4:  # tuples are large
            self.end_run()

    def _encoded(self, batch: list[_Example]) -> Iterator[Counted]:
        if (rows := self._spec.rows) is not None:
            for example in batch:
                if rows["format"] == "tags":
                    yield encode_tags(self._tokenizer, example.parts, rows["classes"])
                else:
                    yield encode_parts(self._tokenizer, example.parts, is_chat=self.done.framed)
            return
        for ids in encode(self._tokenizer, [example.document.text for example in batch]):
            inner = ids[unframed(self._tokenizer, ids)]
            yield inner, np.ones(len(inner), bool)

    def end_run(self) -> None:
        run = hashes.in_order(np.array(self._pending, hashes.RAW))
        self._run_file.write(run.tobytes())
        self.runs.append(len(run))
        self._pending.clear()


def count_special(tokenizer: Tokenizer, text: str, ids: np.ndarray, quoted: bool) -> int:
    """The number of special tokens in a text's ids, or of names that are plain characters in it.

    In `quoted` texts, where `AS_TEXT` follows such names, these are counted.
    """
    if not isinstance(tokenizer, BPETokenizer):
        return 0
    if tokenizer.special_tokens == "parse" and not quoted:
        return int(np.isin(ids, list(tokenizer.special_ids)).sum())
    pattern = tokenizer.marked if quoted else tokenizer.names
    return sum(1 for name in pattern.findall(text) if name)


def counted_bytes(parts: list[Part]) -> int:
    """The size in UTF-8 of the parts that count."""
    return sum(len(text.replace(AS_TEXT, "").encode()) for text, counts in parts if counts)


def encode(tokenizer: Tokenizer, texts: list[str], longest: int = PIECE) -> Iterator[np.ndarray]:
    """The ids of each text; one of more than `longest` characters in pieces of whole lines.

    What a tokenizer holds while it works is a hundred times a text's size. A piece is tokenized
    with the text around it, and its ids are cut out.
    """
    if all(len(text) <= longest for text in texts):
        yield from tokenizer.encode_batch(texts)
        return
    for text in texts:
        begin, ids = 0, [np.zeros(0, np.int32)]
        while begin < len(text):
            end = begin + longest
            if end < len(text):
                end = text.rfind("\n", begin, end) + 1 or end
            found, begin = _encode_piece(tokenizer, text, begin, end)
            ids.append(found)
        yield np.concatenate(ids)


def _encode_piece(tokenizer: Tokenizer, text: str, begin: int, end: int) -> tuple[np.ndarray, int]:
    """The ids of a piece, and where the next one begins: behind the last token that begins in it.

    In a long run of one letter tokens may begin elsewhere after the text before the piece than they
    did in the piece before: then the piece is tokenized without that text.
    """
    for first in (max(0, begin - CONTEXT), begin):
        inside = first == begin > 0
        ids, spans = tokenizer.encode_spans(text[first : end + CONTEXT], inside=inside)
        starts, stops = first + spans.T
        if not np.any((starts < begin) & (begin < stops)):
            break
    kept = (starts >= begin) & ((starts < end) | (end >= len(text)))
    return ids[kept], int(stops[kept].max(initial=end))


def _merge(runs: Path, lengths: list[int], out: Path) -> int:
    """Write the records of all runs in order; their number."""
    content, ends = hashes.mapped(runs, hashes.RAW), np.cumsum([0, *lengths])
    parts = [content[begin:end] for begin, end in itertools.pairwise(ends)]
    with files.named(out), open(out, "wb") as file:
        for records in hashes.merged(parts):
            file.write(records.tobytes())
    runs.unlink()
    return len(hashes.mapped(out, hashes.RAW))


def _batches(examples: Iterable[_Example]) -> Iterator[list[_Example]]:
    batch, size = [], 0
    for example in examples:
        batch.append(example)
        size += len(example.document.text) + 256  # of itself
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def source_name(file: str, record: int) -> str:
    """The name of a document: its file and, in a file of several, its line, row or record."""
    return f"{file}:{record}" if record else file


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path, digest: str) -> Tokenizer:  # a digest has one tokenizer
    return load_tokenizer(folder / format.TOKENIZER)


def _partial(folder: Path, number: int, suffix: str) -> Path:
    # With the process: one that is just being killed may still be writing.
    return format.work_file(folder, number, f"{suffix}.{os.getpid()}.partial")


def _finish(partial: Path, final: Path) -> None:
    files.sync(partial)
    os.replace(partial, final)
    files.sync(final.parent)
