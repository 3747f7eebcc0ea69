"""From files of text to a prepared corpus: splits, a tokenizer, shards, parts, the manifest."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Literal, TypeVar

from zoo.common import files
from zoo.common.files import Location, Transfer, is_remote
from zoo.common.store import explained, location
from zoo.data.formats import read_split, sample_texts
from zoo.data.prepared import copies, engines, format, hashes
from zoo.data.prepared.engines import Engine
from zoo.data.prepared.format import Manifest
from zoo.data.prepared.hashes import PARTED
from zoo.data.prepared.tokenizing import Spec, Tokenized, key_of, prepare_shard
from zoo.data.rows import RowOptions
from zoo.data.splits import Given, Split, plan_splits
from zoo.data.tokenizer import TRAINED, Reading, Tokenizer, begin_id, load_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

OPTIONS = "options.json"
SAMPLE_BYTES = 64 * 2**20  # of text, for a tokenizer


def prepare(
    data: str | Sequence[str] | Given,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | Tokenizer = "bytes",
    vocab_size: int = 2048,
    field: str = "text",
    held_out: float = 0.05,
    special_tokens: Reading | None = "text",
    documents: Literal["files", "functions"] = "files",
    label: str | None = None,
    rows: RowOptions | None = None,
    without: Set[bytes] = frozenset(),
    shard_megabytes: float = 64.0,
    workers: int | None = None,
    engine: Engine = "processes",
    show: bool = False,
) -> Manifest:
    """Prepare the corpus of the files `data` in `folder`, or finish it after a kill.

    `data` and `field` are those of `plan_splits` and `read_split`; `tokenizer` is "bytes", "bpe",
    which is trained on a sample with `vocab_size` ids, or a tokenizer or its path. Of exact copies
    the first stays, and a document is held out if its hash says so; of a single document the end
    is. With "functions" as `documents`, they are held out file by file, and not trained on if a
    file that is held out has them too. Training documents whose hashes are in `without` are left
    out. Documents may have a `label`, in a field of that name; or the examples of `rows` take their
    place. `special_tokens` is the reading of their names in the text: if None, text for chats, and
    parse for rows of texts. The result does not depend on the `workers` (default: one per core),
    the `engine` or kills; a process that comes while another one prepares the same folder waits for
    it. A file is known by its name, its size and its `Piece.version`: an unfinished corpus takes up
    changed ones, a finished one of other files is refused. `show` shows a progress bar. If `folder`
    is an address, the corpus is written into a folder of the cache first, and its shards are copied
    up, the manifest last.

    Raises:
        FileNotFoundError, ImportError, ValueError: as `plan_splits` and `read_split`; or the folder
            holds something else, or less than two documents are to be divided into two parts.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out}: must lie between 0 and 1")
    if not shard_megabytes > 0:
        raise ValueError(f"shard_megabytes={shard_megabytes}: must be positive")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: must be positive")
    out = location(folder, "out")
    local = copies.working_folder(out) if is_remote(out) else out.absolute()
    splits: Sequence[Split | Given] = [data] if isinstance(data, Given) else []
    if not isinstance(data, Given):
        splits = plan_splits(data, shard_bytes=int(shard_megabytes * 1e6))
    given, kind = None, tokenizer
    if not (isinstance(tokenizer, str) and tokenizer in TRAINED):
        given = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        kind = tokenizer if tokenizer == "bytes" else format.digest_of(given)
    paths = {x.path for split in splits if isinstance(split, Split) for x in split.pieces}
    options: dict[str, Any] = {
        "files": len(data.documents) if isinstance(data, Given) else len(paths),
        "bytes": sum(split.num_bytes for split in splits),
        "data": _hash_of(split.key for split in splits)[:16],
        "field": field,
        "tokenizer": kind,
        "vocab_size": vocab_size if given is None else given.vocab_size,
        "held_out": held_out,
        "shard_megabytes": float(shard_megabytes),
    }
    if special_tokens != "text":
        options["special_tokens"] = special_tokens
    more = {"documents": None if documents == "files" else documents, "label": label, "rows": rows}
    options |= {name: value for name, value in more.items() if value is not None}
    if without:
        options["without"] = hashlib.sha256(b"".join(sorted(without))).hexdigest()
    state = _hash_of(split.version for split in splits)
    files.make_folder(local, "out")
    with _locked(local):
        if (manifest := _begin(out, local, options, state)) is not None:
            return manifest
        if not (local / format.TOKENIZER).exists():
            texts = training_texts(splits, field, held_out)
            partial = local / format.WORK / format.TOKENIZER
            files.remove(partial)
            (given or TRAINED[str(tokenizer)](texts, vocab_size)).save(partial)
            files.sync_all(partial)
            partial.rename(local / format.TOKENIZER)
            files.sync(local)
        count = workers or len(os.sched_getaffinity(0))
        address = str(out) if is_remote(out) else None
        run = functools.partial(run_all, workers=count, engine=engine)
        manifest = _passes(splits, options, without, run, local, address, show=show)
        manifest = dataclasses.replace(manifest, files=state)
        if is_remote(out):
            with explained(out):
                content = format.manifest_text(manifest)
                (out / format.MANIFEST).write_text(content, encoding="utf-8")
            files.remove(local)
        else:
            files.replace(local / format.MANIFEST, format.manifest_text(manifest))
            files.remove(local / format.WORK)
    return manifest


