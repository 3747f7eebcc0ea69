"""Text of several sources: one tokenizer, a plan of both parts of each, and their mixture."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zoo.data import text
from zoo.data.documents import Document
from zoo.data.mixtures.plan import MixturePlan
from zoo.data.mixtures.schedule import Stage, rounded
from zoo.data.mixtures.spec import Mixture, SourceSpec, parse
from zoo.data.prepared import hashes
from zoo.data.prepared.format import TOKENIZER
from zoo.data.prepared.opening import (
    Prepared,
    check_named,
    check_tokenizer,
    files_of,
    open_prepared,
    prepared_folder,
)
from zoo.data.prepared.prepare import SAMPLE_BYTES, training_texts
from zoo.data.sources.splits import plan_splits
from zoo.data.tokenizer import BPETokenizer, get_tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MixedText(text.Text):
    """The text of all sources, and the texts of each.

    The held-out plan has all held-out rows of all sources: its bits per byte are those of all
    held-out text, whatever the weights are.
    """

    sources: Mapping[str, text.Text] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash of all sources' names and tokens; the weights are apart from it."""
        digest = hashlib.sha256()
        for name, source in self.sources.items():
            digest.update(f"{name} {source.fingerprint} ".encode())
        return digest.hexdigest()

    @functools.cached_property
    def compressors(self) -> dict[str, float]:
        """Bits per byte of compressors on the held-out documents of all sources."""
        sizes = [source.held_out.corpus.num_bytes for source in self.sources.values()]
        found = [source.compressors for source in self.sources.values()]
        return {
            method: sum(size * bits[method] for size, bits in zip(sizes, found, strict=True))
            / sum(sizes)
            for method in found[0]
        }

    @property
    def targets(self) -> dict[str, int]:
        """Tokens to predict in the held-out part of each source."""
        return {
            name: source.held_out.corpus.num_tokens
            + len(source.held_out.corpus) * (source.held_out.frame - 1)
            for name, source in self.sources.items()
        }


class _Documents(Sequence[Document]):
    """The documents of several sequences, which are read when they are used."""

    def __init__(self, parts: Sequence[Sequence[Document]]):
        self._parts = parts

    @functools.cached_property
    def _all(self) -> list[Document]:
        return list(itertools.chain(*self._parts))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, i):
        return self._all[i]


def read_mixture(
    config: text.Config,
    *,
    steps: int,
    seed: int,
    tokenizer_folder: Callable[..., Path],
    default: text.Config | None = None,
) -> MixedText:
    """Read, split and tokenize the sources that `config.files` names; see `text.read_text`.

    The tokenizer is that of prepared sources, which have to agree on it and on the fields of
    `config` that have another value than `default`; or else it is trained on all sources by their
    weights.

    Raises:
        ValueError: sources, weights or stages that do not go together, or a source that is read
            more often in `steps` steps than it may be.
    """
    mixture = parse(config.files)
    configs = {s.name: dataclasses.replace(config, files=s.files) for s in mixture.sources}
    prepared = _open_prepared(config, mixture, default or text.Config())
    for name, one in configs.items():
        if name not in prepared:
            own = [f"{corpus.folder}/{TOKENIZER}" for corpus in prepared.values()]
            with _of_source(name):
                files_of(one, *own[:1])
    folder = tokenizer_folder(functools.partial(_make_tokenizer, config, mixture, prepared))
    tokenizer = load_tokenizer(folder)
    sources: dict[str, Prepared] = {}

    def take(spec: SourceSpec, without: Set[bytes] = frozenset()) -> None:
        with _of_source(spec.name):
            found = prepared.get(spec.name)
            if found is None:
                one = configs[spec.name]
                found = text.open_text(one, one, tokenizer, without=without)
            check_tokenizer(found, tokenizer, "the run")
            train = found.train.first(spec.limit_documents, spec.limit_tokens)
            sources[spec.name] = dataclasses.replace(found, train=train)

    for spec in mixture.sources:
        take(spec)
    leaks = find_leaks(sources)
    for spec in mixture.sources:
        if found := leaks.get(spec.name):
            _check_leaks(spec.name, found, prepared, sources[spec.name])
            take(spec, found)
    texts = {
        name: text.prepared_text(one, sources[name], seed=seed) for name, one in configs.items()
    }
    train = {name: one.train for name, one in texts.items()}
    held_out = {name: one.held_out for name, one in texts.items()}
    stages = mixture.resolve(steps, [plan.corpus.num_tokens for plan in train.values()])
    plan = MixturePlan(train, stages)
    check_epochs(mixture, plan, steps)
    by_rows = Stage(0, rounded([one.num_rows for one in held_out.values()]))
    documents = _Documents([one.held_out_documents for one in texts.values()])
    return MixedText(tokenizer, plan, MixturePlan(held_out, [by_rows]), documents, sources=texts)


