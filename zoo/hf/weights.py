"""The safetensors files of a folder: one, or several with an index; read slice by slice.

Nothing in a file is executed: safetensors are a table of names and numbers, and pickled weights are
refused.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zoo.common.checksums import Digest
from zoo.common.files import AddressError, inside
from zoo.publishing import PublishError
from zoo.publishing.tensors import Tensor, open_file, slice_reader, write_file

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
PICKLED = (".bin", ".ckpt", ".pt", ".pth")
DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_SHARD_BYTES = 5 * 10**9


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
        for file in files:
            with open_file(self.folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118
                    if index and index.get(name) != file:
                        raise PublishError(
                            f"{folder / file} holds {name}, which {INDEX} has in {index.get(name)}"
                        )
                    part = opened.get_slice(name)
                    shape = tuple(part.get_shape())
                    self.tensors[name] = Stored(file, shape, part.get_dtype())
        if lost := sorted(index.keys() - self.tensors.keys()):
            raise PublishError(
                f"{folder / INDEX} names tensors that their files lack: "
                + ", ".join(f"{name} in {index[name]}" for name in lost)
            )

    @contextlib.contextmanager
    def reader(self) -> Iterator[Any]:
        """A context with `read(name, slices)`, which returns a slice of a tensor as numpy."""
        with slice_reader() as read:
            yield lambda name, slices: read(self.folder / self.tensors[name].file, name, slices)


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold the weights of a folder."""
    return sorted(set(_read_index(folder).values())) or [WEIGHTS]


def are_present(folder: Path) -> bool:
    """Whether all files of a folder's weights are there: of a hub's model none may be."""
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
            raise ValueError("weight_map has to map the names of tensors to those of files")
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


def shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most five gigabytes, as transformers cuts them."""
    group: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if group and num_bytes(group) + num_bytes({name: tensor}) > _SHARD_BYTES:
            yield group
            group = {}
        group[name] = tensor
    yield group


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The total size of the tensors."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors.values())


def write_weights(folder: Path | None, tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """Write tensors to one file, or to several with an index, one after the other.

    All processes call it; those without a folder take part in gathering, and write nothing. Returns
    the checksums of the files by name.
    """
    groups = [*shards(tensors)]
    names = [WEIGHTS]
    if len(groups) > 1:
        names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        files = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        weight_map = {name: files[name] for name in sorted(files)}
        index = {"metadata": {"total_size": num_bytes(tensors)}, "weight_map": weight_map}
        if folder is not None:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return {  # transformers needs this metadata
        name: write_file(folder and folder / name, group, {"format": "pt"})
        for name, group in zip(names, groups, strict=True)
    }
