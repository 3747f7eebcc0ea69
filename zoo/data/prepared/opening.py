"""Prepared corpora as a configuration names them: opened, or prepared by the run itself."""

import functools
import hashlib
import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zoo.common import files
from zoo.common.files import Location, is_remote, local_path
from zoo.common.store import explained, files_matching, location
from zoo.data.corpus import Corpus, parts_of, remedy
from zoo.data.documents import Document, standard_library
from zoo.data.prepared import format
from zoo.data.prepared.copies import Copies
from zoo.data.prepared.format import DamagedError, Manifest
from zoo.data.prepared.hashes import hash_limit, number_of
from zoo.data.prepared.prepare import prepare
from zoo.data.rows import RowOptions
from zoo.data.splits import Given
from zoo.data.tokenizer import (
    FILE_NAME,
    TRAINED,
    ByteTokenizer,
    Tokenizer,
    begin_id,
    end_id,
    load_tokenizer,
)

BY_ITSELF = 4 * 2**30  # bytes of files
SOURCE_NAME = r"[A-Za-z_][\w-]*"  # of a mixture


_REMEDY = "leave the flag out, or prepare the text again with it"
SAMPLE_BYTES = 2**20  # of held-out text, for compressors


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus on disk."""

    folder: Location
    manifest: Manifest
    tokenizer: Tokenizer
    train: Corpus
    held_out: Corpus

    @property
    def fingerprint(self) -> str:
        """A hash of all of its content: equal ones mean equal batches."""
        return self.manifest.fingerprint + self.train.limit

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """A hash that no training document's is below, and one that all held-out ones' are below.

        Functions are held out with their files, whatever their hashes are. Else both are the limit
        of the share held out, unless a part had to be given its only document.
        """
        if "documents" in self.manifest.options:
            return 0, 1 << 128
        limit = hash_limit(self.manifest.options["held_out"])
        ends = [limit, limit]
        for i, (part, record) in enumerate(((self.train, "train"), (self.held_out, "held_out"))):
            if self.manifest.total(record).documents == 1:
                [only] = part.hashes(0, 1 << 128)
                ends[i] = (min(limit, number_of(only)), max(limit, number_of(only) + 1))[i]
        return ends[0], ends[1]


def open_prepared(folder: Location, cache: Path | None = None) -> Prepared:
    """The prepared corpus in a folder; reads its manifest and tokenizer, and no shard.

    From a folder at an address, shards are copied into the folder `cache` when they are used.

    Raises:
        FileNotFoundError: a file of a shard is missing.
        ValueError: the manifest or the tokenizer is damaged or missing, or a file has another size
            than the manifest says.
    """
    with explained(folder):
        manifest = format.read_manifest(folder)
    if is_remote(folder):
        copies = Copies(folder, manifest, cache)
        tokenizer, stem_of = load_tokenizer(copies.folder(format.TOKENIZER)), copies.stem
    else:
        tokenizer, stem_of = (
            load_tokenizer(folder / format.TOKENIZER),
            partial(format.shard_file, Path(folder), suffix=""),
        )
        for number, record in enumerate(manifest.shards):
            for suffix, size in record.sizes.items():
                format.check_size(Path(f"{stem_of(number)}{suffix}"), size, remedy(stem_of(number)))
    return Prepared(folder, manifest, tokenizer, *parts_of(manifest, stem_of))


def is_mixture(files: str) -> bool:
    """Whether `data.files` names a mixture: sources by name, or a table in a .toml file."""
    return files.endswith(".toml") or re.match(rf"\s*{SOURCE_NAME}=", files) is not None


def prepared_folder(files: str) -> Location | None:
    """The folder that `data.files` names, if it is one of `python -m zoo prepare`.

    Raises:
        DamagedError: preparing it was not finished.
    """
    if not files or "," in files:
        return None
    folder = location(files, "data.files")
    if (folder / format.MANIFEST).is_file():
        return folder
    if (folder / format.SHARDS).is_dir():
        raise DamagedError(
            f"data.files={files!r} has shards and no {format.MANIFEST}: `python -m zoo prepare` "
            "has not finished it; run the same command again, which resumes it"
        )
    return None


def open_text(
    config: Any,
    default: Any,
    tokenizer: str | Tokenizer,
    vocab_size: int = 0,
    *,
    built_in: Callable[[], list[Document]] = standard_library,
    without: Set[bytes] = frozenset(),
    label: str | None = None,
    rows: RowOptions | None = None,
) -> Prepared:
    """The text of a `text.Source`, on disk: prepared by `python -m zoo prepare`, or now.

    Now means in its cache, by one process, for which others wait, or without a cache in a temporary
    folder. A prepared corpus must have what `config` names with another value than `default`.
    Without files the text is the `built_in` one, which is held out by its documents' names.
    Documents with the hashes `without` are not trained on. Documents have a `label` in a field of
    that name, or are the examples of `rows`.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: there is too much text to prepare it now, or a prepared corpus lacks what is
            asked for; or as `prepare`.
    """
    if is_mixture(config.files):
        raise ValueError(
            f"data.files={config.files!r} is a mixture of sources, which only recipes that train "
            "language models on plain text take: give one source's files (./a=b.txt, if they are "
            "named so)"
        )
    if (folder := prepared_folder(config.files)) is not None:
        if config.documents == "functions":
            raise ValueError(
                f"data.files={config.files!r} is prepared: it has whole documents; give the files "
                f"themselves for data.documents={config.documents!r}"
            )
        prepared = open_prepared(folder, config.cache)
        check_named(prepared, config, default)
        return prepared
    if data := config.files:
        content: Any = files_of(config, bounded=label is rows is None)  # a command could do that
        show = sum(size for _, size, _ in content) > 2**25
    else:
        data = Given(tuple((document.name, document.text) for document in built_in()))
        content, show = data.version, False
    is_trained = isinstance(tokenizer, str) and tokenizer in TRAINED
    if isinstance(tokenizer, str) and not is_trained:
        tokenizer = load_tokenizer(tokenizer)
    options: dict[str, Any] = {
        "vocab_size": vocab_size if is_trained else 0,
        "field": config.field,
        "held_out": config.held_out,
        "special_tokens": config.special_tokens or (None if rows else "text"),
        "documents": config.documents if label is rows is None else "files",
        "label": label,
        "rows": rows,
    }
    known = tokenizer if isinstance(tokenizer, str) else format.digest_of(tokenizer)
    hidden = sorted(hashed.hex() for hashed in without)
    key = json.dumps([format.VERSION, content, known, options, hidden])
    if config.cache is None:
        cache = Path(tempfile.mkdtemp(prefix="zoo-text-"))
    else:
        cache = local_path(config.cache, "data.cache")
        files.make_folder(cache, "data.cache")
    folder = cache / "prepared" / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not (folder / format.MANIFEST).exists():
        prepare(data, folder, tokenizer=tokenizer, without=without, show=show, **options)
    prepared = open_prepared(folder)
    if config.cache is None:
        weakref.finalize(prepared.train.opened, shutil.rmtree, cache, ignore_errors=True)
    return prepared


def files_of(
    config: Any, tokenizer: str | None = None, *, bounded: bool = True
) -> list[tuple[str, int, float | int | None]]:
    """The files of a `text.Source`: paths, sizes, and times where they are known.

    Raises:
        ValueError: they are `bounded`, and too much to be prepared at the start of a run; it names
            the command that prepares them, with its own `tokenizer` if none is given.
    """
    patterns = [pattern.strip() for pattern in config.files.split(",")]
    found: dict[Location, str] = {}
    for pattern in patterns:
        found |= files_matching(pattern, "data.files")
    stats = {str(path): path.stat() for path in found}
    size = sum(stat.st_size for stat in stats.values())
    if bounded and size > BY_ITSELF:
        words = ["python -m zoo prepare", *map(repr, patterns)]
        tokenizer = tokenizer or getattr(config, "tokenizer", "MODEL/tokenizer.json")
        words.append(f"--tokenizer {tokenizer}")
        if tokenizer in TRAINED:
            words.append(f"--vocab-size {config.vocab_size}")
        if config.special_tokens == "parse":
            words.append("--special-tokens parse")
        raise ValueError(
            f"data.files={config.files!r} has {size / 2**30:,.1f} GiB in {len(found):,} files: "
            f"above {BY_ITSELF / 2**30:.0f} GiB a run does not tokenize by itself. Do it once, on "
            f"all cores: {' '.join([*words, '--out FOLDER'])}, and then give --data FOLDER"
        )
    return [(path, stat.st_size, stat.st_mtime) for path, stat in sorted(stats.items())]


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether all texts get equal ids from both tokenizers."""
    return one is other or _identity(one) == _identity(other)


