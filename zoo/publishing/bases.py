"""The model that adapters are for: its name, and how another one of its shape is told from it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from zoo.base.configuration import check_value, require
from zoo.nn.parameters import is_derived
from zoo.publishing.errors import PublishError
from zoo.publishing.shelf import find, find_here
from zoo.sharding.axes import keystr
from zoo.sharding.placement import on_host
from zoo.wrappers import lora

_NUM_VALUES = 64
_FAR = 0.5  # casts and quantisation move values by less, and other models' are 1.4 away


@dataclass(frozen=True)
class Base:
    """The model that adapters are for, as their folder describes it."""

    name: str
    """A folder, a name on the shelf or a hub id; "" if it is not known."""
    revision: str | None = None
    """Of a hub id, the commit."""
    checksum: str | None = None
    """Of the files of its weights; None if they were not on this machine."""
    sample: Mapping[str, list[float]] = field(default_factory=dict)
    """Some values of one of its matrices, by the matrix's path."""

    def folder(self) -> Path:
        """The folder of the model; a hub id is looked for in the revision that was adapted."""
        return find(self.name, revision=self.revision)

    def check_values(self, adapted: PyTree, where: Path) -> None:
        """Raise a PublishError if a model with adapters is far from the one that they are for."""
        for path, node in _adapted(adapted).items():
            wanted, found = np.array(self.sample.get(path, []), np.float32), _values(node)
            if len(wanted) == 0 or len(wanted) != len(found):
                continue
            size = max(np.linalg.norm(wanted), np.linalg.norm(found))
            if np.linalg.norm(wanted - found) > _FAR * size:
                raise PublishError(
                    f"{where} holds adapters of {self.name!r}, and the model is another one of the "
                    f"same shape: its {path} has other values"
                )


def locate(name: Path | str) -> tuple[str, Path | None, str | None]:
    """The name of a base as it is stored, its folder on this machine, and its revision."""
    known = Path(name).expanduser().exists()
    folder = find_here(name)
    is_snapshot = not known and folder is not None and folder.parent.name == "snapshots"
    stored = str(Path(name).expanduser().absolute()) if known else str(name)
    return stored, folder, folder.name if is_snapshot and folder is not None else None


def sample_of(adapted: PyTree) -> dict[str, list[float]]:
    """A sample of what adapters are on; all processes call it."""
    path, node = next(iter(_adapted(adapted).items()))
    return {path: _values(node).tolist()}


def parse(name: Any, revision: Any, values: Any, where: Path) -> Base:
    """A base out of JSON.

    Raises:
        PublishError: a value of another type; it names the file and the field.
    """
    try:
        check_value("revision", revision, str | None)
        check_value("base", values, dict)
        checksum, sample = values.get("weights"), values.get("sample", {})
        check_value("base.weights", checksum, str | None)
        check_value("base.sample", sample, dict)
        for path, numbers in sample.items():
            check_value(f"base.sample[{path!r}]", numbers, list)
            for number in numbers:
                check_value(f"base.sample[{path!r}]", number, float)
        check_value("the name of the base", name, str | None)
        is_commit = revision is not None and re.fullmatch(r"[\w.-]+", revision)
        require(revision is None or bool(is_commit), f"revision={revision!r}: must be a commit")
        return Base(name or "", revision, checksum, sample)
    except (TypeError, ValueError) as error:
        raise PublishError(f"{where}: {error}") from error


def _adapted(model: PyTree) -> dict[str, lora.Adapted]:
    leaves = jtu.tree_leaves_with_path(model, is_leaf=lora.is_adapted)
    return {keystr(path): node for path, node in leaves if lora.is_adapted(node)}


def _values(node: lora.Adapted) -> np.ndarray:
    """Values of the last axis of what an adapter is on, in fp32; of its first layer, if stacked."""
    num_stacked = node.down.ndim - node.num_inputs - 1
    matrix = jax.tree.map(lambda x: x[(0,) * num_stacked], node.weight)
    matrix = matrix.value() if is_derived(matrix) else matrix
    row = matrix[(0,) * (matrix.ndim - 1)][:_NUM_VALUES]
    return on_host(row).astype(np.float32)
