"""The safetensors files of a folder: one, or several with an index; read slice by slice.

Nothing in a file is executed: safetensors are a table of names and numbers, and pickled weights are
refused.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo.common.files import AddressError, inside
from zoo.publishing import PublishError
from zoo.publishing.formats import WEIGHTS
from zoo.publishing.tensors import outline, slice_reader

INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".ckpt", ".pt", ".pth")
# Old names of tensors, which some newer files have again.
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
FLOATS = ("float64", "float32", "float16", "bfloat16")


class Stored(NamedTuple):
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class Weights:
    """The tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = _read_index(folder)
        files = sorted(set(index.values())) if index else [WEIGHTS]
        self.tensors: dict[str, Stored] = {}
        self._in_files: dict[str, str] = {}  # of tensors with an old name
        for file in files:
            for in_file, x in outline(folder / file).items():
                name = in_file
                if index and index.get(name) != file:
                    raise PublishError(
                        f"{folder / file} holds {name}, which {INDEX} has in {index.get(name)}"
                    )
                for old in (x for x in _OLD if name.endswith(x)):
                    self._in_files[name := name.removesuffix(old) + _OLD[old]] = in_file
                self.tensors[name] = Stored(file, x.shape, str(x.dtype))
        there = {self._in_files.get(name, name) for name in self.tensors}
        if lost := sorted(index.keys() - there):
            raise PublishError(
                f"{folder / INDEX} names tensors that their files lack: "
                + ", ".join(f"{name} in {index[name]}" for name in lost)
            )

    @contextlib.contextmanager
    def reader(self) -> Iterator[Any]:
        """A context with `read(name, slices)`, which returns a slice of a tensor as numpy."""
        with slice_reader() as read:
            yield lambda name, slices: read(
                self.folder / self.tensors[name].file, self._in_files.get(name, name), slices
            )


Read = Callable[[str, tuple[slice, ...]], np.ndarray]
# A tensor that is made of others: what it is, and a slice of it, given slices of the others.
Made = tuple[Stored, Callable[[tuple[slice, ...], Read], np.ndarray]]


class Derived(Weights):
    """The tensors of a folder, some of them made of others as they are read."""

    def __init__(self, weights: Weights, made: Mapping[str, Made], gone: Collection[str]):
        self.folder, self._made, self._stored = weights.folder, made, weights
        self.tensors = {x: y for x, y in weights.tensors.items() if x not in gone}
        self.tensors |= {name: stored for name, (stored, _) in made.items()}

    @contextlib.contextmanager
    def reader(self) -> Iterator[Any]:
        """As `Weights.reader`."""
        with self._stored.reader() as read:
            made = self._made
            yield lambda name, at: made[name][1](at, read) if name in made else read(name, at)


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold the weights of a folder."""
    return sorted(set(_read_index(folder).values())) or [WEIGHTS]


def are_present(folder: Path) -> bool:
    """Whether all files of a folder's weights are there: a hub's model may have none."""
    if not any((folder / name).is_file() for name in (INDEX, WEIGHTS)):
        return False
    return all((folder / name).is_file() for name in weight_files(folder))


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index, which is checked; empty if one file holds all."""
    path = folder / INDEX
    if not path.is_file():
        if (folder / WEIGHTS).is_file():
            return {}
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
        if pickled:
            raise PublishError(
                f"{folder} has pickled weights ({', '.join(pickled)}), and opening such a file "
                "runs any code that is in it: load and save it by transformers, or take a "
                f"revision with {WEIGHTS}"
            )
        raise PublishError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    try:
        index = json.loads(path.read_text())["weight_map"]
        if not all(isinstance(x, str) for pair in index.items() for x in pair) or not index:
            raise ValueError("weight_map has to map names of tensors to names of files")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PublishError(f"{path} is damaged: {error!r}") from error
    for name, file in index.items():
        is_beside = False
        with contextlib.suppress(AddressError):
            is_beside = inside(folder, file, path).parent == folder
        if not is_beside:
            raise PublishError(
                f"{path}: {name} lies in {file!r}, outside the folder; files are named without path"
            )
        if not file.endswith(".safetensors"):
            raise PublishError(f"{path}: {name} lies in {file!r}, which is no safetensors file")
    if (folder / WEIGHTS).is_file() and {*index.values()} != {WEIGHTS}:
        raise PublishError(
            f"{folder} has both {WEIGHTS}, which transformers opens, and {INDEX}, which names "
            "other files: remove the one that is not the model"
        )
    return index
