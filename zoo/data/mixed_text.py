"""Text of several sources: how they are given, their one tokenizer, and the mixture of datasets.

In the flag, `code=src/**/*.py:0.7,help=docs/*.txt:0.3`: each source begins with a name and `=`; a
comma before anything else belongs to the source's files; its weight follows its last colon. A file
whose own name begins so can be written `./a=b.txt`. Or the flag names a table in a .toml file.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from zoo.common import checksums, configuration
from zoo.common.configuration import check_positive, check_value, from_json, require
from zoo.common.files import local_path
from zoo.data import text
from zoo.data.mixtures import MixtureDataset, Stage, rounded, shares_of
from zoo.data.prepared import hashes
from zoo.data.prepared.format import TOKENIZER
from zoo.data.prepared.opening import (
    SOURCE_NAME,
    Prepared,
    check_named,
    check_tokenizer,
    files_of,
    open_prepared,
    open_text,
    prepared_folder,
)
from zoo.data.prepared.prepare import SAMPLE_BYTES, training_texts
from zoo.data.splits import plan_splits
from zoo.data.tokenizer import TRAINED, load_tokenizer

logger = logging.getLogger(__name__)

_RESERVED = "average"  # a prefix of metrics


@dataclass(frozen=True)
class SourceSpec:
    """A source: its files, as in `data.files`, and how much of it is read."""

    name: str
    files: str
    weight: float | None = None
    max_epochs: float | None = None
    limit_documents: int | None = None
    limit_tokens: float | None = None

    def __post_init__(self) -> None:
        prefix = f"data: sources.{self.name}."
        configuration.check(self, prefix)
        is_name = re.fullmatch(SOURCE_NAME, self.name) and self.name != _RESERVED
        require(bool(is_name), f"data: the source {self.name!r} cannot be named so; rename it")
        require(bool(self.files), f"{prefix}files='': the source has no files")
        check_positive(self, prefix, "max_epochs", "limit_documents", "limit_tokens")


@dataclass(frozen=True)
class StageSpec:
    """Weights from a step on, or in the last steps of the run."""

    weights: dict[str, Any]
    start: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Mixture:
    """Sources, and stages with weights of their own; without weights, a temperature."""

    sources: tuple[SourceSpec, ...]
    stages: tuple[StageSpec, ...] = ()
    temperature: float | None = None

    def __post_init__(self) -> None:
        configuration.check(self, "data: ")
        check_positive(self, "data: ", "temperature")
        names = [source.name for source in self.sources]
        require(bool(names), "data: a mixture needs a source")
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"data: the source {twice[:1]} is there twice; name each once")
        weights = {s.name: s.weight for s in self.sources if s.weight is not None}
        require(
            [*weights] in ([], names),
            f"data: {[*weights]} have a weight and other sources none: give all of them one, or "
            "none for a temperature",
        )
        require(
            self.temperature is None or not weights,
            f"data: temperature={self.temperature} takes the place of the sources' weights; leave "
            "out either",
        )
        if weights:
            self._fractions("weights", weights)
        for i, stage in enumerate(self.stages):
            require(
                (stage.start is None) != (stage.last is None),
                f"data: stages[{i}] needs either `start` or `last`, a number of steps",
            )
            self._fractions(f"stages[{i}].weights", stage.weights)

    def resolve(self, steps: int, num_tokens: Sequence[int]) -> tuple[Stage, ...]:
        """The stages of a run of so many steps; the sources have `num_tokens` to train on."""
        weights = {s.name: s.weight for s in self.sources if s.weight is not None}
        if weights:
            shares = shares_of(self._fractions("weights", weights))
        else:
            top, power = max(num_tokens), 1 / (self.temperature or 1)
            shares = rounded([(n / top) ** power for n in num_tokens])  # n ** power may overflow
        stages = [Stage(0, shares)]
        for i, stage in enumerate(self.stages):
            start = steps - (stage.last or 0) if stage.start is None else stage.start
            before, what = stages[-1].start, f"data: stages[{i}] begins at step {start}"
            require(start > 0, f"{what}: it must be after step 0 of --steps {steps}")
            require(start > before, f"{what}, and the one before at {before}: put them in order")
            stages.append(Stage(start, shares_of(self._fractions(f"stages[{i}]", stage.weights))))
        return tuple(stages)

    def _fractions(self, where: str, weights: Mapping[str, Any]) -> list[Fraction]:
        """The weights of the sources, in their order; one that is left out has none."""
        names = [source.name for source in self.sources]
        unknown = [name for name in weights if name not in names]
        require(not unknown, f"data: {where} has no source {unknown[:1]}; known are {names}")
        for name, weight in weights.items():
            check_value(f"data: {where}.{name}", weight, float)
            require(weight >= 0, f"data: {where}.{name}={weight}: must not be negative")
        require(any(weights.values()), f"data: {where} are all zero; one must not be")
        # The shortest digits of a float are the digits that were written.
        return [Fraction(str(weights.get(name, 0))) for name in names]


def parse(files: str) -> Mixture:
    """The mixture that `data.files` names.

    Raises:
        ValueError: a key, a name or a value that it can't have.
    """
    if re.match(rf"\s*{SOURCE_NAME}=", files):
        items = re.split(rf",(?=\s*{SOURCE_NAME}=)", files)
        return Mixture(tuple(_source(*item.split("=", 1)) for item in items))
    path = local_path(files, "data.files")
    try:
        table = tomllib.loads(path.read_text())
        table["sources"] = tuple(
            from_json(SourceSpec, _named(name, source), f"sources.{name}.")
            for name, source in table.get("sources", {}).items()
        )
        table["stages"] = tuple(
            from_json(StageSpec, stage, f"stages[{i}].")
            for i, stage in enumerate(table.get("stages", []))
        )
        return from_json(Mixture, table)
    except (ValueError, TypeError, AttributeError) as error:  # TOML's errors are ValueErrors
        raise ValueError(f"{path} is no table of a mixture: {error}") from error


def _named(name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a source of a table, whose key is its name."""
    require("name" not in source, f"no field sources.{name}.name: the key is its name")
    return {"name": name, **source}


