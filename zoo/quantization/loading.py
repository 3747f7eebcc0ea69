"""Matrices quantised as they are read, a layer at a time: no model is ever whole in its own dtype.

The matrices of the zoo's modules are quantised, embeddings and heads too, which are most of a small
model; but these in 8 bits at least: they lose most in 4, and XLA for TPU unpacks a matrix as wide
as a vocabulary in memory before it multiplies. Routers, which decide, tables of positions, of which
a step reads a row, norms, biases, and modules of others, whose code takes arrays alone, are not.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo.nn.products import Kind
from zoo.quantization.matrix import QuantizedMatrix, quantize
from zoo.sharding.axes import ANNOTATION, Named, keystr, map_parameters, named_alone
from zoo.sharding.rules import is_matrix, is_stack

_KEPT = frozenset({"routes", "positions"})
_PART = 2**25  # values that are in fp32 at a time


def quantized_skeleton(skeleton: PyTree, kind: Kind) -> PyTree:
    """The skeleton with matrices of `kind`."""

    def visit(path: tuple, names: tuple[str | None, ...], leaf: Any) -> Any:
        named = named_alone(skeleton, path, leaf)
        if not _is_quantizable(named, keystr(path)):
            return leaf
        own = "int8" if "vocab" in named.names else kind
        return eqx.filter_eval_shape(quantize, leaf, named.names, own, named_by=named.by)

    return map_parameters(visit, skeleton)


def _is_quantizable(named: Named, field: str) -> bool:
    return (
        named.by == ANNOTATION
        and is_matrix(named.names, field=field)
        and _KEPT.isdisjoint(named.names)
    )


def quantize_parts(
    skeleton: QuantizedMatrix,
    names: tuple[str | None, ...],
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> QuantizedMatrix:
    """A matrix in the memory of this host, quantised part by part: `read(slices)` is one.

    `names` are of its codes' axes.
    """
    assert skeleton.kind != "fp4", "which files of others have"
    names = _as_stored(skeleton, names)
    made = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), skeleton)
    for part in _parts(skeleton, names):
        found = _quantize(jnp.asarray(read(part)), names, skeleton.kind)
        for whole, of_part in zip(jax.tree.leaves(made), jax.tree.leaves(found), strict=True):
            whole[_at(skeleton, part, whole.shape)] = np.asarray(of_part)
    return made


def _at(
    matrix: QuantizedMatrix, part: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[slice, ...]:
    """The place of a part of a matrix in codes or scales of a shape."""
    part, sizes = _as_stored(matrix, part), _as_stored(matrix, matrix.shape)
    return tuple(
        s if n == size else slice(None) for s, n, size in zip(part, shape, sizes, strict=True)
    )


def _as_stored(matrix: QuantizedMatrix, axes: tuple) -> tuple:
    """One item per axis of a matrix, in the order of its codes' axes; and the reverse."""
    return (*axes[:-2], axes[-1], axes[-2]) if matrix.is_transposed else axes


_quantize = eqx.filter_jit(quantize)


def _parts(matrix: QuantizedMatrix, names: tuple[str | None, ...]) -> Iterator[tuple[slice, ...]]:
    """The slices of one matrix after another, of a large one in parts along its scales."""
    shape = matrix.shape
    steps = [1 if is_stack(name) else size for name, size in zip(names, shape, strict=True)]
    scales = _as_stored(matrix, matrix.scales.shape)
    cut = max(
        (i for i, step in enumerate(steps) if step > 1 and scales[i] == shape[i]),
        key=lambda i: shape[i],
        default=None,
    )
    if cut is not None:
        others = math.prod(steps) // steps[cut]
        steps[cut] = max(1, min(steps[cut], _PART // others))
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for start in itertools.product(*starts):
        yield tuple(
            slice(first, min(first + step, size))
            for first, step, size in zip(start, steps, shape, strict=True)
        )
