"""Quantised matrices of Hugging Face's files as the zoo's: slices of codes, scales, zero points.

A file has a matrix as [outputs, inputs] in a method's own packing, with heads flattened. A group
that spans several heads becomes several with the same scale, so that values stay what they are. A
folder's tensors say which matrices are quantised, and its `quantization_config` how.
"""

import abc
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo.hf.layouts import Index, Layout, Tensor
from zoo.hf.weights import Weights
from zoo.publishing import PublishError
from zoo.quantization.codes import StoredKind, pack
from zoo.quantization.matrix import QuantizedMatrix, axes_of
from zoo.sharding.axes import keystr, map_parameters
from zoo.sharding.rules import is_matrix, matrix_axes

FIELD = "quantization_config"
# Of the tensors that replace a matrix's `weight`, or come beside it.
_MARKS = (".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".weight_format")
INSTEAD = "open the checkpoint that it was made of, by quantize='int8', 'int4' or 'nf4'"


Read = Callable[[str, Index], np.ndarray]
FLOATS = ("float16", "bfloat16", "float32")


class Expected(NamedTuple):
    """A tensor that a quantised matrix needs."""

    shape: tuple[int, ...] | None
    """None: known once other tensors are read."""
    dtypes: tuple[str, ...]


class Matrix(abc.ABC):
    """A quantised matrix of a file, [outputs, inputs], of which slices are read.

    `name` is that of the module: its tensors are f"{name}.qweight" and so on. After `prepare` it
    knows its `group` (the number of inputs, in order, that share a scale), whether it has zero
    points, and in which order its inputs stand, if not in the model's.

    Raises:
        ValueError: sizes that the method can't have, or (by `prepare`) damaged tensors.
    """

    kind: StoredKind
    group: int
    has_zeros: bool = False
    order: np.ndarray | None = None
    stored_scales: str | None = None
    """The tensor of the scales, whose dtype they keep; None: they are computed, in fp32."""

    def __init__(self, name: str, shape: tuple[int, int], stored: Collection[str]):
        self.name = name
        self.outputs, self.inputs = shape

    @abc.abstractmethod
    def tensors(self) -> dict[str, Expected]:
        """The tensors that hold the matrix, by name."""

    def prepare(self, read: Read) -> None:  # noqa: B027 (there need not be any)
        """Read and check what is small."""

    @abc.abstractmethod
    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        """The codes of outputs and of inputs (in the matrix's order), one per byte."""

    @abc.abstractmethod
    def scales(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        """The scales of outputs and of the inputs `at`, ascending."""

    def zeros(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        """The zero points likewise."""
        raise NotImplementedError


Method = Callable[[str, tuple[int, int], Collection[str]], Matrix]
"""A way to quantise, with its settings: the matrix of a module, given the names of all tensors."""


@dataclass(frozen=True)
class Part:
    """One array of a quantised parameter; read as a `Layout` is."""

    layout: Layout
    """The layout of its values one by one: of codes, before two share a byte."""
    dtype: Any
    read_matrix: Callable[[Matrix, Index, Read], np.ndarray]
    matrices: Mapping[str, Matrix]
    """By the names that the layout gives."""
    packed: int | None = None
    """The axis along which two codes share a byte, in groups of `group`."""
    group: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        shape = list(self.layout.sizes.values())
        if self.packed is not None:
            shape[self.packed] //= 2
        return tuple(shape)

    def read(self, slices: Index, dtype: Any, read: Read) -> np.ndarray:
        """The array at `slices`."""

        def matrix(name: str, where: Index) -> np.ndarray:
            return self.read_matrix(self.matrices[name], where, read)

        if self.packed is None:
            return self.layout.read(slices, dtype, matrix)
        # Whole groups are read, as the halves of each share their bytes.
        start, stop, _ = slices[self.packed].indices(self.shape[self.packed])
        half = self.group // 2
        first, last = start // half, -(-stop // half)
        whole = [*slices]
        whole[self.packed] = slice(first * self.group, last * self.group)
        codes = self.layout.read(tuple(whole), dtype, matrix)
        found = pack(codes, self.packed, self.group)
        cut = [slice(None)] * len(slices)
        cut[self.packed] = slice(start - first * half, stop - first * half)
        return found[tuple(cut)]


def stacked(
    layout: Layout,
    names: tuple[str | None, ...],
    matrices: Mapping[str, Matrix],
    scale_dtype: Any,
    dtype: DTypeLike,
) -> tuple[QuantizedMatrix, dict[str, Part]]:
    """The skeleton of a parameter that stacks matrices, and its arrays by their fields' names.

    `dtype` is that of the values.

    Raises:
        ValueError: groups that don't fit the parameter's axes.
    """
    inputs, _ = matrix_axes(names)
    into = [layout.axes[axis] for axis in inputs]
    one, last = next(iter(matrices.values())), inputs[-1]
    size = layout.sizes[into[-1]]
    group = math.gcd(one.group, size)
    blocks = {into[-1]: size // group}
    is_packed = one.kind != "int8"
    if one.group == one.inputs and not is_packed:
        group, blocks = size, dict.fromkeys(into, 1)
    if group < 8 or (is_packed and group % 2):
        raise ValueError(
            f"groups of {one.group} inputs and {into[-1]} of {size} have {group} in common, and "
            "that many would have a scale of their own; it has to be even, and at least 8"
        )

    of_blocks = layout.resized(blocks)
    columns = of_blocks.tensor_shape[1]

    def at(where: slice) -> np.ndarray:
        return np.arange(where.start, where.stop) * (one.inputs // columns)

    parts = {
        "codes": Part(
            layout,
            np.uint8 if is_packed else np.int8,
            lambda matrix, where, read: matrix.codes(where[0], where[1], read),
            matrices,
            last if is_packed else None,
            group,
        ),
        "scales": Part(
            of_blocks,
            scale_dtype,
            lambda matrix, where, read: matrix.scales(where[0], at(where[1]), read),
            matrices,
        ),
    }
    if any(matrix.has_zeros for matrix in matrices.values()):
        zeros = lambda matrix, where, read: matrix.zeros(where[0], at(where[1]), read)  # noqa: E731
        parts["zeros"] = Part(of_blocks, parts["codes"].dtype, zeros, matrices)
    if any(matrix.order is not None for matrix in matrices.values()):
        stack = {x: n for x, n in layout.sizes.items() if x in layout.numbered}
        shape, axes = (*stack.values(), one.inputs), (*stack, "order")
        of_order = Layout("", shape, axes, Tensor(layout.tensor.name, "order"), layout.prefix)

        def order(matrix: Matrix, where: Index, read: Read) -> np.ndarray:
            found = np.arange(matrix.inputs) if matrix.order is None else matrix.order
            return found[where[0]]

        parts["order"] = Part(of_order, np.int32, order, matrices)
    made = partial(
        QuantizedMatrix,
        kind=one.kind,
        packed=last - len(names) if is_packed else None,
        dtype_name=str(jnp.dtype(dtype)),
        axes=axes_of(names, parts["scales"].shape),
    )
    arrays = {"zeros": None} | {x: jax.ShapeDtypeStruct(y.shape, y.dtype) for x, y in parts.items()}
    return eqx.filter_eval_shape(made, **arrays), parts


def find(
    method: Method | None, weights: Weights, found: Mapping[str, Layout], family: str
) -> dict[str, dict[str, Matrix]]:
    """The quantised matrices by the paths of their parameters, and by their `weight`'s names.

    Raises:
        PublishError: files and configuration disagree, a size that the method can't have, or a
            parameter of which only some layers are quantised.
    """
    marks = [name for name in weights.tensors if name.endswith(_MARKS) or ".weight." in name]
    if method is None:
        if marks:
            raise PublishError(
                f"{weights.folder}: {marks[0]} is of a quantised matrix, and config.json has no "
                f"{FIELD}, which says how; take it from quantize_config.json or quant_config.json, "
                "or get the folder again from its source"
            )
        return {}
    integers = [
        x for x in weights.tensors if weights.tensors[x].dtype in ("int8", "uint8", "int32")
    ]
    modules = {
        name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]
        for name in marks + integers
    }
    matrices = {}
    for path, layout in found.items():
        names = [name for name, _ in layout.names()]
        plain = [name for name in names if name.removesuffix(".weight") not in modules]
        if plain and len(plain) < len(names):
            raise PublishError(
                f"{weights.folder}: {path} stacks layers, of which some are quantised and others, "
                f"{plain[0]} for one, are not; {INSTEAD}"
            )
        if not plain:
            if not _is_linear(layout):
                raise PublishError(
                    f"{weights.folder}: {names[0]} of the family {family} is no matrix as "
                    f"[outputs, inputs], and so it is not read quantised; {INSTEAD}"
                )
            matrices[path] = {name: _matrix(method, name, layout, weights) for name in names}
    if not matrices:
        raise PublishError(
            f"{weights.folder}: config.json has a {FIELD}, and no matrix here is quantised; take "
            "that field out if the weights are whole, or get them again from their source"
        )
    return matrices


def _matrix(method: Method, name: str, layout: Layout, weights: Weights) -> Matrix:
    module, shape = name.removesuffix(".weight"), layout.tensor_shape
    try:
        return method(module, (shape[0], shape[1]), weights.tensors)
    except ValueError as error:
        raise PublishError(f"{weights.folder}: {module}: {error}; {INSTEAD}") from error


def _is_linear(layout: Layout) -> bool:
    """Whether a parameter's tensors are matrices as [outputs, inputs], one each."""
    axes = [axis for axis in layout.axes if axis not in layout.numbered]
    if not is_matrix(axes) or len(layout.shares) > 1:
        return False
    inputs, outputs = matrix_axes(axes)
    return layout.factors == [[axes[axis] for axis in group] for group in (outputs, inputs)]


def is_zero_bias(weights: Weights, name: str, matrices: Mapping[str, Mapping[str, Matrix]]) -> bool:
    """Whether a tensor is a bias of zeros, which old programs wrote beside every matrix."""
    weight = f"{name.removesuffix('.bias')}.weight"
    if not name.endswith(".bias") or not any(weight in stack for stack in matrices.values()):
        return False
    with weights.reader() as read:
        return not read(name, (slice(None),)).any()


def put(
    skeleton: PyTree,
    found: Mapping[str, Layout],
    matrices: Mapping[str, Mapping[str, Matrix]],
    weights: Weights,
    dtype: DTypeLike,
) -> tuple[PyTree, dict[str, Layout | Part]]:
    """The skeleton with the quantised parameters, and where in the files each array lies.

    `dtype` is that of their values. Raises PublishError for damaged matrices.
    """
    parts: dict[str, Layout | Part] = {x: y for x, y in found.items() if x not in matrices}

    def visit(path: tuple, names: tuple[str | None, ...], leaf: Any) -> Any:
        key = keystr(path)
        if key not in matrices:
            return leaf
        stack = matrices[key]
        with weights.reader() as read:
            for matrix in stack.values():
                try:
                    matrix.prepare(read)
                except ValueError as error:
                    raise PublishError(f"{weights.folder}: {matrix.name}: {error}") from error
        stored = next(iter(stack.values())).stored_scales
        scale_dtype = jnp.dtype(weights.tensors[stored].dtype) if stored else np.float32
        try:
            made, arrays = stacked(found[key], names, stack, scale_dtype, dtype)
        except ValueError as error:
            raise PublishError(f"{weights.folder}: {key}: {error}; {INSTEAD}") from error
        parts.update({f"{key}.{name}": part for name, part in arrays.items()})
        return made

    return map_parameters(visit, skeleton), parts
