"""A family in Hugging Face's format: rules for configuration fields, and a map of tensor names.

Both work in both directions. The zoo stacks the layers and experts that Hugging Face numbers, has
weights as [in, out] (`x @ w`), and keeps heads and their features on separate axes. A family
describes this by one `Tensor` per parameter, in the names of the parameter's logical axes.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from zoo.common import configuration
from zoo.hf.rules import Fields, Rule
from zoo.hf.weights import Weights
from zoo.publishing import PublishError
from zoo.publishing.families import check_counts
from zoo.sharding.axes import keystr, map_parameters

HEADLESS = {"encoder.head": "none", "tie_embeddings": False, "head_bias": False}
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


def table(text: str, *, layer: str) -> dict[str, Tensor]:
    """The places of parameters by path: per line path, name, axes, and their i/n or rows:i.

    The names of parameters of `blocks` follow `layer`.
    """
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        path, name, *axes = line.split()
        part = rows = None
        if axes and "/" in axes[-1]:
            number, count = axes.pop().split("/")
            part = int(number), int(count)
        elif axes and ":" in axes[-1]:
            split, number = axes.pop().split(":")
            rows = split, int(number)
        name = layer + name if path.startswith("blocks.") else name
        found[path] = Tensor(name, " ".join(axes), part, rows)
    return found


def filled(name: str, prefix: str, index: Mapping[str, int]) -> str:
    """A template's name, with a prefix and numbers; `{root}` is the prefix before "model."."""
    is_nested = prefix == "model." or prefix.endswith(".model.")
    root = prefix.removesuffix("model.") if is_nested else ""
    return name.format(prefix=prefix, root=root, **index)


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


def layouts(skeleton: PyTree, family: "Family", prefix: str) -> dict[str, Layout]:
    """The layout of each parameter of a model (or of its skeleton), by its path."""
    found: dict[str, Layout] = {}
    places = family.places(skeleton.config)
    splits = {name: split(skeleton.config) for name, split in family.splits.items()}

    def add(path: tuple, axes: tuple[str | None, ...], leaf: Any) -> None:
        key = keystr(path)
        tensor = places[key]
        split = splits[tensor.rows[0]] if tensor.rows else ()
        found[key] = Layout(
            key, leaf.shape, axes, tensor, prefix, layers_of(skeleton.config, key), split
        )

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


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    """The class of such a model in transformers."""
    model: type
    """The zoo's class."""
    config: Any
    """The class of its configuration."""
    rules: tuple[Rule, ...]
    canonical: Callable[[Any], Any]
    """The canonical form of a configuration, for comparison."""
    tensors: Mapping[str, Tensor]
    """The place of each parameter that some model of the family has, by its path."""
    without_experts: Mapping[str, Tensor] = field(default_factory=dict)
    """The places that differ in a model without experts."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the `Config` that are the same for all models of the family."""
    prefixes: tuple[str, ...] = ("",)
    """Possible prefixes of tensor names; the first is written."""
    marker: str = ""
    """A tensor that every file has, by which the prefix is found."""
    ignored: frozenset[str] = frozenset()
    """Fields of `config.json` without effect in this family."""
    buffers: tuple[str, ...] = ()
    """Suffixes of the names of tensors that may be in a file, but are no parameters."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """How the rows of tensors are shared among parameters, by a name in `tensors`."""
    within: str = ""
    """The type of a model of which this is the part for text, described by its `text_config`."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The tensors that the zoo's model does not have, by how their names begin, in words.

    `{num_layers}` in such a name is that number."""
    as_published: Callable[[Any, Weights], Weights] | None = None
    """The tensors of a file in the names of `tensors`, where programs write others."""
    bare: str = ""
    """The class in transformers of such a model without an output head, if there are such; its
    tensors have no prefix."""
    of_head: str = ""
    """A part of the names of that head's tensors."""
    head_prefix: str = ""
    """The prefix of a model with classes, if it has another."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may repeat another one."""

    def skeleton(self, config: Any) -> PyTree:
        """The model of a configuration, without its arrays."""
        return eqx.filter_eval_shape(lambda key: self.model(config, key=key), jax.random.key(0))

    def places(self, config: Any) -> Mapping[str, Tensor]:
        """The place of each parameter of a model."""
        experts = getattr(config, "experts", None)
        if experts is None or experts.num_experts is not None:
            return self.tensors
        return {**self.tensors, **self.without_experts}

    def read(
        self,
        values: Mapping[str, Any],
        where: str,
        allowed: Collection[str] | None = (),
        names: Collection[str] | None = None,
    ) -> Any:
        """The `Config` of the content of a `config.json`; `allowed` as for `Fields.finish`.

        The names of the file's tensors, if given, tell whether there are a head and a pooler; else
        a bare model has the pooler that its type has.

        Raises:
            PublishError: a field is missing, unknown or not supported.
        """
        fields, found = Fields(values, where), dict(self.always)
        try:
            for rule in self.rules:
                found |= rule.read(fields)
            if self.bare:
                is_bare = values.get("architectures") == [self.bare]
                found["encoder.pooler"] = is_bare and "pooler.weight" in self.tensors
                if names is not None:
                    is_bare = not any(self.of_head in name for name in names)
                    found["encoder.pooler"] = any("pooler." in name for name in names)
                found |= HEADLESS if is_bare else {}
            fields.finish(self.ignored, allowed)
            config = configuration.from_json(self.config, configuration.nested(found))
            check_counts(config)
            return self.canonical(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PublishError(f"{where}: {error}") from error

    def is_bare(self, config: Any) -> bool:
        """Whether a model is one without the family's output head."""
        return bool(self.bare) and config.encoder.head == "none"

    def prefix(self, config: Any) -> str:
        """The prefix of the names of tensors that are written."""
        if self.head_prefix and config.num_classes:
            return self.head_prefix
        return "" if self.is_bare(config) else self.prefixes[0]

    def write(self, config: Any) -> dict[str, Any]:
        """The content of `config.json` for a configuration without a `difference`."""
        config = self.canonical(config)  # all sizes: other programs have other defaults
        architecture = self.bare if self.is_bare(config) else self.architecture
        values = {"architectures": [architecture], "model_type": self.model_type}
        for rule in self.rules:
            values |= rule.write(config)
        return values

    def difference(self, config: Any) -> list[str]:
        """The fields that a model of this family can't have; none if it can have all."""
        if not isinstance(config, self.config):
            return [f"a configuration of {type(config).__module__}"]
        try:
            again = self.read(self.write(config), self.model_type)
        except (PublishError, ValueError, TypeError) as error:
            return [str(error)]
        mine, other = configuration.flat(self.canonical(config)), configuration.flat(again)
        # Without effect on what a published model computes, and not in Hugging Face's fields.
        ignored = {*configuration.names_that_may_differ(config), "dropout"}
        ignored |= {"encoder.pooler"} if self.bare else set()
        return [
            f"{name}={value!r}"
            for name, value in mine.items()
            if name not in ignored and value != other[name]
        ]