def run_all(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], workers: int, engine: Engine
) -> Iterator[T]:
    """The results of `function(*task)` as they end; a single worker is this process."""
    if engine == "ray":
        return engines.run_ray(function, tasks, workers)
    if min(workers, len(tasks)) > 1:
        return engines.run_processes(function, tasks, min(workers, len(tasks)))
    return (function(*task) for task in tasks)


def _passes(
    splits: Sequence[Split | Given],
    options: dict[str, Any],
    without: Set[bytes],
    run: Callable[..., Iterator[Any]],
    out: Path,
    address: str | None,
    *,
    show: bool,
) -> Manifest:
    """Write all shards, and copy them to the address if there is one; return their manifest."""
    tokenizer = load_tokenizer(out / format.TOKENIZER)
    digest = format.tokenizer_digest(out / format.TOKENIZER)
    dtype = format.dtype_of(tokenizer.vocab_size)
    frame = 1 if begin_id(tokenizer) is None else 2
    label, rows = options.get("label"), options.get("rows")
    special_tokens = options.get("special_tokens", "text")
    spec = Spec(digest, options["field"], special_tokens, label=label, rows=rows)
    other = options.keys() & {"documents", "label", "rows"}
    only = None if other else _only_text(splits, spec.field)
    if only is not None:
        spec = dataclasses.replace(spec, cut=_cut(only, options["held_out"]))
        logger.warning(
            "there is one document: its last %g%% is held out", 100 * options["held_out"]
        )
    elif "documents" in options:
        limit = _limit_of_files(splits, spec.field, options["held_out"])
        spec = dataclasses.replace(spec, functions=limit)
    with Transfer("tokenizing" if show else "", sum(s.num_bytes for s in splits)) as bar:
        shards: list[Tokenized] = [None] * len(splits)  # type: ignore[list-item]
        work = [(split, number, spec, out) for number, split in enumerate(splits)]
        for number, done in run(prepare_shard, work):
            shards[number] = done
            bar.add(splits[number].num_bytes)
        cuts = hashes.slices(sum(shard.documents for shard in shards))
        ranges = [(i, *cut, len(shards), out) for i, cut in enumerate(cuts)]
        across = sum(found for _, found in run(hashes.find_duplicates, ranges))
        limit = _limit(out, len(shards), options, splits[0].names[0])
        forms = {shard.form: shard for shard in shards if shard.documents + shard.duplicates}
        if len(forms) > 1:
            raise ValueError(f"the files have rows of {' and of '.join(map(str, forms))}: give one")
        [(form, first)] = forms.items()
        classes = sorted({label for shard in shards for label in shard.labels})
        classes = (rows or {}).get("classes", classes)
        number_of = {label: number for number, label in enumerate(classes)}
        labels = [[number_of[label] for label in shard.labels] for shard in shards]
        frame = 0 if first.framed else frame
        parts = [(i, limit, len(cuts), frame, without, labels[i], out) for i in range(len(shards))]
        records = dict(run(hashes.write_parts, parts))
        if label is not None:
            _check_classes(label, classes, len(shards), out)
        if address is not None:
            copies.copy_tokenizer(out, address)
            for number in range(len(shards)):
                copies.copy_shard(number, out, address)
    manifest = Manifest(
        whole=None if only is None else hashes.hash_of(only.encode()).hex(),
        options=options,
        tokenizer=digest,
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        frame=frame,
        shards=tuple(records[number] for number in range(len(shards))),
        duplicates=across + sum(shard.duplicates for shard in shards),
        empty=sum(shard.empty for shard in shards),
        special_tokens=sum(shard.special_tokens for shard in shards),
        weighted=rows is not None,
        form=form,
        framed=first.framed,
        classes=tuple(classes),
        first_empty=next((s.first_empty for s in shards if s.first_empty is not None), None),
    )
    counts = [manifest.total(part).documents for part in ("train", "held_out")]
    if not all(counts):
        advice = "add Python files, or take documents='files'" if "documents" in options else ""
        raise ValueError(
            f"the {options['files']} files have {counts[0]} documents to train on and {counts[1]} "
            f"held out{' that no other source holds out' if without else ''}: "
            f"{advice or 'give more text'}"
        )
    return manifest


