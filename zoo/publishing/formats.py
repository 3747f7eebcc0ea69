"""The formats of folders of models and of adapters, and how one is opened: skeleton, then arrays.

A package brings a format as an entry point of the group `zoo.formats`, whose object is a `Format`,
or an `AdapterFormat`; the name of the entry point is the format's.
"""

import abc
import importlib.metadata
import json
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums, plugins
from zoo.common.checksums import Digest
from zoo.nn.precision import DTYPES
from zoo.publishing import PublishError
from zoo.wrappers import lora

CONFIG, WEIGHTS, METRICS, README = "config.json", "model.safetensors", "metrics.json", "README.md"
CACHE = Path("~/.cache/zoo/models")
QUANTIZATIONS = "zoo.quantizations"
_GROUP = "zoo.formats"


@dataclass(frozen=True)
class Options:
    """The options of `zoo.load`, checked but for what depends on the folder.

    Raises:
        PublishError: an unknown dtype, or an unknown kind of quantised matrices.
    """

    mesh: Mesh | sharding.Layout | None = None
    dtype: DTypeLike | None = None
    quantize: str | None = None
    overrides: Mapping[str, Any] | None = None
    like: PyTree = None
    ignore: Collection[str] | None = ()
    """None ignores all unknown fields."""
    weights: bool = True
    """Whether the weights are there: a hub's model may be planned without them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        kind = self.quantize
        if kind is not None and kind not in (names := plugins.names(QUANTIZATIONS)):
            raise PublishError(f"quantize={kind!r}: choose one of {', '.join(names)}, or None")


def parse_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """A floating point dtype, also by the zoo's names: "bf16", "fp16" and "fp32".

    Raises:
        PublishError: `dtype` is no floating point dtype; the message names the choices.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise PublishError(
            f"dtype={dtype!r}: parameters can be cast to floating point types only; choose one of "
            f"{[*DTYPES]}, or a dtype such as 'bfloat16' or jnp.float32"
        )
    return found


class Opened(NamedTuple):
    """A folder whose description is read and checked, and whose arrays are not."""

    skeleton: PyTree
    """The skeleton of what `load` returns, with its dtypes."""
    load: Callable[[PyTree], PyTree]
    """From the skeleton, or one with other static fields, to the model, by each device's slices."""


@dataclass(frozen=True)
class Base:
    """The model that adapters are for, as their folder describes it."""

    name: str
    """A folder, a name on the shelf or a hub id; "" if it is not known."""
    revision: str | None = None
    """The commit of a hub id."""
    checksum: str | None = None
    """Checksum of its weights' files; None if they were not on this machine."""
    quantized: tuple[str, ...] | None = None
    """The kinds of its quantised matrices; None if they are not known."""
    eos_ids: tuple[int, ...] = ()
    """The ids that end the texts of the model with its adapters."""


class Source(NamedTuple):
    """The source of a model, some of which is saved with it."""

    dtypes: Mapping[str, Any]
    """The dtype to store each parameter in, by its path."""
    tokenizer: Any
    folder: Path | None
    """The folder, in any format, that the model came from."""


class Format(abc.ABC):
    """A format of the folders of models. Its errors are PublishErrors, before any compute."""

    config = CONFIG
    """The file that describes the model."""
    has_checksums = False
    """Whether a folder without checksums is damaged; others verify the checksums that are there."""

    @abc.abstractmethod
    def describes(self, folder: Path) -> bool:
        """Whether a folder with a file named `config` is in this format."""

    @abc.abstractmethod
    def open(self, folder: Path, options: Options, base: PyTree = None) -> Opened:
        """The model in a folder; `zoo.load` itself sees to `options.overrides`.

        For adapters, `base` is the model that they are for, or its skeleton.
        """

    def dtypes(self, folder: Path) -> tuple[Mapping[str, Any], Any]:
        """The dtypes of a model's parameters by path, and the one of others; None for their own."""
        return {}, None

    def write(self, folder: Path | None, model: PyTree, source: Source) -> dict[str, Digest]:
        """Write a model's description and its weights.

        All processes call it, because arrays are gathered from all; those without a folder write
        nothing. The tokenizer's files are there already. Returns the checksums of the files that
        have them.
        """
        raise NotImplementedError

    def weight_files(self, folder: Path) -> list[str]:
        """The names of the files that hold the weights."""
        return [WEIGHTS]

    def sampling(self, folder: Path) -> tuple[Path, dict[str, Any]] | None:
        """The file with settings of sampling, and these by `zoo.Sampling`'s names; None without."""
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


