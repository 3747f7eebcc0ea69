"""Folders of models and of adapters: their files, and their formats, the zoo's own among them.

A package brings a format as an entry point of the group `zoo.formats` or `zoo.adapter_formats`,
whose object is a `Format` or an `AdapterFormat`; the name of the entry point is the format's.
"""

import abc
import contextlib
import importlib.metadata
import json
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums, files, plugins
from zoo.common.addresses import is_remote
from zoo.common.checksums import Digest
from zoo.nn.precision import DTYPES
from zoo.publishing import PublishError
from zoo.publishing.uploads import CACHE, check_replaceable, uploading
from zoo.wrappers import lora

CONFIG, WEIGHTS, METRICS, README = "config.json", "model.safetensors", "metrics.json", "README.md"
QUANTIZATIONS = "zoo.quantizations"
_MODELS, _ADAPTERS = "zoo.formats", "zoo.adapter_formats"


@dataclass(frozen=True)
class Options:
    """The options of `zoo.load`, checked but for those that depend on the folder.

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
    """Of what `load` returns, with its dtypes."""
    load: Callable[[PyTree], PyTree]
    """The skeleton, or it with other static fields, with the arrays; each device's own slices."""
    adapters: lora.Config = lora.Config()
    """Of a folder of adapters, whose skeleton is that of their arrays in the adapted model."""


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
    def open(self, folder: Path, options: Options) -> Opened:
        """The model in a folder; `zoo.load` itself sees to `options.overrides`."""

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
    def open(self, folder: Path, base: PyTree, options: Options) -> Opened:
        """The adapters in a folder, for a model or its skeleton."""

    @abc.abstractmethod
    def check(self, model: PyTree, config: lora.Config) -> None:
        """Raise a PublishError if the format lacks such adapters; targets are the model's paths."""

    @abc.abstractmethod
    def write(self, folder: Path | None, model: PyTree, config: lora.Config, base: Base) -> None:
        """Write the adapters of a model; all processes call it, as of `Format.write`."""

    def modules(self, model: PyTree) -> dict[str, str]:
        """The format's own names of the modules that hold a model's matrices, by their paths."""
        return {}


def formats() -> dict[str, Format]:
    """The formats of models by name, the zoo's own first."""
    return {name: plugins.find(_MODELS, name) for name in plugins.names(_MODELS)}


def adapter_formats() -> list[AdapterFormat]:
    """The formats of adapters; those of `zoo.save_adapters` are written in the first."""
    return [plugins.find(_ADAPTERS, name) for name in plugins.names(_ADAPTERS)]


def name_of(folder: Path) -> str:
    """The name of the format of the model in a folder.

    Raises:
        PublishError: the folder is damaged, or in no format that is installed.
    """
    for name, found in formats().items():
        path = folder / found.config
        if path.is_file() and found.describes(path.read_bytes()):
            return name
    if (folder / checksums.NAME).exists():
        verify(folder)
    read_json(folder / CONFIG)
    raise PublishError(
        f"{folder / CONFIG} describes no model in a format that is installed: "
        + ", ".join(formats())
    )


def of(folder: Path) -> Format:
    """The format of the model in a folder; errors as of `name_of`."""
    return formats()[name_of(folder)]


def of_id(name: object) -> Format | None:
    """The format that a hub id is of, by its form; None for any other name."""
    return next((x for x in formats().values() if x.is_id(str(name))), None)


def of_adapters(folder: Path) -> AdapterFormat | None:
    """The format of the adapters in a folder; None if it holds none, or a whole model."""
    found = (x for x in adapter_formats() if (folder / x.config).is_file())
    return next((x for x in found if x.has(folder)), None)


def config_files() -> list[str]:
    """The names of the files of which each folder of a model or of adapters has one."""
    models = [x.config for x in formats().values()]
    return [*dict.fromkeys([*models, *(x.config for x in adapter_formats())])]


def needs_no_checksums(file: str, content: bytes) -> bool:
    """Whether a file of this name is that of a folder whose format has no checksums."""
    if any(x.config == file for x in adapter_formats()):
        return True
    every = formats().values()
    return any(x.config == file and not x.has_checksums and x.describes(content) for x in every)


@contextlib.contextmanager
def replacing(folder: Path | str) -> Iterator[Path | None]:
    """A new folder to fill, which then replaces `folder`; None except on process 0.

    What replaces a folder at an address is filled here, and copied there.

    Raises:
        PublishError: the folder has files that no earlier save wrote.
        AddressError: the store at an address cannot be reached, or refuses.
    """
    if is_remote(folder):
        check_replaceable(folder, (README,))
        making = uploading(folder, last=CONFIG)
    else:
        folder = files.local_path(folder, "folder").absolute()
        _check_replaceable(folder)
        making = _renaming(folder)
    if jax.process_index() == 0:
        with making as new:
            yield new
    else:
        yield None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"zoo.save {folder}")


@contextlib.contextmanager
def _renaming(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.unfinished(folder) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(temporary / "old")
        new.rename(folder)


def verify(folder: Path, *, by_parts: bool = False) -> None:
    """Raise a PublishError if a folder's files do not match their checksums.

    With `by_parts` files whose parts have checksums are left to who reads them.
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


def json_object(content: bytes) -> dict[str, Any]:
    """The object that JSON holds; empty if it holds none, or is damaged."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


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


def _check_replaceable(folder: Path) -> None:
    """Refuse to delete files that no earlier save wrote."""
    if folder.exists() and not folder.is_dir():
        raise PublishError(f"{folder} is a file: a model is a folder")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if others := sorted(found - checksums.listed(folder) - {README, checksums.NAME}):
        raise PublishError(
            f"{folder} has files that are not part of a model: {', '.join(others)}. Move them "
            "away, or save elsewhere"
        )


def version() -> str:
    """The version of the zoo, which is stored with each model."""
    try:
        return importlib.metadata.version("zoo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
