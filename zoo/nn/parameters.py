"""Parameters where they are used: cast and gathered, and operands as arrays where need be.

They are cast to the compute dtype, and gathered over the mesh axes that only store them. A matrix
may be an `Operand`, which products take as it is (`zoo.nn.products`).
"""

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Key

from zoo.nn.products import Operand, custom_vjp, is_operand
from zoo.nn.stateful import cast
from zoo.sharding import is_sharding, partition_spec, spec_in_use
from zoo.sharding.axes import ANNOTATION, Named, annotation, keystr, map_named
from zoo.sharding.specs import between, in_use, parameter_spec

Tree = TypeVar("Tree")


def resolve_for_use(tree: Tree) -> Tree:
    """The tree with operands as arrays, but where they may be used as they are."""
    if not any(map(is_operand, jax.tree.leaves(tree, is_leaf=is_operand))):
        return tree

    def visit(path: tuple, x: Any) -> Any:
        return _value(x) if is_operand(x) and not takes_operands(tree, path) else x

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_operand)


def _value(x: Operand) -> Array:
    """The value of an operand; within a step in fp32, before the cast."""
    return x.value() if _compute_dtype.value is None else x.cast(jnp.float32).value()


def takes_operands(tree: Any, path: tuple) -> bool:
    """Whether a place in a tree may hold an `Operand`, by its annotation."""

    def takes(hint: Any) -> bool:
        is_class = isinstance(hint, type) and issubclass(hint, Operand)
        return is_class or any(map(takes, typing.get_args(hint)))

    return takes(annotation(tree, path))


# Contexts of JAX's own, so that what was traced in one precision is not taken for another.
_compute_dtype = jax.make_user_context(default_value=None)
_operands = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def computing_in(dtype: DTypeLike, operands: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """Within, `cast_for_use` casts to `dtype`, and `with_operands` applies `operands`."""
    with _compute_dtype(dtype), _operands(operands):
        yield


def with_operands(layer: Tree) -> Tree:
    """A layer of a model's blocks with the operands of the precision around, if any."""
    operands = _operands.value
    return layer if operands is None else operands(layer)


_dropout_key: ContextVar[Any] = ContextVar("zoo_dropout_key", default=None)


@contextlib.contextmanager
def dropping_out(key: Key[Array, ""] | None) -> Iterator[None]:
    """Within, operands that have dropout take their masks from `key`; None turns it off."""
    token = _dropout_key.set(key)
    try:
        yield
    finally:
        _dropout_key.reset(token)


def dropout_key() -> Key[Array, ""] | None:
    """The key of the step around, if any, for the dropout of operands."""
    return _dropout_key.get()


def cast_for_use(tree: Tree) -> Tree:
    """Resolve parameters, and cast them to the compute dtype of the step around, if any.

    An `Operand` stays, with its arrays cast, where the annotation of its place says that it may.
    """
    dtype, tree = _compute_dtype.value, resolve_for_use(tree)
    return tree if dtype is None else cast(tree, dtype)


class CastsInputs(eqx.Module):
    """A model that casts its inputs to the dtype that it computes in, as the families do.

    A step then hands it a batch as it is; any other model gets a batch in the compute dtype. A
    model around another one may say by `casts_inputs` that the other does.
    """

    @property
    def casts_inputs(self) -> bool:
        """Whether the model casts all of its inputs itself."""
        return True


def casts_inputs(model: Any) -> bool:
    """Whether a model casts its own inputs; if not, a step casts the batch before."""
    return isinstance(model, CastsInputs) and model.casts_inputs


class CastsAtUse(CastsInputs):
    """A model that casts its parameters where it uses them, a layer at a time, by `unshard`.

    A step then hands it its parameters as they are, and no copy of the whole model in the compute
    dtype is ever made. A model around another one may say by `casts_at_use` that the other does.
    """

    @property
    def casts_at_use(self) -> bool:
        """Whether all of the model's parameters are cast at their use."""
        return True


def casts_at_use(model: Any) -> bool:
    """Whether a model casts its own parameters; if not, a step casts them all before."""
    return isinstance(model, CastsAtUse) and model.casts_at_use


_only_casts: ContextVar[bool] = ContextVar("zoo_only_casts", default=False)


@contextlib.contextmanager
def left_stored() -> Iterator[None]:
    """Within, `unshard` only casts: parameters stay in the parts that they are stored in."""
    token = _only_casts.set(True)
    try:
        yield
    finally:
        _only_casts.reset(token)


def unshard(tree: Tree) -> Tree:
    """Cast parameters to the compute dtype, and gather them over the axes that only store them.

    Those are `sharding.STORAGE_AXES` and all that split the batch. Call it where parameters are
    used, inside the scan over layers, so that one layer at a time is whole. Gradients are reduced
    to the parts that are stored, in the compute dtype. Parameters without names in an annotation
    are left to `unshard_foreign`.
    """
    tree = cast_for_use(tree)
    if not is_sharding() or _only_casts.get():
        return tree
    mesh = jax.sharding.get_abstract_mesh()

    def gather_leaf(path: tuple, named: Named, leaf: Any) -> Any:
        if named.by != ANNOTATION:
            return leaf
        stored = partition_spec(named.names, mesh, field=keystr(path))
        return reshard(leaf, spec_in_use(named.names, mesh), stored)

    return map_named(gather_leaf, tree)


def unshard_foreign(model: Tree) -> Tree:
    """Cast and gather parameters whose annotations have no names, as their modules do not.

    It takes the whole model, as names from outside are for its paths.
    """
    if any(map(_is_foreign, jax.tree.leaves(model, is_leaf=is_operand))):
        to_value = lambda x: _value(x) if _is_foreign(x) else x  # noqa: E731
        model = jax.tree.map(to_value, model, is_leaf=is_operand)
    if not is_sharding():
        return model
    at_use, mesh = casts_at_use(model), jax.sharding.get_abstract_mesh()

    def gather_leaf(path: tuple, named: Named, leaf: Any) -> Any:
        if named.by == ANNOTATION or not eqx.is_inexact_array(leaf):
            return leaf
        stored = parameter_spec(named, leaf.shape, mesh, field=keystr(path))
        used = cast_for_use(leaf) if at_use else leaf
        return reshard(used, in_use(stored, mesh), stored)

    return map_named(gather_leaf, model)


def _is_foreign(x: Any) -> bool:
    return is_operand(x) and getattr(x, "named_by", ANNOTATION) != ANNOTATION


# A constraint's own gradient is constrained alike: whole, by an all-reduce of twice the bytes.
@functools.partial(custom_vjp, nondiff_argnums=(1, 2))
def reshard(x: Array, used: PartitionSpec, stored: PartitionSpec) -> Array:
    """The identity: a parameter sharded as `used`, and its gradient as `stored`."""
    # First as stored, or XLA may gather before the cast to the compute dtype, which is before this.
    for spec in (stored, *between(stored, used), used):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def _reshard_forward(x: Array, used: PartitionSpec, stored: PartitionSpec) -> tuple[Array, None]:
    return reshard(x, used, stored), None


def _reshard_backward(
    used: PartitionSpec, stored: PartitionSpec, residuals: None, g: Array
) -> tuple[Array]:
    for spec in (*reversed(between(stored, used)), stored):
        g = jax.lax.with_sharding_constraint(g, spec)
    return (g,)


reshard.defvjp(_reshard_forward, _reshard_backward)
