"""Where parameters lie in Hugging Face's tensors, to read and to write them.

The zoo stacks the layers and experts that Hugging Face numbers, has weights as [in, out] (`x @ w`),
and keeps heads and their features on separate axes. A family describes this by one `Tensor` per
parameter, in the names of the parameter's logical axes.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "heads.head_dim embed"; 1 is an axis of one element. `share` = (i, n): the parameter is the i-th
    of n in the tensor. Its rows are given by the family's `split` of that name; one share is
    another order of the rows. Without a split all have equal parts of the axis with "part" in it,
    by turns where that is last.
    """

    name: str
    axes: str = ""
    share: tuple[int, int] = (0, 1)
    split: str = ""


# From a configuration to the numbers of the rows that each parameter in a tensor has.
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
            share = (number, len(paths)), shared.rstrip("/:")
            if shared == "/" and not any("part" in axis for axis in axes):
                axes[0] = f"part.{axes[0]}"
            turned = " ".join(axes[::-1] if given == ["T"] else axes)
            if module := name.removesuffix("*") * name.endswith("*"):
                found[bias_of(path)] = Tensor(f"{module}bias", " ".join(axes[:1]), *share)
                found[path] = Tensor(f"{module}weight", turned, *share)
            else:
                found[path] = Tensor(name, turned, *share)
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
        """`layers` are the numbers of the layers that are stacked, if not all are."""
        self.tensor, self.layers, self.prefix = tensor, layers, prefix
        self.axes = tuple(name or LAYER for name in names)
        self.sizes = dict(zip(self.axes, shape, strict=True))
        fields = [field for _, field, _, _ in Formatter().parse(tensor.name) if field]
        self.numbered = [axis for axis in self.axes if axis in fields]
        # The axes that each tensor has, in the parameter's order and in the tensor's.
        self._ours = [axis for axis in self.axes if axis not in fields]
        groups = [x.split(".") for x in (tensor.axes or " ".join(self._ours)).split()]
        self.factors = [[axis for axis in x if axis not in ("1", "part")] for x in groups]
        self._theirs = [axis for group in self.factors for axis in group]
        assert sorted(self._theirs) == sorted(self._ours), (path, self._theirs, self._ours)
        # The axis of the tensor that parameters share, and the numbers that each has along it.
        self.shared = next((i for i, group in enumerate(groups) if "part" in group), 0)
        self.shares, (number, count) = split, tensor.share
        if count > 1 and not len(split):
            size = math.prod(self.sizes[axis] for axis in self.factors[self.shared])
            in_turn = groups[self.shared][0] != "part"
            every = np.arange(count * size).reshape((size, count) if in_turn else (count, size))
            self.shares = [*(every.T if in_turn else every)]
        self.own = self.shares[number] if len(self.shares) else None

    def name(self, index: Mapping[str, int]) -> str:
        """The name of the tensor with these numbers."""
        if self.layers is not None:
            index = {**index, LAYER: self.layers[index[LAYER]]}
        return filled(self.tensor.name, self.prefix, index)

    def resized(self, sizes: Mapping[str, int]) -> "Layout":
        """The layout of a parameter with other sizes of these axes."""
        found = copy.copy(self)
        found.sizes = {**self.sizes, **sizes}
        return found

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of the tensors."""
        shape = [math.prod(self.sizes[axis] for axis in group) for group in self.factors]
        if len(self.shares):
            shape[self.shared] = sum(map(len, self.shares))
        return tuple(shape)

    @property
    def is_in_order(self) -> bool:
        """Whether the tensor has its parameters one behind another."""
        if not len(self.shares):
            return True
        every = np.concatenate([*self.shares])
        return self.shared == 0 and np.array_equal(every, np.arange(len(every)))

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
            part = self._share(read, self.name(index), where).reshape(shape)[cuts]
            part = part.transpose(order)
            out[self.at({axis: i - ranges[axis][0] for axis, i in index.items()})] = part
        return out

    def write(self, index: Mapping[str, int], part: np.ndarray) -> np.ndarray:
        """The parameter's share of the tensor with these numbers; given some rows, these alone."""
        order = [self._ours.index(axis) for axis in self._theirs]
        sizes = dict(zip(self._ours, part.shape, strict=True))
        shape = [math.prod(sizes.get(axis, 1) for axis in group) for group in self.factors]
        return np.ascontiguousarray(part.transpose(order).reshape(shape))

    def joined(self, shares: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        """The tensor, or rows of it, from the shares of all its parameters."""
        shape = [*shares[0].shape]
        shape[self.shared] = self.tensor_shape[self.shared]
        whole = np.empty(shape, dtype)
        along = whole.swapaxes(0, self.shared)
        for own, share in zip(self.shares, shares, strict=True):
            along[own] = share.swapaxes(0, self.shared)
        return whole

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

    def _share(self, read: Callable[[str, Index], np.ndarray], name: str, at: Index) -> np.ndarray:
        """A slice of the parameter's own share of a tensor."""
        if self.own is None:
            return read(name, at)
        own = self.own[at[self.shared]]
        first, last = own.min(), own.max()
        where = slice(first, last + 1)
        found = read(name, (*at[: self.shared], where, *at[self.shared + 1 :]))
        follow = np.array_equal(own, np.arange(first, last + 1))
        return found if follow else found.take(own - first, self.shared)

    def _indices(self, ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
        """The numbers of each tensor within the ranges."""
        for numbers in product(*(range(*ranges[axis]) for axis in self.numbered)):
            yield dict(zip(self.numbered, numbers, strict=True))

    def _tensor_slices(self, ranges: Mapping[str, Range]) -> tuple[Index, Index, list[int]]:
        """The slices to read of a share, and how to cut them to the ranges, once in that shape."""
        where: list[slice] = []
        cuts: list[slice] = []
        shape: list[int] = []
        for group in self.factors:
            low, high = 0, 1  # the range to read, in blocks of the remaining factors
            for axis in group:
                size, (start, stop) = self.sizes[axis], ranges[axis]
                cut = slice(None)
                if high - low > 1:  # several blocks are read as a whole, and then cut
                    cut, start, stop = slice(start, stop), 0, size
                low, high = low * size + start, (high - 1) * size + stop
                cuts.append(cut)
                shape.append(stop - start)
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

    def written(parts: list[tuple[str, dict]], dtype: np.dtype) -> Iterator[np.ndarray]:
        first = found[parts[0][0]]
        in_order = first.is_in_order
        for group in [[part] for part in parts] if in_order else [parts]:
            blocks: Iterable[dict] = found[group[0][0]].rows(BLOCK_BYTES // dtype.itemsize)
            if not in_order and first.shared == 0:
                blocks = [{}]  # a block of a parameter is no block of the tensor
            for rows in blocks:
                shares = []
                for path, at in group:
                    taken = gathered(arrays[path], found[path].at({**at, **rows}))
                    shares.append(found[path].write(at, taken))
                yield (
                    shares[0].astype(dtype, copy=False) if in_order else first.joined(shares, dtype)
                )

    described = {}
    for name, parts in pieces.items():
        parts.sort(key=lambda piece: found[piece[0]].tensor.share)
        dtype = np.result_type(*[dtypes[path] for path, _ in parts])
        shape = found[parts[0][0]].tensor_shape
        described[name] = tensors.Tensor(shape, dtype, partial(written, parts, dtype))
    return described