def check_tokenizer(
    prepared: Prepared, tokenizer: Tokenizer, whose: str, remedy: str = "prepare the text again"
) -> None:
    """Raise a ValueError unless a tokenizer gives the ids of the prepared one."""
    if not same_ids(tokenizer, prepared.tokenizer):
        raise ValueError(
            f"{whose} has another tokenizer ({_described(tokenizer)}) than {prepared.folder} was "
            f"prepared with ({_described(prepared.tokenizer)}): {remedy}"
        )


def check_named(prepared: Prepared, config: Any, default: Any) -> None:
    """Raise a ValueError unless the fields of a configuration name the prepared corpus.

    They are the tokenizer, vocab_size, field, held_out and special_tokens, where it has them with
    another value than `default`.
    """
    named = {
        name: value
        for name in ("tokenizer", "vocab_size", "field", "held_out", "special_tokens")
        if (value := getattr(config, name, None)) != getattr(default, name, None)
    }
    spec = named.get("tokenizer")
    if spec in ("bytes", *TRAINED):
        if (spec == "bytes") != isinstance(prepared.tokenizer, ByteTokenizer):
            raise ValueError(
                f"data.tokenizer={spec!r}: {prepared.folder} was prepared with another "
                f"({_described(prepared.tokenizer)}); {_REMEDY}"
            )
    elif spec is not None:
        check_tokenizer(prepared, load_tokenizer(spec), f"data.tokenizer={spec!r}", _REMEDY)
    given = {**prepared.manifest.options, "vocab_size": prepared.tokenizer.vocab_size}
    given["special_tokens"] = prepared.manifest.reading
    for name in ("vocab_size", "field", "held_out", "special_tokens"):
        if named.get(name) not in (None, given.get(name), prepared.manifest.options.get(name)):
            raise ValueError(
                f"data.{name}={named[name]!r}: {prepared.folder} was prepared with {given[name]!r}"
                f"; {_REMEDY}"
            )


def _described(tokenizer: Tokenizer) -> str:
    ids = f"{tokenizer.vocab_size:,} ids"
    return f"bytes, {ids}" if isinstance(tokenizer, ByteTokenizer) else ids


def _identity(tokenizer: Tokenizer) -> tuple[object, ...]:
    """The tokenizer's file, begin and end: equal where all texts get equal ids."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        content = Path(folder, FILE_NAME).read_bytes()
    return content, begin_id(tokenizer), end_id(tokenizer)


def first_documents(
    part: Corpus, tokenizer: Tokenizer, num_bytes: int = SAMPLE_BYTES
) -> list[Document]:
    """The first documents of a part, in about `num_bytes` of text."""
    documents: list[Document] = []
    for i in range(len(part)):
        text = tokenizer.decode(part.ids(i, 0, num_bytes))  # an id is a byte at least
        documents.append(Document(part.name(i), text))
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            break
    return documents
