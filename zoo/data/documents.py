"""Documents: the texts of files, of records with fields, and of Python's standard library."""

import ast
import gzip
import hashlib
import io
import logging
import lzma
import os
import sysconfig
import textwrap
import tokenize as python_tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zoo.data.prepared.hashes import hash_of, limit_between
from zoo.data.sources.formats import FORMATS, TEXT, format_of
from zoo.data.sources.readers import Fields, field_of, text_of
from zoo.data.sources.splits import files_of

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text, its name (relative to the folder it was found in) and, optionally, its label."""

    name: str
    text: str
    label: str | None = None


def read_documents(
    pattern: str | Sequence[str], *, field: str = "text", label: str | None = None
) -> list[Document]:
    """The documents of all matching files, sorted by path; a file's suffix names its format.

    `pattern` is a glob, several separated by commas, or a list of globs; `~` and `**` work.
    `.jsonl`, `.json` (an array), `.csv` (its first line names the columns) and `.parquet`: one
    document per line, element or row, its text in `field` and, if `label` is given, its label in
    that field; `.array_record` and `.arrayrecord`: one document per record; any other file is one
    document. `.gz` and `.zst` may follow `.jsonl`, `.json`, `.csv` and the suffixes of text. All
    text is UTF-8.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: the file's format needs an extra that is not installed.
        ValueError: the text cannot be read (the message names the place), or is empty.
    """
    fields = Fields(field, label)
    documents: list[Document] = []
    for file in files_of(pattern):
        format = format_of(file.path)
        if label is not None and not format.fields:
            labelled = ", ".join(suffix for suffix, one in FORMATS.items() if one.fields)
            raise ValueError(
                f"{file.path} has no field {label!r}: labels come from {labelled} files"
            )
        documents += [
            _document(
                file.name if format is TEXT else f"{file.name}:{number}", where, record, fields
            )
            for number, where, record in format.read(file, fields)
        ]
    if not any(document.text for document in documents):
        raise ValueError(f"{pattern!r} has {len(documents)} documents and no text in them")
    return documents


def read_records(pattern: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, location, record) of each record of the matching files with fields.

    Those are JSON lines, JSON arrays, CSV and Parquet.

    Raises:
        FileNotFoundError, ImportError, ValueError: as `read_documents`, or a file has no fields.
    """
    records = []
    for file in files_of(pattern):
        format = format_of(file.path)
        if not format.fields:
            known = ", ".join(suffix for suffix, other in FORMATS.items() if other.fields)
            raise ValueError(f"{file.path} has no fields: rows are read from {known} files")
        for number, where, record in format.read(file):
            records.append((f"{file.name}:{number}", where, record))
    return records


def _document(name: str, where: str, record: dict[str, Any], fields: Fields) -> Document:
    text, label = text_of(record, where, fields.text), None
    if fields.label is not None:
        label = field_of(record, where, fields.label)
        if not isinstance(label, str | int) or label == "":
            raise ValueError(
                f"{where}: field {fields.label!r} is {label!r}: a label is a string or an integer"
            )
    return Document(name, text, None if label is None else str(label))


_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_NOT_LIBRARY |= {"pydoc_data"}  # one generated file of help texts, 6% of all bytes


def standard_library() -> list[Document]:
    """The Python files of this interpreter's standard library, sorted by name.

    Its tests and generated help texts are left out, which leaves about 11 MB. Line breaks become
    "\\n"; a file that cannot be decoded is skipped.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in _python_files(root):
        name = path.relative_to(root)
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


def _python_files(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]  # site-packages is large
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def help_topics() -> list[Document]:
    """Python's help texts on topics such as "assignment": 0.5 MB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "this Python has no help texts (pydoc_data.topics): give text files of your own"
        ) from error
    return [Document(name, text) for name, text in sorted(topics.items())]


def functions(documents: Sequence[Document]) -> list[Document]:
    """Each function of the Python files among the documents as a document of its own.

    These are top-level functions and methods with their decorators and inner functions, dedented.
    A document that this version of Python cannot parse stays as it is.
    """
    return [
        Document(f"{document.name}:{line}" if line else document.name, text, document.label)
        for document in documents
        for line, text in functions_of(document.name, document.text)
    ]


def functions_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each function of a file; of what is no Python (0, all of it)."""
    try:
        tree = ast.parse(text) if name.endswith(".py") else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        yield 0, text
        return
    lines = io.StringIO(text, newline=None).readlines()  # as the parser counts them

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                yield first, textwrap.dedent("".join(lines[first - 1 : child.end_lineno]))
            else:
                yield from visit(child)

    yield from visit(tree)


def held_out_split(
    documents: Sequence[Document],
    fraction: float = 0.05,
    *,
    by: Literal["text", "name"] = "text",
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, about `fraction` of them held out.

    A hash of a document's text decides its part, as in a prepared corpus: copies are in one part,
    the split is the same on every machine, and a new document moves no other. It is the hash of
    its name for the built-in text, whose names differ. Neither part is ever empty: with too few
    documents, the one with the nearest hash changes parts. One text alone is split into its head
    and its tail.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"held-out fraction={fraction} must lie between 0 and 1")
    if not documents:
        raise ValueError("there is no document to split")
    keys = [document.text if by == "text" else document.name for document in documents]
    numbers = [int.from_bytes(hash_of(key.encode()), "big") for key in keys]
    if min(numbers) == max(numbers):
        name, text, label = documents[0]
        cut = len(text) - max(1, round(fraction * len(text)))
        if cut < 1:
            raise ValueError(f"{name} has {len(text)} characters: too few to hold any out")
        logger.warning("%s is the only document: its last %.0f%% is held out", name, 100 * fraction)
        return [Document(name, text[:cut], label)], [Document(name, text[cut:], label)]
    limit = limit_between(min(numbers), max(numbers), fraction)
    train, held_out = list[Document](), list[Document]()
    for document, number in zip(documents, numbers, strict=True):
        (held_out if number < limit else train).append(document)
    return train, held_out


def unit_hash(name: str) -> float:
    """A number in [0, 1): a hash of the name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def compressed_size(documents: Sequence[Document], method: Literal["gzip", "xz"]) -> int:
    """Bytes of the documents, each compressed on its own by `gzip -9` or `xz -9`."""
    compress = {
        "gzip": lambda data: gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lambda data: lzma.compress(data, preset=9),
    }[method]
    return sum(len(compress(document.text.encode())) for document in documents)
