"""Formats of the folders of models and of adapters, the zoo's own among them, by their names.

A package brings one as an entry point of the group `zoo.formats` or `zoo.adapter_formats`, whose
object is a `Format` or an `AdapterFormat`; the name of the entry point is that of the format.
"""

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums, plugins
from zoo.common.checksums import Digest
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import CONFIG, WEIGHTS, read_json, verify
from zoo.wrappers import lora

_MODELS, _ADAPTERS = "zoo.formats", "zoo.adapter_formats"


@dataclass(frozen=True)
class Options:
    """The options of `zoo.load`, checked but for those that depend on the folder."""

    mesh: Mesh | sharding.Layout | None = None
    dtype: np.dtype | None = None
    quantize: str | None = None
    overrides: Mapping[str, Any] | None = None
    like: PyTree = None
    ignore: Collection[str] | None = ()
    """None ignores all unknown fields."""


class Format(abc.ABC):
    """A format of the folders of models. Its errors are PublishErrors, before any compute."""

    config = CONFIG
    """The file that describes the model."""
    has_checksums = False
    """Whether a folder without checksums is damaged; those of others are verified where given."""

    @abc.abstractmethod
    def describes(self, content: bytes) -> bool:
        """Whether the content of a file named `config` describes a model in this format."""

    @abc.abstractmethod
    def load(self, folder: Path, options: Options) -> PyTree:
        """The model in a folder, sharded."""

    @abc.abstractmethod
    def skeleton(self, folder: Path, options: Options, *, weights: bool) -> PyTree:
        """The skeleton of what `load` returns; without `weights` of a folder that may lack them."""

    @abc.abstractmethod
    def dtypes(self, folder: Path) -> tuple[Mapping[str, Any], Any]:
        """The dtypes of a model's parameters by path, and that of others; None for their own."""

    @abc.abstractmethod
    def write(
        self,
        folder: Path | None,
        model: PyTree,
        dtypes: Mapping[str, Any],
        *,
        tokenizer: Any,
        like: Path | None,
    ) -> dict[str, Digest]:
        """Write a model's description and its weights, in `dtypes` by path.

        All processes call it, because arrays are gathered from all; those without a folder write
        nothing. The tokenizer's files are there already. `like` is the folder, in any format, that
        the model came from. Returns the checksums of the files that have them.
        """

    def weight_files(self, folder: Path) -> list[str]:
        """The names of the files that hold the weights."""
        return [WEIGHTS]

    def sampling(self, folder: Path) -> tuple[Path, dict[str, Any]] | None:
        """The file with settings of sampling, and they by `zoo.Sampling`'s names; None without."""
        return None

    def is_id(self, name: str) -> bool:
        """Whether a name has the form of an id, or of an address, that `fetch` understands."""
        return False

    def fetch(self, name: str, *, revision: str | None, weights: bool) -> Path:
        """The local folder of the model of an id, downloaded if it is not here yet."""
        raise NotImplementedError

    def cached(self, name: str) -> Path | None:
        """The local folder of the model of an id, if it is here already."""
        raise NotImplementedError

    def revision(self, folder: Path) -> str | None:
        """The commit of a folder that `fetch` returned, which `fetch` takes."""
        return None


@dataclass(frozen=True)
class Base:
    """The model that adapters are for, as their folder describes it."""

    name: str
    """A folder, a name on the shelf or a hub id; "" if it is not known."""
    revision: str | None = None
    """The commit of a hub id."""
    checksum: str | None = None
    """Of the files of its weights; None if they were not on this machine."""
    quantized: tuple[str, ...] | None = None
    """The kinds of its quantised matrices; None if they are not known."""
    eos_ids: tuple[int, ...] = ()
    """The ids that end the texts of the model with its adapters."""


