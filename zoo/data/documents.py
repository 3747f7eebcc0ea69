"""Documents: the texts that come with Python, the functions in a text, and how small texts get."""

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
from typing import Literal, NamedTuple

from zoo.data.prepared.hashes import limit_between, number_of_key

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text, and its name, relative to the folder it was found in."""

    name: str
    text: str


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


def functions_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each function of a file; for what is no Python, (0, all of it).

    These are top-level functions and methods with their decorators and inner functions, dedented.
    """
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
    documents: Sequence[Document], fraction: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents of the built-in text, by the hashes of their names."""
    numbers = [number_of_key(document.name.encode()) for document in documents]
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
