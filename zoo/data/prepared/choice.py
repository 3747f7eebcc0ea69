"""Text that a run prepares by itself, once per machine, and text that it reads into memory."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from zoo.base.addresses import Location, files_matching, is_remote, location
from zoo.base.files import local_path
from zoo.data.prepared.format import (
    MANIFEST,
    SHARDS,
    DamagedError,
    read_manifest,
    tokenizer_digest,
)
from zoo.data.prepared.parts import Prepared, open_prepared
from zoo.data.prepared.prepare import prepare
from zoo.data.tokenizer import Reading, Tokenizer, get_tokenizer

IN_MEMORY = 32 * 2**20  # bytes of files
BY_ITSELF = 4 * 2**30
COMPRESSED = (".gz", ".zst")


class Wanted(NamedTuple):
    """Text, and how it is to be prepared; see `zoo.data.prepared.prepare.prepare`."""

    files: str
    field: str
    held_out: float
    tokenizer: str | Tokenizer
    vocab_size: int = 0  # of "bpe"
    special_tokens: Reading = "text"


def prepared_folder(files: str) -> Location | None:
    """The folder that `data.files` names, if it is one of `python -m zoo prepare`.

    Raises:
        DamagedError: preparing it was not finished.
    """
    if not files or "," in files:
        return None
    folder = location(files, "data.files")
    if (folder / MANIFEST).is_file():
        return folder
    if (folder / SHARDS).is_dir():
        raise DamagedError(
            f"data.files={files!r} has shards and no {MANIFEST}: `python -m zoo prepare` has not "
            "finished it; run the same command again, which resumes it"
        )
    return None


def prepared_by_itself(wanted: Wanted, cache: Path | None) -> Prepared | None:
    """The text, prepared in the folder `cache` by one process while the others wait.

    None: `is_for_memory`.

    Raises:
        FileNotFoundError, ValueError: see `is_for_memory`.
    """
    contents = _contents(wanted, cache)
    if cache is None or contents is None:
        return None
    return _prepared(wanted, contents, local_path(cache, "data.cache"))


def is_for_memory(wanted: Wanted, cache: Path | None) -> bool:
    """Whether the text's files are few enough to be held in memory, or there is no cache.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: they are too many to be prepared at the start of a run.
    """
    return _contents(wanted, cache) is None


def is_small(wanted: Wanted) -> bool:
    """Whether the text's files are few enough to be held in memory, and none is compressed."""
    return _are_small(_files(wanted))


def was_prepared(wanted: Wanted, cache: Path | None, fingerprint: str) -> bool:
    """Whether the folder `cache` has the text prepared, as a corpus of that fingerprint."""
    if cache is None:
        return False
    with tempfile.TemporaryDirectory() as temporary:
        local = local_path(cache, "data.cache")
        _, folder = _target(wanted, _files(wanted), local, Path(temporary))
    found = (folder / MANIFEST).exists() and read_manifest(folder).fingerprint
    return found == fingerprint


Files = list[tuple[str, int, float | int | None]]  # paths, sizes, and times where they are known


def _files(wanted: Wanted) -> Files:
    found: dict[Location, str] = {}
    for pattern in _patterns(wanted):
        found |= files_matching(pattern, "data.files")
    stats = {str(path): path.stat() for path in found}
    return [(path, stat.st_size, stat.st_mtime) for path, stat in sorted(stats.items())]


def _are_small(found: Files) -> bool:
    plain = not any(is_remote(path) or path.endswith(COMPRESSED) for path, *_ in found)
    return plain and sum(size for _, size, _ in found) <= IN_MEMORY


def _contents(wanted: Wanted, cache: Path | None) -> Files | None:
    """The files that are to be prepared; None: they are for memory."""
    found = _files(wanted)
    size = sum(size for _, size, _ in found)
    if size > BY_ITSELF:
        raise ValueError(
            f"data.files={wanted.files!r} has {size / 2**30:,.1f} GiB in {len(found):,} files: "
            f"above {BY_ITSELF / 2**30:.0f} GiB a run does not tokenize by itself. Do it once, on "
            f"all cores: {_command(wanted)}, and then give --data FOLDER"
        )
    return None if cache is None or _are_small(found) else found


def _target(wanted: Wanted, found: Files, cache: Path, temporary: Path) -> tuple[str, Path]:
    """(the tokenizer's name, or its folder, which is `temporary`; the folder of the corpus)."""
    spec = wanted.tokenizer
    if spec != "bpe":
        tokenizer = get_tokenizer(spec) if isinstance(spec, str) else spec
        tokenizer.save(temporary)
        spec = str(temporary)
    known = "bpe" if spec == "bpe" else tokenizer_digest(temporary)
    size = wanted.vocab_size if spec == "bpe" else 0
    read = [wanted.special_tokens] * (wanted.special_tokens != "text")
    key = json.dumps([found, wanted.field, wanted.held_out, known, size, *read])
    return spec, cache / "prepared" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _prepared(wanted: Wanted, contents: Files, cache: Path) -> Prepared:
    with tempfile.TemporaryDirectory() as temporary:
        spec, folder = _target(wanted, contents, cache, Path(temporary))
        if not (folder / MANIFEST).exists():
            prepare(
                _patterns(wanted),
                folder,
                tokenizer=spec,
                vocab_size=wanted.vocab_size,
                field=wanted.field,
                held_out=wanted.held_out,
                special_tokens=wanted.special_tokens,
                show=True,
            )
    return open_prepared(folder)


def _patterns(wanted: Wanted) -> list[str]:
    return [pattern.strip() for pattern in wanted.files.split(",")]


def _command(wanted: Wanted) -> str:
    """The command that prepares the text."""
    words = ["python -m zoo prepare", *map(repr, _patterns(wanted))]
    if isinstance(wanted.tokenizer, str):
        words.append(f"--tokenizer {wanted.tokenizer}")
    else:
        words.append("--tokenizer MODEL/tokenizer.json")
    if wanted.tokenizer == "bpe":
        words.append(f"--vocab-size {wanted.vocab_size}")
    if wanted.special_tokens != "text":
        words.append(f"--special-tokens {wanted.special_tokens}")
    return " ".join([*words, "--out FOLDER"])
