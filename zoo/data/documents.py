"""Documents: the texts of files, of records with fields, and of Python's standard library."""

import ast
import csv
import glob
import gzip
import hashlib
import io
import json
import logging
import lzma
import sysconfig
import textwrap
import tokenize as python_tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zoo.base.files import local_path

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text, its name (relative to the folder it was found in) and, optionally, its label."""

    name: str
    text: str
    label: str | None = None


class Fields(NamedTuple):
    """The names of a record's text field and, optionally, its label field."""

    text: str = "text"
    label: str | None = None


def read_documents(
    pattern: str | Sequence[str], *, field: str = "text", label: str | None = None
) -> list[Document]:
    """The documents of all matching files, sorted by path; a file's suffix names its format.

    `pattern` is a glob, several separated by commas, or a list of globs; `~` and `**` work.
    `.jsonl`, `.csv` (its first line names the columns) and `.parquet`: one document per line or
    row, its text in `field` and, if `label` is given, its label in that field; `.array_record` and
    `.arrayrecord`: one document per record; any other file is one document. All text is UTF-8.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: the file's format needs an extra that is not installed.
        ValueError: the text cannot be read (the message names the place), or is empty.
    """
    patterns = pattern.split(",") if isinstance(pattern, str) else pattern
    names: dict[Path, str] = {}  # a file that two patterns match is read once
    for one in patterns:
        names |= _matching_files(one.strip())
    documents: list[Document] = []
    for path, name in names.items():
        if path.suffix in _RECORDS:
            fields = Fields(field, label)
            documents += [
                _document(f"{name}:{number}", where, record, fields)
                for number, where, record in _RECORDS[path.suffix](path, fields)
            ]
        elif label is not None:
            raise ValueError(
                f"{path} has no field {label!r}: labels come from {', '.join(_RECORDS)} files"
            )
        elif path.suffix in (".array_record", ".arrayrecord"):
            documents += _read_array_record(name, path)
        else:
            documents.append(Document(name, _decode(path.read_bytes(), path)))
    if not any(document.text for document in documents):
        raise ValueError(f"{pattern!r} has {len(documents)} documents and no text in them")
    return documents


def read_json_lines(pattern: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, location, record) of each line of the matching `.jsonl` files.

    Raises:
        FileNotFoundError, ValueError: as `read_documents`, or a file has another suffix.
    """
    records = []
    for one in pattern.split(","):
        for path, name in _matching_files(one.strip()).items():
            if path.suffix != ".jsonl":
                raise ValueError(f"{path} is no .jsonl file: prompts and chats are read from those")
            for number, where, record in _read_jsonl(path, Fields()):
                records.append((f"{name}:{number}", where, record))
    return records


def _matching_files(pattern: str) -> dict[Path, str]:
    """The matching files with their names: paths relative to the glob's fixed folder."""
    expanded = str(local_path(pattern, "data"))
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


Record = tuple[int, str, dict[str, Any]]  # its number, location and fields


def _document(name: str, where: str, record: dict[str, Any], fields: Fields) -> Document:
    for field in filter(None, fields):
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}: its fields are {sorted(record)}")
    text, label = record[fields.text], None
    if not isinstance(text, str):
        kind = type(text).__name__
        raise ValueError(f"{where}: field {fields.text!r} is a {kind}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but no text
        raise ValueError(f"{where}: lone surrogate at character {error.start}") from error
    if fields.label is not None:
        label = record[fields.label]
        if not isinstance(label, str | int) or label == "":
            raise ValueError(
                f"{where}: field {fields.label!r} is {label!r}: a label is a string or an integer"
            )
    return Document(name, text, None if label is None else str(label))


def _read_jsonl(path: Path, fields: Fields) -> Iterator[Record]:
    # Split on b"\n" alone: str.splitlines also splits at U+2028, which JSON allows in a string.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(_decode(line, where))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object")
        yield number, where, record


def read_csv(path: Path, fields: Fields | None = None) -> Iterator[Record]:
    """The rows of a CSV file as records; its first line names the columns."""
    text = _decode(path.read_bytes(), path).removeprefix("\ufeff")
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{where} does not have as many columns as the first line")
            yield rows.line_num, where, row
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV after line {rows.line_num}: {error}") from error


def _read_parquet(path: Path, fields: Fields) -> Iterator[Record]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"{path} needs an extra: pip install 'zoo[parquet]'") from error
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    names = file.schema_arrow.names
    columns = list(filter(None, fields))
    if missing := set(columns) - set(names):
        raise ValueError(f"{path} has no field {missing.pop()!r}: its fields are {names}")
    for row, record in enumerate(file.read(columns=columns).to_pylist()):
        yield row, f"{path}, row {row}", record


def _read_array_record(name: str, path: Path) -> list[Document]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise ImportError(f"{path} needs an extra: pip install 'zoo[array-record]'") from error
    reader = ArrayRecordReader(str(path))
    if not reader.ok():
        raise ValueError(f"{path} is no ArrayRecord file")
    records = reader.read_all()
    reader.close()
    return [
        Document(f"{name}:{row}", _decode(record, f"{path}, record {row}"))
        for row, record in enumerate(records)
    ]


_RECORDS: dict[str, Callable[[Path, Fields], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".csv": read_csv,
    ".parquet": _read_parquet,
}

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_NOT_LIBRARY |= {"pydoc_data"}  # one generated file of help texts, 6% of all bytes


def standard_library() -> list[Document]:
    """The Python files of this interpreter's standard library, sorted by name.

    Its tests and generated help texts are left out, which leaves about 11 MB. Line breaks become
    "\\n"; a file that cannot be decoded is skipped.
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
    return [part for document in documents for part in _functions(document)]


def _functions(document: Document) -> Iterator[Document]:
    try:
        tree = ast.parse(document.text) if document.name.endswith(".py") else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        yield document
        return
    lines = io.StringIO(document.text, newline=None).readlines()  # as the parser counts them

    def visit(node: ast.AST) -> Iterator[Document]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                text = textwrap.dedent("".join(lines[first - 1 : child.end_lineno]))
                yield Document(f"{document.name}:{first}", text)
            else:
                yield from visit(child)

    yield from visit(tree)


def held_out_split(
    documents: Sequence[Document], fraction: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, about `fraction` of them held out.

    A hash of a document's name decides its part, so the split is the same on every machine, and a
    new document moves no other. Neither part is ever empty: with too few documents, the one with
    the nearest hash changes parts. A single document is split into its head and its tail.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"held-out fraction={fraction} must lie between 0 and 1")
    if not documents:
        raise ValueError("there is no document to split")
    if len(documents) == 1:
        [(name, text, label)] = documents
        cut = len(text) - max(1, round(fraction * len(text)))
        if cut < 1:
            raise ValueError(f"{name} has {len(text)} characters: too few to hold any out")
        logger.warning("%s is the only document: its last %.0f%% is held out", name, 100 * fraction)
        return [Document(name, text[:cut], label)], [Document(name, text[cut:], label)]
    hashes = [unit_hash(document.name) for document in documents]
    # Of documents with equal names the order decides.
    order = sorted(range(len(documents)), key=hashes.__getitem__)
    held = {i for i in order[:-1] if hashes[i] < fraction} | {order[0]}
    return (
        [document for i, document in enumerate(documents) if i not in held],
        [document for i, document in enumerate(documents) if i in held],
    )


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