class AdapterFormat(Format):
    """A format of the folders of adapters without their model."""

    base_field: str
    """The field of the description that names the model."""

    @abc.abstractmethod
    def base(self, folder: Path) -> Base:
        """The base of the adapters in a folder."""

    @abc.abstractmethod
    def check(self, model: PyTree, config: lora.Config) -> None:
        """Raise a PublishError if the format lacks such adapters; targets are the model's paths."""

    @abc.abstractmethod
    def write_adapters(
        self, folder: Path | None, model: PyTree, config: lora.Config, base: Base
    ) -> None:
        """Write the adapters of a model; all processes call it, as for `write`."""

    def modules(self, model: PyTree) -> dict[str, str]:
        """The format's own names of the modules that hold a model's matrices, by their paths."""
        return {}


def formats() -> dict[str, Format]:
    """The formats of models by name, the zoo's own first."""
    return {name: x for name, x in _all().items() if not isinstance(x, AdapterFormat)}


def for_adapters() -> AdapterFormat:
    """The format in which adapters are saved, the first that is installed."""
    if found := next((x for x in _all().values() if isinstance(x, AdapterFormat)), None):
        return found
    raise PublishError("no format of adapters is installed")


def _all() -> dict[str, Format]:
    return {name: plugins.find(_GROUP, name) for name in plugins.names(_GROUP)}


def name_of(folder: Path) -> str:
    """The name of the format of a folder.

    Raises:
        PublishError: the folder is damaged, or in no format that is installed.
    """
    # Beside adapters the configuration of their base may lie.
    for name, found in sorted(_all().items(), key=lambda x: not isinstance(x[1], AdapterFormat)):
        if (folder / found.config).is_file() and found.describes(folder):
            return name
    if (folder / checksums.NAME).exists():
        verify(folder)
    read_json(folder / CONFIG)
    check_finished(folder)
    raise PublishError(
        f"{folder / CONFIG} describes no model in a format that is installed: "
        + ", ".join(formats())
    )


def check_finished(folder: Any) -> None:
    """Raise a PublishError for the folder or address of a run, which gets its model at the end."""
    if (folder / "checkpoints").is_dir():
        raise PublishError(
            f"{folder} is a run that has not finished: it has no model yet; the command that began "
            "it resumes it"
        )


def of(folder: Path) -> Format:
    """The format of a folder; errors as for `name_of`."""
    return _all()[name_of(folder)]


def of_id(name: object) -> Format | None:
    """The format of a hub id, by its form; None for any other name."""
    return next((x for x in _all().values() if x.is_id(str(name))), None)


def config_files() -> list[str]:
    """The names of the files of which each folder of a model or of adapters has one."""
    return [*dict.fromkeys(x.config for x in _all().values())]


def json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; empty if it holds none, or is damaged."""
    try:
        return read_json(path)
    except PublishError:
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a PublishError if the file is missing, or holds none."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds no object, but {reprlib.repr(values)}")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise PublishError(f"{path} is damaged: {error}") from error


def verify(folder: Path, *, by_parts: bool = False) -> None:
    """Raise a PublishError if a folder's files do not match their checksums.

    With `by_parts` files whose parts have checksums are left to their readers.
    """
    if problems := checksums.problems(folder, by_parts=by_parts):
        raise damaged(folder, problems)


def damaged(folder: Path, problems: Sequence[str]) -> PublishError:
    """An error with a line per damaged file of a folder."""
    remedy = "Restore the files from a copy, or publish the model again."
    if CACHE.expanduser() in folder.parents:
        remedy = f"Remove {folder}, and it is fetched again."
    return PublishError(
        f"{folder} is damaged or not a model of the zoo:\n  "
        + "\n  ".join(problems)
        + f"\n{remedy}"
    )


def version() -> str:
    """The version of the zoo, which is stored with each model."""
    try:
        return importlib.metadata.version("zoo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
