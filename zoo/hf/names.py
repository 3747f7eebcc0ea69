"""From Hugging Face's tensors to the zoo's parameters and back: names, layouts and slices.

The zoo stacks the layers and experts that Hugging Face numbers, has weights as [in, out] (`x @ w`),
and keeps heads and their features on separate axes. A family describes this by one `Tensor` per
parameter, in the names of the parameter's logical axes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from zoo.sharding.axes import keystr, map_parameters

LAYER = "layer"  # the name of the first axis of stacked layers
Range = tuple[int, int]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """The place of a parameter in a Hugging Face file.

    `name` is a template, in which `{layer}` and `{experts}`, axes that the parameter stacks, become
    numbers, and `{prefix}` the family's prefix. `axes` are the tensor's axes by the parameter's
    names ("" if they are the same); a dot joins axes of the parameter that are one of the tensor:
    "heads.head_dim embed". `part` = (i, n): the parameter is the i-th of n along the axis `part`.
    """

    name: str
    axes: str = ""
    part: tuple[int, int] | None = None


def table(text: str, *, layer: str) -> dict[str, Tensor]:
    """The places of parameters by path: per line path, name, axes, and of parts their i/n.

    The names of parameters of `blocks` follow `layer`.
    """
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        path, name, *axes = line.split()
        part = None
        if axes and "/" in axes[-1]:
            number, count = axes.pop().split("/")
            part = int(number), int(count)
        name = layer + name if path.startswith("blocks.") else name
        found[path] = Tensor(name, " ".join(axes), part)
    return found


class Piece(NamedTuple):
    """One Hugging Face tensor's share of a parameter."""

    path: str  # of the parameter
    at: dict[str, int]  # along the axes that the parameter stacks


class Layout:
    """One parameter of a model, and the Hugging Face tensors that hold it."""

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
        # The axes that each tensor has, in the parameter's order and in the tensor's.
        self._ours = [axis for axis in self.axes if axis not in fields]
        self.factors = [group.split(".") for group in (tensor.axes or " ".join(self._ours)).split()]
        self._theirs = [axis for group in self.factors for axis in group if axis != "part"]
        self.prefix = prefix
        self._part, self._num_parts = tensor.part or (0, 1)
        assert sorted(self._theirs) == sorted(self._ours), (path, self._theirs, self._ours)

    def name(self, index: Mapping[str, int]) -> str:
        """The name of the tensor with these numbers."""
        return self.tensor.name.format(prefix=self.prefix, **index)

    def resized(self, sizes: Mapping[str, int]) -> "Layout":
        """The layout of a parameter with other sizes of these axes."""
        found = copy.copy(self)
        found.sizes = {**self.sizes, **sizes}
        return found

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of the tensors."""
        return tuple(math.prod(self._size(axis) for axis in group) for group in self.factors)

    def names(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Each tensor's name and numbers."""
        for index in self._indices({axis: (0, size) for axis, size in self.sizes.items()}):
            yield self.name(index), index

    def read(self, slices: Index, dtype: Any, read: Callable[[str, Index], np.ndarray]) -> Any:
        """The parameter at `slices`, made of slices of tensors, `read(name, slices)`."""
        ranges = {
            axis: s.indices(size)[:2]
            for (axis, size), s in zip(self.sizes.items(), slices, strict=True)
        }
        out = np.empty([stop - start for start, stop in ranges.values()], dtype)
        where, cuts, shape = self._tensor_slices(ranges)
        order = [self._theirs.index(axis) for axis in self._ours]
        for index in self._indices(ranges):
            part = read(self.name(index), where).reshape(shape)[cuts].transpose(order)
            out[self.at({axis: i - ranges[axis][0] for axis, i in index.items()})] = part
        return out

    def write(self, index: Mapping[str, int], part: np.ndarray) -> np.ndarray:
        """The tensor with these numbers, given the parameter there; only its own `part`.

        Given some of the parameter's rows, these rows of it.
        """
        order = [self._ours.index(axis) for axis in self._theirs]
        sizes = dict(zip(self._ours, part.shape, strict=True))
        shape = [math.prod(sizes.get(axis, 1) for axis in group) for group in self.factors]
        return np.ascontiguousarray(part.transpose(order).reshape(shape))

    @property
    def part_axis(self) -> int | None:
        """The tensor's axis along which it holds several parameters; None if it holds one."""
        return next((i for i, group in enumerate(self.factors) if "part" in group), None)

    def rows(self, size: int) -> Iterator[dict[str, slice]]:
        """The tensor cut along its first axis to `size` values at most, as slices of an axis."""
        if not self._theirs:
            yield {}
            return
        first = self._theirs[0]
        one_row = math.prod(self.sizes[axis] for axis in self._theirs[1:])
        step = max(1, size // max(one_row, 1))
        for start in range(0, self.sizes[first], step):
            yield {first: slice(start, min(start + step, self.sizes[first]))}

    def at(self, index: Mapping[str, int | slice]) -> tuple[Any, ...]:
        """The index of the parameter at these numbers, and in these slices."""
        return tuple(index.get(axis, slice(None)) for axis in self.axes)

    def _indices(self, ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
        """The numbers of each tensor within the ranges."""
        for numbers in product(*(range(*ranges[axis]) for axis in self.numbered)):
            yield dict(zip(self.numbered, numbers, strict=True))

    def _size(self, axis: str) -> int:
        return self._num_parts if axis == "part" else self.sizes[axis]

    def _tensor_slices(self, ranges: Mapping[str, Range]) -> tuple[Index, Index, list[int]]:
        """The slices to read of a tensor, and how to cut them to the ranges, once in that shape."""
        ranges = {**ranges, "part": (self._part, self._part + 1)}
        where, cuts, shape = [], [], []
        for group in self.factors:
            low, high = 0, 1  # the range to read, in blocks of the remaining factors
            for axis in group:
                size = self._size(axis)
                start, stop = ranges[axis]
                cut = slice(None)
                if high - low > 1:  # several blocks are read as a whole, and then cut
                    cut, start, stop = slice(start, stop), 0, size
                low, high = low * size + start, (high - 1) * size + stop
                if axis != "part":
                    cuts.append(cut)
                    shape.append(stop - start)
            where.append(slice(low, high))
        return tuple(where), tuple(cuts), shape


def layouts(skeleton: PyTree, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Layout]:
    """The layout of each parameter of a model (or of its skeleton), by its path."""
    found: dict[str, Layout] = {}

    def add(path: tuple, axes: tuple[str | None, ...], leaf: Any) -> None:
        key = keystr(path)
        found[key] = Layout(key, leaf.shape, axes, tensors[key], prefix)

    map_parameters(add, skeleton)
    return found


def pieces(found: Mapping[str, Layout]) -> dict[str, list[Piece]]:
    """The pieces of each Hugging Face tensor, in their order in it."""
    table: dict[str, list[Piece]] = {}
    for path, layout in found.items():
        for name, index in layout.names():
            table.setdefault(name, []).append(Piece(path, index))
    for parts in table.values():
        parts.sort(key=lambda piece: (found[piece.path].tensor.part or (0, 1))[0])
    return table
