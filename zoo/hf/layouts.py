"""Where parameters lie in Hugging Face's tensors, to read and to write them.

The zoo stacks the layers and experts that Hugging Face numbers, has weights as [in, out] (`x @ w`),
and keeps heads and their features on separate axes. A family describes this by one `Tensor` per
parameter, in the names of the parameter's logical axes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from string import Formatter
from typing import Any

import numpy as np
from jaxtyping import PyTree

from zoo.publishing import tensors
from zoo.publishing.tensors import BLOCK_BYTES, parameters
from zoo.sharding.placement import gathered

LAYER = "layer"  # the name of the first axis of stacked layers
Range = tuple[int, int]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """The place of a parameter in a Hugging Face file.

    `name` is a template, in which `{layer}` and `{experts}`, axes that the parameter stacks, become
    numbers, and `{prefix}` the family's prefix. `axes` are the tensor's axes by the parameter's
    names ("" if they are the same); a dot joins axes of the parameter that are one of the tensor:
    "heads.head_dim embed"; 1 is an axis of one element. `part` = (i, n): the parameter is the i-th
    of n along the axis `part`. `rows` = (name, i): the parameter has the i-th share of the tensor's
    rows, by the family's split of that name; a split of one share gives another order of the rows.
    """

    name: str
    axes: str = ""
    part: tuple[int, int] | None = None
    rows: tuple[str, int] | None = None


# The numbers of the rows that each of the parameters in a tensor has, of a configuration.
Split = Callable[[Any], Sequence[np.ndarray]]


def consecutive(*sizes: int) -> list[np.ndarray]:
    """Rows of parameters one behind another."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


# The axes of the tensors of a parameter, by the end of its path: [out, in], as in torch's Linear.
_QUERIES, _KEYS = "heads.head_dim embed", "kv_heads.head_dim embed"
_AXES = {
    **dict.fromkeys(("wq", "wg", "wz", "wx", "recurrence.wv"), _QUERIES),
    **dict.fromkeys(("wk", "wv", "recurrence.wq"), _KEYS),
    **dict.fromkeys(("w_gate", "w_up"), "mlp embed"),
    **dict.fromkeys(("wb", "wc"), "groups.head_dim embed"),
    "wdt": "heads embed",
    **dict.fromkeys(("router", "shared_gate"), "routes embed"),
    **dict.fromkeys(("pooler.weight", "dense.weight"), "features embed"),
    **dict.fromkeys(("conv_q.weight", "conv_k.weight"), "kv_heads.head_dim 1 taps"),
    **dict.fromkeys(("conv_v.weight", "conv_x.weight"), "heads.head_dim 1 taps"),
    **dict.fromkeys(("conv_b.weight", "conv_c.weight"), "groups.head_dim 1 taps"),
    "wo": "embed heads.head_dim",
    "w_down": "embed mlp",
    "head.weight": "vocab embed",
    "norm_scale": "heads.head_dim",
}


def bias_of(path: str) -> str:
    """The path of the bias beside a matrix, or beside a norm's scale."""
    start, dot, last = path.rpartition(".")
    others = {"weight": "bias", "scale": "bias", "router": "b_router"}
    return start + dot + others.get(last, f"b{last[1:]}")  # as w_up and b_up


def table(text: str, *, layer: str) -> dict[str, Tensor]:
    """The places of parameters by path: per line path, name, and what is not as usual.

    That is the axes, or "T" for the usual ones as [in, out]; and how parameters share a tensor,
    "/" for equal parts of its first axis and "name:" for a split of its rows. Braces in a path
    list such parameters: `blocks.mlp.{w_gate,w_up}`. A name that ends in `*` is a module's, of its
    weight and of its bias. The names of parameters of `blocks` follow `layer`.
    """
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        place, name, *given = line.split()
        shared = given.pop() if given and given[-1][-1] in "/:" else ""
        start, _, rest = place.partition("{")
        inside, _, end = rest.partition("}")
        paths = [start + each + end for each in inside.split(",")]
        name = layer + name if place.startswith("blocks.") else name
        for number, path in enumerate(paths):
            *_, owner, last = ["", *path.split(".")]
            usual = _AXES.get(f"{owner}.{last}") or _AXES.get(last, "")
            axes = usual.split() if given in ([], ["T"]) else [*given]
            part = (number, len(paths)) if shared == "/" else None
            rows = (shared[:-1], number) if shared[1:] else None
            if part and not any("part" in axis for axis in axes):
                axes[0] = f"part.{axes[0]}"
            turned = " ".join(axes[::-1] if given == ["T"] else axes)
            if module := name.removesuffix("*") * name.endswith("*"):
                found[bias_of(path)] = Tensor(f"{module}bias", " ".join(axes[:1]), part, rows)
                found[path] = Tensor(f"{module}weight", turned, part, rows)
            else:
                found[path] = Tensor(name, turned, part, rows)
    return found


def filled(name: str, prefix: str, index: Mapping[str, int]) -> str:
    """A template's name, with a prefix and numbers; `{root}` is the prefix before "model."."""
    is_nested = prefix == "model." or prefix.endswith(".model.")
    root = prefix.removesuffix("model.") if is_nested else ""
    return name.format(prefix=prefix, root=root, **index)