def _only_text(splits: Sequence[Split | Given], field: str) -> str | None:
    """The text of all documents that have one, if it is one text; reads to the second one."""
    first: str | None = None
    texts = (document.text for split in splits for document in read_split(split, field))
    for text in filter(None, texts):
        if first not in (None, text):
            return None
        first = text
    return first


def _cut(text: str, held_out: float) -> int:
    """The characters of the only document that are trained on."""
    cut = len(text) - max(1, round(held_out * len(text)))
    if cut < 1:
        raise ValueError(f"the only document has {len(text)} characters: too few to hold any out")
    return cut


def _limit_of_files(splits: Sequence[Split | Given], field: str, held_out: float) -> int:
    """The hash below which whole files are held out; of two or more, neither part is empty."""
    keys = (key_of(split, one) for split in splits for one in read_split(split, field))
    lowest, highest = 1 << 128, 0
    for number in map(hashes.number_of_key, keys):
        lowest, highest = min(lowest, number), max(highest, number)
    return hashes.limit_between(lowest, highest, held_out)


def training_texts(
    splits: Sequence[Split | Given], field: str, held_out: float, num_bytes: int = SAMPLE_BYTES
) -> Iterator[str]:
    """A sample of the training text, for a tokenizer; of little text all of it."""
    if (only := _only_text(splits, field)) is not None:
        yield only[: _cut(only, held_out)]
        return
    limit = hashes.hash_limit(held_out)
    if sum(split.num_bytes for split in splits) <= num_bytes:
        limit = _limit_of_files(splits, field, held_out)  # few documents may have another one
    files = [split for split in splits if isinstance(split, Split)]
    trains_on = lambda text: hashes.number_of_key(text.encode()) >= limit  # noqa: E731
    yield from sample_texts(files, field, num_bytes=num_bytes, wanted=trains_on)
    for split in splits:
        if isinstance(split, Given):
            for document in read_split(split):
                if hashes.number_of_key(key_of(split, document)) >= limit:
                    yield document.text