def _source(name: str, value: str) -> SourceSpec:
    files, _, written = value.rpartition(":")
    try:
        weight = float(written)
    except ValueError:
        return SourceSpec(name.strip(), value.strip())
    return SourceSpec(name.strip(), files.strip(), weight)


@dataclass(frozen=True)
class MixedText(text.Text):
    """The text of all sources, and the texts of each.

    The held-out dataset has all held-out rows of all sources: its bits per byte are of all
    held-out text, whatever the weights are. Only the sources have documents.
    """

    sources: Mapping[str, text.Text] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash of all sources' names and tokens; the weights are apart from it."""
        sources = self.sources.items()
        return checksums.of_values(x for name, one in sources for x in (name, one.fingerprint))

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
                found = open_text(one, one, tokenizer, without=without)
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
    stages = mixture.resolve(steps, [dataset.corpus.num_tokens for dataset in train.values()])
    dataset = MixtureDataset(train, stages)
    check_epochs(mixture, dataset, steps)
    by_rows = Stage(0, rounded([one.num_rows for one in held_out.values()]))
    return MixedText(tokenizer, dataset, MixtureDataset(held_out, [by_rows]), sources=texts)


def find_leaks(sources: Mapping[str, Prepared]) -> dict[str, set[bytes]]:
    """The hashes of documents that a source trains on and another one holds out, by source.

    All sources hold out by the hash of the text, so that such documents exist only where they hold
    out different shares, where a source has so few that one had to change parts, and among
    functions. Only hashes between the sources' limits are compared, one slice after the other.
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


def check_epochs(mixture: Mixture, dataset: MixtureDataset, steps: int) -> None:
    """Raise a ValueError where a source would be read more often than its `max_epochs`."""
    epochs = dataset.epochs(steps)
    for source in mixture.sources:
        asked, most = epochs[source.name], source.max_epochs
        if most is not None and asked > most:
            raise ValueError(
                f"data: the source {source.name!r} would be read {asked:.2f} times in --steps "
                f"{steps}, and its max_epochs={most:g}: give it a lower weight or more text, take "
                "fewer steps, or raise max_epochs"
            )


def _open_prepared(
    config: text.Config, mixture: Mixture, default: text.Config
) -> dict[str, Prepared]:
    """The prepared sources, all with one tokenizer, the one of the configuration."""
    found = {source.name: prepared_folder(source.files) for source in mixture.sources}
    folders = {name: folder for name, folder in found.items() if folder is not None}
    if folders and config.documents != "files":
        raise ValueError(
            f"data.documents={config.documents!r}: the sources {[*folders]} are prepared, and have "
            "whole documents; give their files themselves"
        )
    prepared = {name: open_prepared(folder, config.cache) for name, folder in folders.items()}
    if len(prepared) < len(found):  # sources of text have these fields too
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
    """Refuse a prepared source with documents that others hold out, or a source without others."""
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
    elif config.tokenizer not in TRAINED:
        load_tokenizer(config.tokenizer).save(folder)
    else:
        # Texts of each source by its weight at the start; of one that has fewer, all of them.
        weights = [1.0 if source.weight is None else source.weight for source in mixture.sources]
        texts: list[Iterator[str]] = []
        for source, weight in zip(mixture.sources, weights, strict=True):
            splits = plan_splits(source.files, shard_bytes=2**28)
            size = int(SAMPLE_BYTES * weight / sum(weights))
            texts.append(training_texts(splits, config.field, config.held_out, size))
        train = TRAINED[config.tokenizer]
        train(itertools.chain(*texts), config.vocab_size).save(folder)
