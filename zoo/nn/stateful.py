"""An `eqx.nn.State` in a model, such as the statistics of a batch norm: not trained, but threaded.

A State is spent by its `set`, and so those handed on here are copies.
"""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, PyTree

from zoo.nn.parameters import cast

Tree = TypeVar("Tree")


def is_state(x: Any) -> bool:
    """Whether a node of a model is an `eqx.nn.State`."""
    return isinstance(x, eqx.nn.State)


def states(model: PyTree) -> list[eqx.nn.State]:
    """The States of a model, in its order."""
    nodes = jax.tree.leaves(model, is_leaf=is_state)
    return [_copied(x) for x in nodes if is_state(x)]


def with_states(model: Tree, new: list[eqx.nn.State]) -> Tree:
    """The model with other States in the places of its own."""
    remaining = iter(new)
    return jax.tree.map(
        lambda x: _copied(next(remaining)) if is_state(x) else x, model, is_leaf=is_state
    )


def _copied(state: eqx.nn.State) -> eqx.nn.State:
    return jax.tree.map(lambda x: x, state)


class _InFloat32:
    """A layer whose statistics are of its input: both are fp32, and its output as its input."""

    def __call__(self, x: Array, state: eqx.nn.State, **options: Any) -> tuple[Array, eqx.nn.State]:
        call: Any = super().__call__  # type: ignore[misc]
        y, state = call(x.astype(jnp.float32), state, **options)
        return y.astype(x.dtype), state


class _BatchNorm(_InFloat32, eqx.nn.BatchNorm):
    pass


class _SpectralNorm(_InFloat32, eqx.nn.SpectralNorm):
    pass


_IN_FLOAT32: dict[type, type] = {
    eqx.nn.BatchNorm: _BatchNorm,
    eqx.nn.SpectralNorm: _SpectralNorm,
}


def cast_around(model: Tree, dtype: DTypeLike) -> Tree:
    """A model cast to a dtype, but for its States, and for the layers of Equinox that have one.

    Those stay in fp32 and compute in it: a running mean in bf16 would not move by 1%.
    """

    def is_node(x: Any) -> bool:
        return is_state(x) or type(x) in _IN_FLOAT32

    def visit(x: Any) -> Any:
        if is_state(x):
            return _copied(x)
        return _as(_IN_FLOAT32[type(x)], x) if is_node(x) else cast(x, dtype)

    return jax.tree.map(visit, model, is_leaf=is_node)


def _as(cls: type, module: eqx.Module) -> eqx.Module:
    """A module as one of a subclass that adds no field."""
    new = object.__new__(cls)
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, getattr(module, field.name))
    return new