def find_leaks(sources: Mapping[str, Prepared]) -> dict[str, set[bytes]]:
    """The hashes of documents that sources train on and others hold out, of sources that do.

    All sources hold out by the hash of the text, so that such documents exist only where they
    hold out other shares, where a source has so few that one had to change parts, and among
    functions. Only hashes between the sources' limits are compared, a slice after the other.
    """
    bounds = [source.bounds for source in sources.values()]
    begin, end = min(first for first, _ in bounds), max(last for _, last in bounds)
    documents = sum(len(part) for one in sources.values() for part in (one.train, one.held_out))
    leaks: dict[str, set[bytes]] = {}
    for window in hashes.slices(documents, begin, end):
        held = {name: _as_set(source.held_out.hashes(*window)) for name, source in sources.items()}
        for name, source in sources.items():
            others = set[bytes]().union(*(held[other] for other in held if other != name))
            if found := _as_set(source.train.hashes(*window)) & others:
                leaks.setdefault(name, set()).update(found)
    return leaks


def _as_set(records: np.ndarray) -> set[bytes]:
    content, size = records.tobytes(), hashes.HASH.itemsize
    return {content[i : i + size] for i in range(0, len(content), size)}


def check_epochs(mixture: Mixture, plan: MixturePlan, steps: int) -> None:
    """Raise a ValueError where a source would be read more often than its `max_epochs`."""
    epochs = plan.epochs(steps)
    for source in mixture.sources:
        asked, most = epochs[source.name], source.max_epochs
        if most is not None and asked > most:
            raise ValueError(
                f"data: the source {source.name!r} would be read {asked:.2f} times in --steps "
                f"{steps}, and its max_epochs={most}: give it a lower weight or more text, take "
                "fewer steps, or raise max_epochs"
            )


def _open_prepared(
    config: text.Config, mixture: Mixture, default: text.Config
) -> dict[str, Prepared]:
    """The sources that are prepared; all of them with one tokenizer, that of the configuration."""
    found = {source.name: prepared_folder(source.files) for source in mixture.sources}
    folders = {name: folder for name, folder in found.items() if folder is not None}
    if folders and config.documents != "files":
        raise ValueError(
            f"data.documents={config.documents!r}: the sources {[*folders]} are prepared, and have "
            "whole documents; give their files themselves"
        )
    prepared = {name: open_prepared(folder, config.cache) for name, folder in folders.items()}
    if len(prepared) < len(found):  # those of text sources too
        default = dataclasses.replace(default, field=config.field, held_out=config.held_out)
    for name, corpus in prepared.items():
        first, other = next(iter(prepared.items()))
        remedy = (
            "a mixture has one tokenizer; prepare the text of one of them again, with --tokenizer "
            f"{other.folder}/{TOKENIZER}"
        )
        with _of_source(name):
            check_tokenizer(corpus, other.tokenizer, f"the source {first!r}", remedy)
            check_named(corpus, config, default)
    return prepared


@contextlib.contextmanager
def _of_source(name: str) -> Iterator[None]:
    """A context in which a ValueError names the source."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"data: the source {name!r}: {error}") from error


def _check_leaks(
    name: str, leaks: Set[bytes], prepared: Mapping[str, Prepared], source: Prepared
) -> None:
    """Refuse a prepared source with documents that others hold out, or one with none beside."""
    if name in prepared:
        raise ValueError(
            f"data: the source {name!r} trains on {len(leaks)} documents or more that other "
            "sources hold out: prepare all of them with one --held-out, or in one folder"
        )
    if len(leaks) == len(source.train):
        raise ValueError(
            f"data: the source {name!r} has no document to train on that no other source holds "
            "out: give it more text, or leave it out"
        )
    logger.warning(
        "data: %d documents to train on of the source %r are left out: other sources hold them out",
        len(leaks),
        name,
    )


def _make_tokenizer(
    config: text.Config, mixture: Mixture, prepared: Mapping[str, Prepared], folder: Path
) -> None:
    if prepared:
        next(iter(prepared.values())).tokenizer.save(folder)
    elif config.tokenizer == "bpe":
        BPETokenizer.train(_sample(config, mixture), config.vocab_size).save(folder)
    else:
        get_tokenizer(config.tokenizer).save(folder)


def _sample(config: text.Config, mixture: Mixture) -> Iterator[str]:
    """Texts of each source by its weight at the begin; of one that has fewer, all of them."""
    given = [source.weight for source in mixture.sources]
    weights = [1.0 if weight is None else float(weight) for weight in given]
    for source, weight in zip(mixture.sources, weights, strict=True):
        splits = plan_splits(source.files, shard_bytes=2**28)
        size = int(SAMPLE_BYTES * weight / sum(weights))
        yield from training_texts(splits, config.field, config.held_out, size)


def stages_as_json(stages: Sequence[Stage]) -> list[dict]:
    """Stages as a run writes them down."""
    return [{"start": stage.start, "shares": list(stage.shares)} for stage in stages]