def _check_classes(label: str, classes: Sequence[str], shards: int, folder: Path) -> None:
    """Refuse a single class, and a class that is held out and not trained on."""
    found = set[int]()
    for number in range(shards):
        records = hashes.mapped(format.shard_file(folder, number, format.TRAIN), format.RECORD)
        found |= {*records["label"].tolist()}
    trained = [classes[i] for i in sorted(found)]
    if len(trained) < 2:
        raise ValueError(f"label={label!r} has the values {trained} to train on: it needs two")
    if unknown := set(classes) - set(trained):
        raise ValueError(
            f"label={label!r}: {sorted(unknown)} are among the held-out rows alone; add rows of "
            "them, or change data.held_out"
        )


def _limit(folder: Path, shards: int, options: dict[str, Any], first: str) -> int:
    """The hash below which a document is held out; neither part is empty."""
    paths = (format.work_file(folder, number, hashes.RECORDS) for number in range(shards))
    sorted_records = (hashes.mapped(path, hashes.RAW) for path in paths)
    ends = [hashes.number_of(found[i]) for found in sorted_records if len(found) for i in (0, -1)]
    lowest, highest = min(ends, default=0), max(ends, default=0)
    if lowest >> 32 == highest >> 32:
        what, advice = "documents with a token", "divide the text, as into a line per paragraph"
        if rows := options.get("rows"):
            what, advice = f"rows of {rows['format']}", "give more"
        documents = min(1, len(ends))
        raise ValueError(
            f"the {options['files']} files ({first!r} the first) have {documents} different "
            f"{what}: two are needed, to train on and to hold out; {advice}"
        )
    return hashes.limit_between(lowest, highest, options["held_out"])


def _begin(out: Location, local: Path, options: dict[str, Any], state: str) -> Manifest | None:
    """The manifest of a folder that is prepared; else make it ready for these options.

    `state` is the hash of the files' versions.
    """
    known: dict[str, Any] | None = None
    manifest, work = None, local / format.WORK
    with explained(out):
        if (out / format.MANIFEST).exists():
            manifest = format.read_manifest(out)
            known, begun = manifest.options, manifest.files
        elif (work / OPTIONS).exists():
            known = json.loads((work / OPTIONS).read_text(encoding="utf-8"))
            begun = known.pop("state", None)
        elif left := _strange(out):
            raise ValueError(
                f"out='{out}' holds something else ({', '.join(left[:3])}): give a new folder"
            )
    if known is not None and known != options:
        differ = [
            f"{name} is {known.get(name)!r} there and {options.get(name)!r} here"
            for name in dict.fromkeys([*options, *known])
            if known.get(name) != options.get(name)
        ]
        raise ValueError(
            f"out='{out}' holds a corpus of another configuration: {'; '.join(differ)}; give "
            "another folder, or remove that one"
        )
    if manifest is not None:
        if begun != state:
            raise ValueError(
                f"out='{out}' holds a corpus of other files: these have its files' names and "
                "sizes, and have changed since; give another folder, or remove that one"
            )
        files.remove(work)  # of a process that was killed at the very end
        return manifest
    work.mkdir(exist_ok=True)
    stale = ["*.partial"]
    if known is not None and begun != state:  # shards of files that changed are made again
        stale += ["*.duplicates", f"*{PARTED}", "*.copied"]
        if options["tokenizer"] in TRAINED:
            files.remove(local / format.TOKENIZER)
    for path in [path for pattern in stale for path in work.glob(pattern)]:
        path.unlink()
    files.replace(work / OPTIONS, json.dumps({**options, "state": state}))
    (local / format.SHARDS).mkdir(exist_ok=True)
    return None


def _strange(out: Location) -> list[str]:
    """The names in a folder that no unfinished preparation has left there."""
    if not out.is_dir():
        return []
    names = {path.name for path in out.iterdir()}
    if is_remote(out):  # it may be another machine's, whose working folder is there
        return sorted(names - {format.SHARDS, format.TOKENIZER})
    begun = {path.name for path in (out / format.WORK).glob("*")}
    return sorted(names - ({format.WORK} if begun <= {f"{OPTIONS}.tmp"} else set()))


def _hash_of(texts: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A context that one process is in at a time; its end, however it comes, frees it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process prepares %s: waiting for it", folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
