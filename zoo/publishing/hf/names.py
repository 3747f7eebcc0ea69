"""From Hugging Face's tensors to the zoo's parameters and back: names, layouts and slices.

The zoo stacks what Hugging Face numbers (layers, experts), multiplies from the left (`x @ w`, so
that a weight is [in, out]), and keeps heads apart from their features. A family says it by one
`Tensor` a parameter, in the names of the parameter's logical axes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from zoo.sharding.axes import keystr, logical_axes

LAYER = "layer"  # the name here of the first axis of stacked layers
Range = tuple[int, int]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """Where a parameter is in a Hugging Face file.

    `name` is a template: a number stands for `{layer}` and `{experts}`, axes that the parameter
    stacks, and the family's prefix for `{prefix}`. `axes` are the tensor's axes as the parameter
    calls them ("" if they are the same), with a dot where one axis is several of the parameter's:
    "heads.head_dim embed". `part` says that the parameter is the i-th of n that lie side by side
    along the axis `part`.
    """

    name: str
    axes: str = ""
    part: tuple[int, int] | None = None


class Piece(NamedTuple):
    """One Hugging Face tensor's share of a parameter."""

    path: str  # of the parameter
    at: dict[str, int]  # along the axes that the parameter stacks


class Layout:
    """One parameter of a model, and the Hugging Face tensors that it is made of."""

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        names: tuple[str | None, ...],
        tensor: Tensor,
        prefix: str,
    ):
        self.tensor = tensor
        self.axes = tuple(name or LAYER for name in names)
        self.sizes = dict(zip(self.axes, shape, strict=True))
        fields = [field for _, field, _, _ in Formatter().parse(tensor.name) if field]
        self.numbered = [axis for axis in self.axes if axis in fields]
        inner = [axis for axis in self.axes if axis not in fields]
        self.factors = [group.split(".") for group in (tensor.axes or " ".join(inner)).split()]
        self._prefix = prefix
        named = [axis for group in self.factors for axis in group if axis != "part"]
        assert sorted(named) == sorted(inner), f"the map of {path} has {named}, not {inner}"

    def name(self, index: Mapping[str, int]) -> str:
        """The name of the tensor at these numbers."""
        return self.tensor.name.format(prefix=self._prefix, **index)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of the tensors."""
        return tuple(math.prod(self._size(axis) for axis in group) for group in self.factors)

    def names(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Each tensor's name and numbers."""
        for numbers in product(*(range(self.sizes[axis]) for axis in self.numbered)):
            index = dict(zip(self.numbered, numbers, strict=True))
            yield self.name(index), index

    def read(self, slices: Index, dtype: Any, read: Callable[[str, Index], np.ndarray]) -> Any:
        """The part of the parameter at `slices`, made of parts from `read(name, slices)`."""
        ranges = {
            axis: s.indices(size)[:2]
            for (axis, size), s in zip(self.sizes.items(), slices, strict=True)
        }
        out = np.empty([stop - start for start, stop in ranges.values()], dtype)
        where, cuts, shape = self._tensor_slices(ranges)
        order = [self._inner().index(axis) for axis in self.axes if axis not in self.numbered]
        for numbers in product(*(range(*ranges[axis]) for axis in self.numbered)):
            index = dict(zip(self.numbered, numbers, strict=True))
            part = read(self.name(index), where).reshape(shape)[cuts].transpose(order)
            out[self._place(index, ranges)] = part
        return out

    def write(self, index: Mapping[str, int], part: np.ndarray) -> np.ndarray:
        """The tensor of these numbers, given the parameter there; without its `part` neighbours."""
        rest = [axis for axis in self.axes if axis not in self.numbered]
        order = [rest.index(axis) for axis in self._inner()]
        shape = [math.prod(self.sizes.get(axis, 1) for axis in group) for group in self.factors]
        return np.ascontiguousarray(part.transpose(order).reshape(shape))

    def at(self, index: Mapping[str, int]) -> tuple[Any, ...]:
        """The index of the parameter at these numbers."""
        return tuple(index.get(axis, slice(None)) for axis in self.axes)

    def _place(self, index: Mapping[str, int], ranges: Mapping[str, Range]) -> tuple[Any, ...]:
        return tuple(
            index[axis] - ranges[axis][0] if axis in index else slice(None) for axis in self.axes
        )

    def _inner(self) -> list[str]:
        return [axis for group in self.factors for axis in group if axis != "part"]

    def _size(self, axis: str) -> int:
        return self.tensor.part[1] if axis == "part" and self.tensor.part else self.sizes[axis]

    def _tensor_slices(self, ranges: Mapping[str, Range]) -> tuple[Index, Index, list[int]]:
        """The slices to read of a tensor, and how to cut them to the ranges, once in that shape."""
        where, cuts, shape = [], [], []
        for group in self.factors:
            low, high = 0, 1  # of what is read, in blocks as small as the factors so far make them
            for axis in group:
                size = self._size(axis)
                start, stop = self._part() if axis == "part" else ranges[axis]
                cut = slice(None)
                if high - low > 1:  # of several blocks the whole is read, and then cut
                    cut, start, stop = slice(start, stop), 0, size
                low, high = low * size + start, (high - 1) * size + stop
                if axis != "part":
                    cuts.append(cut)
                    shape.append(stop - start)
            where.append(slice(low, high))
        return tuple(where), tuple(cuts), shape

    def _part(self) -> Range:
        index = self.tensor.part[0] if self.tensor.part else 0
        return index, index + 1


def layouts(skeleton: PyTree, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Layout]:
    """The layout of each parameter of a model (or of its skeleton), by its path."""
    names = logical_axes(skeleton)
    found = {}
    for (path, leaf), axes in zip(
        jax.tree_util.tree_leaves_with_path(skeleton),
        jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple)),
        strict=True,
    ):
        if hasattr(leaf, "shape"):
            key = keystr(path)
            found[key] = Layout(key, leaf.shape, axes, tensors[key], prefix)
    assert found.keys() == tensors.keys(), found.keys() ^ tensors.keys()
    return found


def pieces(found: Mapping[str, Layout]) -> dict[str, list[Piece]]:
    """The pieces of each Hugging Face tensor, in the order in which they lie in it."""
    table: dict[str, list[Piece]] = {}
    for path, layout in found.items():
        for name, index in layout.names():
            table.setdefault(name, []).append(Piece(path, index))
    for parts in table.values():
        parts.sort(key=lambda piece: (found[piece.path].tensor.part or (0, 1))[0])
    return table
