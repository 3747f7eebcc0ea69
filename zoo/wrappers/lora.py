"""Low-rank adapters (Hu et al. 2021) on the matrices of any family.

An adapted matrix is W + alpha / rank · down · up, and is computed where it is used: one layer at
a time inside the scan over layers, in fp32 before the cast, sharded as W is. So the model runs as
before, and computes the same as with merged weights. W is not trained; its gradient exists for one
layer at a time.
"""

import fnmatch
import math
import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from zoo.base.configuration import check, require
from zoo.nn.layers import normal
from zoo.nn.parameters import Derived, resolve
from zoo.sharding.axes import keystr, map_parameters, named_alone
from zoo.sharding.foreign import Named
from zoo.sharding.kinds import is_hidden_matrix, is_matrix, matrix_axes

Model = TypeVar("Model")


@dataclass(frozen=True)
class Config:
    """Which matrices have adapters, and of which rank."""

    rank: int = 8
    """Rank of the matrix that is added to each target."""
    alpha: float = 16.0
    """The added matrix is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Paths of matrices, such as blocks.attention.*; empty: all but embeddings and heads."""

    def __post_init__(self) -> None:
        check(self)
        require(
            self.rank > 0 and self.alpha > 0,
            f"rank={self.rank}, alpha={self.alpha}: both must be positive",
        )


class Adapted(Derived):
    """A matrix with its adapter; stacked matrices have stacked ones.

    `down` takes the matrix's input axes to the rank, and `up` the rank to its output axes.
    """

    weight: Float[Array, "*matrix"]
    down: Float[Array, "*inputs"]
    up: Float[Array, "*outputs"]
    scale: float = eqx.field(static=True)
    num_inputs: int = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)
    named_by: str = eqx.field(static=True)

    def __init__(
        self,
        weight: Float[Array, "..."],
        named: Named,
        config: Config,
        *,
        key: Key[Array, ""],
    ):
        names, self.named_by = named
        inputs, outputs = matrix_axes(names)
        stacked = weight.shape[: inputs[0]]
        rows, columns = ([weight.shape[axis] for axis in axes] for axes in (inputs, outputs))
        self.weight = weight
        # With `up` of zeros training begins with the model as it was.
        self.down = normal(key, (*stacked, *rows, config.rank), math.prod(rows))
        self.up = jnp.zeros((*stacked, config.rank, *columns))
        self.scale = config.alpha / config.rank
        self.num_inputs = len(inputs)

        # The axes of stacked layers or members are named from outside; that of experts is not.
        experts = [name for name in names[: inputs[0]] if name is not None]
        into, out = ([str(names[axis]) for axis in axes] for axes in (inputs, outputs))
        self.axes = (
            ("*matrix", " ".join([*experts, *into, *out])),
            ("*inputs", " ".join([*experts, *into, "rank"])),
            ("*outputs", " ".join([*experts, "rank", *out])),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.weight.dtype

    def value(self) -> Float[Array, "..."]:
        """The matrix plus its adapter's product, in the matrix's dtype."""
        stacked = tuple(range(self.down.ndim - self.num_inputs - 1))
        added = jax.lax.dot_general(
            self.down.astype(jnp.float32),
            self.up.astype(jnp.float32),
            (((self.down.ndim - 1,), (len(stacked),)), (stacked, stacked)),
            precision=jax.lax.Precision.HIGHEST,
        )
        return (self.weight.astype(jnp.float32) + self.scale * added).astype(self.weight.dtype)


def adapt(model: Model, config: Config, *, key: Key[Array, ""]) -> Model:
    """The model with an adapter on each target, which adds nothing before training.

    Raises:
        ValueError: a target that matches no matrix, or a model that has adapters already.
    """
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them first, by zoo.lora.merge")
    chosen = targets(model, config)

    def replace(path: tuple, names: tuple[str | None, ...], leaf: Any) -> Any:
        name = keystr(path)
        if name not in chosen:
            return leaf
        # By its name: a matrix's draw does not depend on which others are adapted.
        named = named_alone(model, path, leaf)
        return Adapted(leaf, named, config, key=jax.random.fold_in(key, zlib.crc32(name.encode())))

    return map_parameters(replace, model)


def targets(model: PyTree, config: Config) -> list[str]:
    """The dotted paths of the matrices that a configuration chooses."""
    matrices: dict[str, bool] = {}  # and whether it is a hidden one

    def add(path: tuple, names: tuple[str | None, ...], leaf: Any) -> None:
        if is_matrix(names, field=keystr(path)):
            matrices[keystr(path)] = is_hidden_matrix(names)

    map_parameters(add, model)
    for pattern in config.targets:
        if not fnmatch.filter(matrices, pattern):
            raise ValueError(f"targets={pattern!r} matches no matrix; those are {[*matrices]}")
    found = [
        name
        for name, hidden in matrices.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.targets)
        or (hidden and not config.targets)
    ]
    if not found:
        raise ValueError(
            "targets=() chooses all but embeddings and heads, and the model has no other matrix: "
            f"name some of {[*matrices]}"
        )
    return found


def has_adapters(model: PyTree) -> bool:
    """Whether a model has adapters that are not merged."""
    return any(is_adapted(x) for x in jax.tree.leaves(model, is_leaf=is_adapted))


def merge(model: Model) -> Model:
    """The plain model that computes the same: each adapter added to its matrix."""
    return resolve(model)


def trainable(model: PyTree) -> PyTree:
    """A tree of booleans, for `make_train_step`: the adapters alone are trained."""

    def mark(node: Any) -> Any:
        if not is_adapted(node):
            return False
        return eqx.tree_at(lambda x: (x.weight, x.down, x.up), node, (False, True, True))

    return jax.tree.map(mark, model, is_leaf=is_adapted)


def is_adapted(x: Any) -> bool:
    """Whether a node of a model is a matrix with its adapter."""
    return isinstance(x, Adapted)
