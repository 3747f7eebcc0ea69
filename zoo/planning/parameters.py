"""The parameters of a training, counted: the trained ones, the adapters among them, the frozen."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo.nn.precision import DTYPES
from zoo.nn.products import is_quantized
from zoo.sharding.axes import is_parameter
from zoo.training.state import Trainable, trained_leaves
from zoo.wrappers.lora import is_adapted


@dataclass(frozen=True)
class Part:
    """Some of the parameters of a model."""

    count: int
    """Elements of their matrices and vectors."""
    bytes: float
    """On one device."""
    kinds: tuple[str, ...]
    """Their dtypes, or the kinds of quantised matrices; those of the most bytes first."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model that is trained."""

    trained: Part
    frozen: Part
    adapters: Part
    """The share of the trained ones that adapters have."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.trained.count + self.frozen.count

    @property
    def bytes(self) -> float:
        """Of all of them, on one device."""
        return self.trained.bytes + self.frozen.bytes


def count(model: PyTree, trainable: Trainable | None) -> Parameters:
    """Count the parameters of a skeleton, of which `trainable` chooses what is trained."""
    chosen = eqx.filter_eval_shape(lambda model: trained_leaves(model, trainable), model)
    trained, frozen = eqx.partition(model, chosen)
    adapted = jax.tree.leaves(trained, is_leaf=is_adapted)
    return Parameters(_part(trained), _part(frozen), _part([*filter(is_adapted, adapted)]))


def _part(tree: PyTree) -> Part:
    total, sizes = 0, defaultdict[str, float](float)
    for x in jax.tree.leaves(tree, is_leaf=_is_matrix):
        if _is_matrix(x) or is_parameter(x):
            total += math.prod(x.shape)
            sizes[x.kind if _is_matrix(x) else _dtype_name(x.dtype)] += device_bytes(x)
    by_size = sorted(sizes, key=lambda name: -sizes[name])
    return Part(total, sum(sizes.values(), 0.0), tuple(by_size))


def _is_matrix(x: Any) -> bool:
    """Whether a node is a quantised matrix: without its codes it is one of another part."""
    return is_quantized(x) and is_parameter(x.codes)


def _dtype_name(dtype: Any) -> str:
    return next((name for name, known in DTYPES.items() if jnp.dtype(known) == dtype), str(dtype))


def device_bytes(tree: PyTree) -> float:
    """The bytes that one device keeps of a tree of arrays, or of its skeleton."""

    def each(x: Any) -> float:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return float(math.prod(shape) * x.dtype.itemsize)

    return sum(each(x) for x in jax.tree.leaves(tree) if is_parameter(x))
