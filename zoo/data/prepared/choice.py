"""Text that a run prepares by itself, once per machine, and folders that are prepared already."""

import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Set
from pathlib import Path
from typing import Any

from zoo.common import files
from zoo.common.addresses import Location, files_matching, location
from zoo.common.files import local_path
from zoo.data.prepared.format import MANIFEST, SHARDS, DamagedError, tokenizer_digest
from zoo.data.prepared.parts import Prepared, open_prepared
from zoo.data.prepared.prepare import prepare
from zoo.data.sources.splits import Given
from zoo.data.tokenizer import Tokenizer, get_tokenizer

BY_ITSELF = 4 * 2**30  # bytes of files


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


def prepared_by_itself(
    config: Any,
    tokenizer: str | Tokenizer,
    vocab_size: int,
    given: Given | None = None,
    without: Set[bytes] = frozenset(),
) -> Prepared:
    """The text of a `text.Source`, or what is `given`, prepared in its cache by one process.

    Others wait, and find it. Without a cache it is prepared in a temporary folder, which goes.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: it is too much to be prepared at the start of a run; or as `prepare`.
    """
    patterns = [pattern.strip() for pattern in config.files.split(",")]
    content: Any = given.version if given is not None else files_of(config)
    with tempfile.TemporaryDirectory() as temporary:
        spec = tokenizer
        if tokenizer != "bpe":
            one = get_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
            one.save(Path(temporary))
            spec = temporary
        options: dict[str, Any] = {
            "vocab_size": vocab_size if spec == "bpe" else 0,
            "field": config.field,
            "held_out": config.held_out,
            "special_tokens": config.reading,
            "documents": config.documents,
        }
        known = "bpe" if spec == "bpe" else tokenizer_digest(Path(temporary))
        hidden = sorted(hashed.hex() for hashed in without)
        key = hashlib.sha256(json.dumps([content, known, options, hidden]).encode()).hexdigest()
        if config.cache is None:
            cache = Path(tempfile.mkdtemp(prefix="zoo-text-"))
        else:
            cache = local_path(config.cache, "data.cache")
            files.make_folder(cache, "data.cache")
        folder = cache / "prepared" / key[:32]
        if not (folder / MANIFEST).exists():
            show = given is None and sum(size for _, size, _ in content) > 2**25
            data = patterns if given is None else given
            prepare(data, folder, tokenizer=str(spec), without=without, show=show, **options)
    prepared = open_prepared(folder)
    if config.cache is None:
        weakref.finalize(prepared.train.opened, shutil.rmtree, cache, ignore_errors=True)
    return prepared


def files_of(
    config: Any, tokenizer: str | None = None
) -> list[tuple[str, int, float | int | None]]:
    """The files of a `text.Source`: paths, sizes, and times where they are known.

    Raises:
        ValueError: they are too much to be prepared at the start of a run; it names the command
            that prepares them, with its own `tokenizer` if none is given.
    """
    patterns = [pattern.strip() for pattern in config.files.split(",")]
    found: dict[Location, str] = {}
    for pattern in patterns:
        found |= files_matching(pattern, "data.files")
    stats = {str(path): path.stat() for path in found}
    size = sum(stat.st_size for stat in stats.values())
    if size > BY_ITSELF:
        words = ["python -m zoo prepare", *map(repr, patterns)]
        tokenizer = tokenizer or getattr(config, "tokenizer", "MODEL/tokenizer.json")
        words.append(f"--tokenizer {tokenizer}")
        if tokenizer == "bpe":
            words.append(f"--vocab-size {config.vocab_size}")
        if config.reading != "text":
            words.append(f"--special-tokens {config.reading}")
        raise ValueError(
            f"data.files={config.files!r} has {size / 2**30:,.1f} GiB in {len(found):,} files: "
            f"above {BY_ITSELF / 2**30:.0f} GiB a run does not tokenize by itself. Do it once, on "
            f"all cores: {' '.join([*words, '--out FOLDER'])}, and then give --data FOLDER"
        )
    return [(path, stat.st_size, stat.st_mtime) for path, stat in sorted(stats.items())]