class Opened(abc.ABC):
    """The adapters of a folder, checked against the model that they are for."""

    config: lora.Config

    @abc.abstractmethod
    def read(self, mesh: Mesh | None, dtype: DTypeLike | None) -> PyTree:
        """Their arrays, in the tree of the adapted model; each device gets its own slices."""

    @abc.abstractmethod
    def dtypes(self, dtype: DTypeLike | None) -> PyTree:
        """The skeleton of what `read` returns."""


class AdapterFormat(abc.ABC):
    """A format of the folders of adapters without their model."""

    config: str
    """The file that describes them."""
    base_field: str
    """The field of it that names the model."""

    @abc.abstractmethod
    def has(self, folder: Path) -> bool:
        """Whether a folder with such a file holds adapters in this format, and no whole model."""

    @abc.abstractmethod
    def weight_files(self, folder: Path) -> list[str]:
        """The names of the files that hold the weights."""

    @abc.abstractmethod
    def base(self, folder: Path) -> Base:
        """The base of the adapters in a folder."""

    @abc.abstractmethod
    def open(self, folder: Path, base: PyTree) -> Opened:
        """The adapters in a folder, for a model."""

    @abc.abstractmethod
    def check(self, model: PyTree, config: lora.Config) -> None:
        """Raise a PublishError if the format lacks such adapters; targets are the model's paths."""

    @abc.abstractmethod
    def write(self, folder: Path | None, model: PyTree, config: lora.Config, base: Base) -> None:
        """Write the adapters of a model; all processes call it, as of `Format.write`."""

    def modules(self, model: PyTree) -> dict[str, str]:
        """The format's own names of the modules that hold a model's matrices, by their paths."""
        return {}


def names() -> list[str]:
    """The names of the formats of models, the zoo's own first."""
    return plugins.names(_MODELS)


def named(name: str) -> Format:
    """The format of models of this name.

    Raises:
        ValueError: no format has that name; the message lists the names.
    """
    if name not in (known := names()):
        raise ValueError(f"format={name!r}: choose one of {known}")
    return plugins.find(_MODELS, name)


def formats() -> list[Format]:
    """The formats of models, the zoo's own first."""
    return [plugins.find(_MODELS, name) for name in names()]


def adapter_formats() -> list[AdapterFormat]:
    """The formats of adapters; those of `zoo.save_adapters` are written in the first."""
    return [plugins.find(_ADAPTERS, name) for name in plugins.names(_ADAPTERS)]


def name_of(folder: Path) -> str:
    """The name of the format of the model in a folder.

    Raises:
        PublishError: the folder is damaged, or in no format that is installed.
    """
    for name in names():
        found = named(name)
        if (folder / found.config).is_file() and found.describes(
            (folder / found.config).read_bytes()
        ):
            return name
    if (folder / checksums.NAME).exists():
        verify(folder)
    read_json(folder / CONFIG)
    raise PublishError(
        f"{folder / CONFIG} describes no model in a format that is installed: {', '.join(names())}"
    )


def of(folder: Path) -> Format:
    """The format of the model in a folder; errors as of `name_of`."""
    return named(name_of(folder))


def of_id(name: object) -> Format | None:
    """The format that a hub id is of, by its form; None for any other name."""
    return next((x for x in formats() if x.is_id(str(name))), None)


def of_adapters(folder: Path) -> AdapterFormat | None:
    """The format of the adapters in a folder; None if it holds none, or a whole model."""
    found = (x for x in adapter_formats() if (folder / x.config).is_file())
    return next((x for x in found if x.has(folder)), None)


def config_files() -> list[str]:
    """The names of the files of which each folder of a model or of adapters has one."""
    found = [*(x.config for x in formats()), *(x.config for x in adapter_formats())]
    return list(dict.fromkeys(found))


def needs_no_checksums(file: str, content: bytes) -> bool:
    """Whether a file of this name is that of a folder whose format has no checksums."""
    if any(x.config == file for x in adapter_formats()):
        return True
    return any(x.config == file and not x.has_checksums and x.describes(content) for x in formats())
