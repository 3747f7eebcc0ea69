"""The model that adapters are for: its name, and how another one of its shape is told from it."""

import logging
import math
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
from zoo.nn.products import is_derived, is_quantized
from zoo.publishing.errors import PublishError
from zoo.publishing.shelf import find, find_here
from zoo.sharding.axes import keystr
from zoo.sharding.placement import on_host
from zoo.wrappers import lora

_NUM_VALUES = 64
_FAR = 0.5  # casts and quantisation move values by less, and other models' are 1.4 away
_NEAR = 0.02  # casts move values by 0.004, 4 bits by 0.1
logger = logging.getLogger(__name__)


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
    quantized: tuple[str, ...] | None = None
    """The kinds of its quantised matrices; None if they are not known."""
    eos_ids: tuple[int, ...] = ()
    """The ids that end the texts of the model with its adapters."""

    def folder(self) -> Path:
        """The folder of the model; a hub id is looked for in the revision that was adapted."""
        return find(self.name, revision=self.revision)

    def check_values(self, adapted: PyTree, where: Path) -> None:
        """Raise a PublishError if a model with adapters is far from the one that they are for.

        One that is near, as by another quantisation, is a warning.
        """
        far, kinds = "", quantized_kinds(adapted)
        for path, node in _trained(adapted).items():
            wanted = np.array(self.sample.get(path, []), np.float32)
            distance = min(_distance(wanted, x) for x in _values(node)) if len(wanted) else 0.0
            if distance > _FAR:
                raise PublishError(
                    f"{where} holds adapters of {self.name!r}, and the model is another one of the "
                    f"same shape: its {path} has other values"
                )
            if distance > _NEAR:
                far = f"its {path} is {distance:.0%} away: give the model that they were trained on"
        if self.quantized is not None and kinds != self.quantized:
            kind = next(
                (x for x in self.quantized if x != "int8"), next(iter(self.quantized), None)
            )
            far = (
                f"which was {', '.join(self.quantized) or 'not quantised'} and now is "
                f"{', '.join(kinds) or 'not quantised'}: load it with quantize={kind!r}"
            )
        if far:
            logger.warning(
                f"{where} holds adapters that were trained over other values than these of "
                f"{self.name!r}, {far}"
            )


def locate(name: Path | str) -> tuple[str, Path | None, str | None]:
    """The name of a base as it is stored, its folder on this machine, and its revision."""
    known = Path(name).expanduser().exists()
    folder = find_here(name)
    is_snapshot = not known and folder is not None and folder.parent.name == "snapshots"
    stored = str(Path(name).expanduser().absolute()) if known else str(name)
    return stored, folder, folder.name if is_snapshot and folder is not None else None


def sample_of(adapted: PyTree) -> dict[str, list[float]]:
    """A sample of what the trained adapters of a model are on; all processes call it."""
    path, node = next(iter(_trained(adapted).items()))
    return {path: _values(node)[0].tolist()}


def quantized_kinds(model: PyTree) -> tuple[str, ...]:
    """The kinds of a model's quantised matrices, each once."""
    leaves = jax.tree.leaves(model, is_leaf=is_quantized)
    return tuple(sorted({x.kind for x in leaves if is_quantized(x)}))


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
        quantized, eos_ids = values.get("quantized"), tuple(values.get("eos_ids", ()))
        quantized = quantized if quantized is None else tuple(quantized)
        check_value("base.quantized", quantized, tuple[str, ...] | None)
        check_value("base.eos_ids", eos_ids, tuple[int, ...])
        check_value("the name of the base", name, str | None)
        is_commit = revision is not None and re.fullmatch(r"\w[\w.-]*", revision)
        require(revision is None or bool(is_commit), f"revision={revision!r}: must be a commit")
        return Base(name or "", revision, checksum, sample, quantized, eos_ids)
    except (TypeError, ValueError) as error:
        raise PublishError(f"{where}: {error}") from error


def _trained(model: PyTree) -> dict[str, lora.Adapted]:
    leaves = jtu.tree_leaves_with_path(model, is_leaf=lora.is_adapted)
    return {keystr(path): x for path, x in leaves if lora.is_adapted(x) and not x.frozen}


def _values(node: lora.Adapted) -> list[np.ndarray]:
    """Values of the matrix that an adapter is on, with other adapters below it and without.

    They are in fp32, of the last axis, and of the first layer of stacked ones.
    """
    num_stacked = node.down.ndim - node.num_inputs - 1
    matrix: Any = jax.tree.map(lambda x: x[(0,) * num_stacked], node.weight)
    found = []
    while True:
        whole = matrix.value() if is_derived(matrix) else matrix
        row = whole[(0,) * (whole.ndim - 1)][:_NUM_VALUES]
        found.append(on_host(row).astype(np.float32))
        if not lora.is_adapted(matrix):
            return found
        matrix = matrix.weight


def _distance(wanted: np.ndarray, found: np.ndarray) -> float:
    """The distance of some values, as a share of their size."""
    if wanted.shape != found.shape:
        return math.inf
    size = max(np.linalg.norm(wanted), np.linalg.norm(found))
    return float(np.linalg.norm(wanted - found) / size) if size else 0.0
