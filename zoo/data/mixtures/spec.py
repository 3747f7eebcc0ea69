"""A mixture as it is written: in a flag, or as a table in a file.

In the flag, `code=src/**/*.py:0.7,help=docs/*.txt:0.3`: each source begins with a name and `=`; a
comma before anything else belongs to the source's files; its weight follows its last colon. A glob
of one's own whose name begins so can be written `./a=b.txt`.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from zoo.common.configuration import require
from zoo.common.files import local_path
from zoo.data.mixtures.schedule import Stage, rounded, shares_of

_NAME = r"[A-Za-z_][\w-]*"
_BEGIN = re.compile(rf"\s*({_NAME})=(.*)", re.DOTALL)
_WEIGHT = re.compile(r"(.*):\s*([+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|nan|inf))\s*", re.I | re.S)
_RESERVED = ("average",)  # prefixes of metrics
_KEYS = ("files", "weight", "max_epochs", "limit_documents", "limit_tokens")


@dataclass(frozen=True)
class SourceSpec:
    """A source: its files, as of `data.files`, and how much of it is read."""

    name: str
    files: str
    weight: Decimal | int | None = None
    max_epochs: Decimal | int | None = None
    limit_documents: int | None = None
    limit_tokens: int | None = None


@dataclass(frozen=True)
class StageSpec:
    """Weights from a step on, or in the last steps of the run."""

    weights: Mapping[str, Any]
    start: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Mixture:
    """Sources, and stages with weights of their own; without weights, a temperature."""

    sources: tuple[SourceSpec, ...]
    stages: tuple[StageSpec, ...] = ()
    temperature: float = 1.0

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        require(bool(names), "data: a mixture needs a source")
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"data: the source {twice[:1]} is there twice; name each once")
        reserved = [name for name in names if name in _RESERVED]
        require(not reserved, f"data: no source can be named {reserved[:1]}; metrics have the name")
        weighted = [source.name for source in self.sources if source.weight is not None]
        require(
            weighted in ([], names),
            f"data: {weighted} have a weight and other sources none: give all of them one, or none "
            "for a temperature",
        )
        require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"data: temperature={self.temperature} must be positive and finite",
        )
        for source in self.sources:
            require(bool(source.files), f"data: the source {source.name!r} has no files")
            for key in _KEYS[2:]:
                value = getattr(source, key)
                require(value is None or value > 0, f"data: {source.name}.{key}={value}: above 0")
        if weighted:
            _fractions("weights", names, {s.name: s.weight for s in self.sources})
        for i, stage in enumerate(self.stages):
            _fractions(f"stages[{i}]", names, stage.weights)

    @property
    def names(self) -> list[str]:
        """The names of the sources, in their order."""
        return [source.name for source in self.sources]

    def resolve(self, steps: int, num_tokens: Sequence[int]) -> tuple[Stage, ...]:
        """The stages of a run of so many steps; the sources have `num_tokens` to train on."""
        given = {source.name: source.weight for source in self.sources}
        if None in given.values():
            top = max(num_tokens)  # of huge numbers a small power would not be finite
            shares = rounded([(n / top) ** (1 / self.temperature) for n in num_tokens])
        else:
            shares = shares_of(_fractions("weights", self.names, given))
        stages = [Stage(0, shares)]
        for i, stage in enumerate(self.stages):
            start = stage.start if stage.last is None else steps - stage.last
            assert start is not None
            what = f"data: stages[{i}] begins at step {start}"
            require(start > 0, f"{what}: it must be after step 0 of --steps {steps}")
            before = stages[-1].start
            require(start > before, f"{what}, and the one before at {before}: put them in order")
            weights = _fractions(f"stages[{i}]", self.names, stage.weights)
            stages.append(Stage(start, shares_of(weights)))
        return tuple(stages)


def _fractions(where: str, names: list[str], weights: Mapping[str, Any]) -> list[Fraction]:
    """The weights of the sources, in their order; one that is left out has none."""
    unknown = [name for name in weights if name not in names]
    require(not unknown, f"data: {where} has the unknown source {unknown[:1]}; known are {names}")
    for name, weight in weights.items():
        require(
            isinstance(weight, int | Decimal)
            and not isinstance(weight, bool)
            and Decimal(weight).is_finite(),
            f"data: {where}: the weight {weight} of {name!r} must be a finite number",
        )
        require(weight >= 0, f"data: {where}: the weight {weight} of {name!r} is negative")
    require(any(weights.values()), f"data: {where}: the weights are all zero; one must not be")
    return [Fraction(weights.get(name, 0)) for name in names]


def is_mixture(files: str) -> bool:
    """Whether `data.files` names a mixture: sources by name, or a table in a .toml file."""
    return files.endswith(".toml") or _BEGIN.fullmatch(files.partition(",")[0]) is not None


def parse(files: str) -> Mixture:
    """The mixture that `data.files` names.

    Raises:
        ValueError: a key, a name or a value that it can't have.
    """
    return _parse_flag(files) if _BEGIN.match(files) else _read_table(files)


def _parse_flag(text: str) -> Mixture:
    parts: list[tuple[str, str]] = []
    for item in text.split(","):
        if found := _BEGIN.fullmatch(item):
            parts.append((found[1], found[2]))
        else:
            name, before = parts.pop()
            parts.append((name, f"{before},{item}"))
    return Mixture(tuple(_source(name, value) for name, value in parts))


def _source(name: str, value: str) -> SourceSpec:
    if found := _WEIGHT.fullmatch(value):
        return SourceSpec(name, found[1].strip(), Decimal(found[2]))
    return SourceSpec(name, value.strip())


def _read_table(files: str) -> Mixture:
    path = local_path(files, "data.files")
    try:
        table = tomllib.loads(path.read_text(), parse_float=Decimal)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table in TOML: {error}") from error
    try:
        return _from_table(table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_table(table: dict[str, Any]) -> Mixture:
    _check_keys("the table", table, ("sources", "stages", "temperature"))
    sources, stages = table.get("sources", {}), table.get("stages", [])
    require(
        isinstance(sources, dict) and all(isinstance(one, dict) for one in sources.values()),
        "sources: write a table [sources.NAME] for each",
    )
    require(
        isinstance(stages, list) and all(isinstance(one, dict) for one in stages),
        "stages: write a table [[stages]] for each",
    )
    for name, source in sources.items():
        require(re.fullmatch(_NAME, name) is not None, f"sources.{name}: {name!r} is no name")
        _check_keys(f"sources.{name}", source, _KEYS)
        require(isinstance(source.get("files"), str), f"sources.{name}: `files` is a text")
        for key in _KEYS[1:]:
            kinds = (int,) if key.startswith("limit") else (int, Decimal)
            value = source.get(key, 1)
            require(type(value) in kinds, f"sources.{name}.{key}={value}: must be a number")
    for i, stage in enumerate(stages):
        _check_keys(f"stages[{i}]", stage, ("start", "last", "weights"))
        positions = [stage[key] for key in ("start", "last") if key in stage]
        require(
            len(positions) == 1 and type(positions[0]) is int,
            f"stages[{i}]: needs either `start` or `last`, a number of steps",
        )
        require(isinstance(stage.get("weights"), dict), f"stages[{i}]: `weights` is a table")
    temperature = table.get("temperature", 1)
    require(type(temperature) in (int, Decimal), f"temperature={temperature}: must be a number")
    require(
        "temperature" not in table or all("weight" not in one for one in sources.values()),
        "temperature: it takes the place of the sources' weights; leave out either",
    )
    return Mixture(
        tuple(SourceSpec(name, **source) for name, source in sources.items()),
        tuple(StageSpec(**stage) for stage in stages),
        float(temperature),
    )


def _check_keys(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(table.keys() - set(known))
    require(not unknown, f"{where} has the unknown key {unknown[:1]}; known are {[*known]}")
