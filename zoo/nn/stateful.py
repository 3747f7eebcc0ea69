"""An `eqx.nn.State` in a model, such as the statistics of a batch norm: not trained, but threaded.

A State is spent by its `set`, and so those handed on here are copies.
"""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, PyTree

from zoo.nn.parameters import cast, is_kept
from zoo.nn.products import is_operand

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
    """The same arrays, none weakly typed: a restored one is not, and Equinox tells them apart."""
    return jax.tree.map(lambda x: x.astype(x.dtype) if _is_weak(x) else x, state)


def _is_weak(x: Any) -> bool:
    return eqx.is_array(x) and getattr(x, "weak_type", False)


class _BatchNorm(eqx.nn.BatchNorm):
    """A batch norm in fp32 between activations of another dtype."""

    def __call__(self, x: Array, state: eqx.nn.State, **options: Any) -> tuple[Array, eqx.nn.State]:
        y, state = super().__call__(x.astype(jnp.float32), state, **options)
        return y.astype(x.dtype), state


class _CastAtCall(eqx.Module):
    """A layer that is cast to the dtype of its input."""

    layer: Any

    def __call__(self, x: Array) -> Array:
        return cast(self.layer, x.dtype)(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "layer"), name)


class _SpectralNorm(eqx.nn.SpectralNorm):
    """A spectral norm in fp32 of the weight of a layer in another dtype."""

    def __call__(self, x: Array, state: eqx.nn.State, **options: Any) -> tuple[Array, eqx.nn.State]:
        inner = eqx.tree_at(lambda norm: norm.layer, self, _CastAtCall(self.layer))
        return eqx.nn.SpectralNorm.__call__(inner, x, state, **options)


_IN_FLOAT32: dict[type, type] = {
    eqx.nn.BatchNorm: _BatchNorm,
    eqx.nn.SpectralNorm: _SpectralNorm,
}


def cast_around(model: Tree, dtype: DTypeLike) -> Tree:
    """A model cast to a dtype, but for its States, and for the norms of Equinox that have one.

    Those compute in fp32: a running mean in bf16 would not move by 1%.
    """

    def is_node(x: Any) -> bool:
        return is_kept(x) or is_operand(x) or type(x) in _IN_FLOAT32

    def visit(x: Any) -> Any:
        if is_state(x):
            return _copied(x)
        kept = _IN_FLOAT32.get(type(x))
        return cast(x, dtype) if kept is None else _as(kept, x)

    return jax.tree.map(visit, model, is_leaf=is_node)


def _as(cls: type, module: eqx.Module) -> eqx.Module:
    """A module as one of a subclass that adds no field."""
    new: Any = object.__new__(cls)
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, getattr(module, field.name))
    return new