class Layout:
    """One parameter of a model, and the Hugging Face tensors that hold it."""

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        names: tuple[str | None, ...],
        tensor: Tensor,
        prefix: str,
        layers: Sequence[int] | None = None,
        split: Sequence[np.ndarray] = (),
    ):
        """`layers` are the numbers of the layers that are stacked, if they are not all of them."""
        self.tensor, self._layers = tensor, layers
        self.own_rows = split[tensor.rows[1]] if tensor.rows else None
        self._num_rows = sum(map(len, split))
        self.axes = tuple(name or LAYER for name in names)
        self.sizes = dict(zip(self.axes, shape, strict=True))
        fields = [field for _, field, _, _ in Formatter().parse(tensor.name) if field]
        self.numbered = [axis for axis in self.axes if axis in fields]
        # The axes that each tensor has, in the parameter's order and in the tensor's.
        self._ours = [axis for axis in self.axes if axis not in fields]
        groups = (tensor.axes or " ".join(self._ours)).split()
        self.factors = [[] if group == "1" else group.split(".") for group in groups]
        self._theirs = [axis for group in self.factors for axis in group if axis != "part"]
        self.prefix = prefix
        self._part, self._num_parts = tensor.part or (0, 1)
        assert sorted(self._theirs) == sorted(self._ours), (path, self._theirs, self._ours)

    def name(self, index: Mapping[str, int]) -> str:
        """The name of the tensor with these numbers."""
        if self._layers is not None:
            index = {**index, LAYER: self._layers[index[LAYER]]}
        return filled(self.tensor.name, self.prefix, index)

    def resized(self, sizes: Mapping[str, int]) -> "Layout":
        """The layout of a parameter with other sizes of these axes."""
        found = copy.copy(self)
        found.sizes = {**self.sizes, **sizes}
        return found

    @property
    def has_all_rows(self) -> bool:
        """Whether no other parameter has rows of its tensors; they may be in another order."""
        return self.own_rows is None or len(self.own_rows) == self._num_rows

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of the tensors."""
        shape = tuple(math.prod(self._size(axis) for axis in group) for group in self.factors)
        return shape if self.own_rows is None else (self._num_rows, *shape[1:])

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
            part = self._rows(read, self.name(index), where).reshape(shape)[cuts].transpose(order)
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

    def joined(self, parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        """Its parameters' parts of the tensor: side by side, or with "part" last in turn."""
        axis = self.part_axis or 0
        if len(parts) == 1 or self.factors[axis][0] == "part":
            return np.concatenate(parts, axis, dtype=dtype)
        shape = (*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])
        return np.stack(parts, axis + 1, dtype=dtype).reshape(shape)

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

    def _rows(self, read: Callable[[str, Index], np.ndarray], name: str, at: Index) -> np.ndarray:
        """A slice of the parameter's own rows of a tensor."""
        if self.own_rows is None:
            return read(name, at)
        rows = self.own_rows[at[0]]
        first = rows.min()
        return read(name, (slice(first, rows.max() + 1), *at[1:]))[rows - first]

    def _indices(self, ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
        """The numbers of each tensor within the ranges."""
        for numbers in product(*(range(*ranges[axis]) for axis in self.numbered)):
            yield dict(zip(self.numbered, numbers, strict=True))

    def _size(self, axis: str) -> int:
        return self._num_parts if axis == "part" else self.sizes[axis]

    def _tensor_slices(
        self, ranges: Mapping[str, Range]
    ) -> tuple[Index, tuple[slice | int, ...], list[int]]:
        """The slices to read of a tensor, and how to cut them to the ranges, once in that shape."""
        ranges = {**ranges, "part": (self._part, self._part + 1)}
        where: list[slice] = []
        cuts: list[slice | int] = []
        shape: list[int] = []
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
                elif cut != slice(None):  # of parameters that take turns
                    cuts.append(self._part)
                    shape.append(size)
            where.append(slice(low, high))
        return tuple(where), tuple(cuts), shape


def layers_of(config: Any, path: str) -> list[int] | None:
    """The layers that have a parameter of `blocks`; None if it is in all of them."""
    first, _, rest = path.partition(".")
    layers = getattr(config, "own", {}).get(rest.split(".")[0]) if first == "blocks" else None
    return layers and [*layers]


def tensors_of(
    model: PyTree, found: Mapping[str, Layout], dtypes: Mapping[str, np.dtype]
) -> dict[str, tensors.Tensor]:
    """The tensors that hold a model, given its layouts, in `dtypes` by the paths of parameters."""
    arrays = parameters(model)
    pieces: dict[str, list[tuple[str, dict[str, int]]]] = {}
    for path, layout in found.items():
        for name, index in layout.names():
            pieces.setdefault(name, []).append((path, index))

    def by_rows(parts: list[tuple[str, dict]], dtype: np.dtype) -> Iterator[np.ndarray]:
        whole = np.empty(found[parts[0][0]].tensor_shape, dtype)
        for path, at in parts:
            layout = found[path]
            whole[layout.own_rows] = layout.write(at, gathered(arrays[path], layout.at(at)))
        yield whole

    def each(parts: list[tuple[str, dict]], dtype: np.dtype) -> Iterator[np.ndarray]:
        first = found[parts[0][0]]
        # Along the first axis one part follows on another, along any other they lie side by side.
        for group in [parts] if first.part_axis else [[part] for part in parts]:
            for rows in found[group[0][0]].rows(BLOCK_BYTES // dtype.itemsize):
                made = []
                for path, at in group:
                    taken = gathered(arrays[path], found[path].at({**at, **rows}))
                    made.append(found[path].write(at, taken))
                yield first.joined(made, dtype)

    described = {}
    for name, parts in pieces.items():
        parts.sort(key=lambda piece: (found[piece[0]].tensor.part or (0, 1))[0])
        dtype = np.result_type(*[dtypes[path] for path, _ in parts])
        first = found[parts[0][0]]
        write = each if first.own_rows is None else by_rows
        described[name] = tensors.Tensor(first.tensor_shape, dtype, partial(write, parts, dtype))
    return described
