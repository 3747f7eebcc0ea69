"""The logical axes of parameters: what the annotations of a tree of modules say of its arrays.

`zoo.sharding` maps them to mesh axes; decay, Muon and adapters tell matrices from vectors by them.
"""

import functools
import typing
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from zoo.sharding.rules import ShardingError


def keystr(path: tuple) -> str:
    """A tree path as dotted text, such as `blocks.attention.wq`."""
    return jtu.keystr(path, simple=True, separator=".")


def is_parameter(x: Any) -> bool:
    """Whether a leaf is an array, or stands for one."""
    # `eqx.is_array` is False for a ShapeDtypeStruct, and a skeleton has to be placed too.
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def map_parameters(fn: Any, tree: PyTree) -> Any:
    """Map `fn(path, logical_axes, leaf)` over the arrays and array skeletons of a tree."""

    def visit(path: tuple, leaf: Any) -> Any:
        return fn(path, _names(tree, path, leaf), leaf) if is_parameter(leaf) else leaf

    return jtu.tree_map_with_path(visit, tree)


@functools.cache
def _annotations(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _dim_str(hint: Any) -> str | None:
    """The dimensions in a jaxtyping annotation, also inside a union or a container."""
    if hasattr(hint, "dim_str"):
        return hint.dim_str
    found = (_dim_str(argument) for argument in typing.get_args(hint))
    return next((dims for dims in found if dims is not None), None)


def _names(tree: PyTree, path: tuple, leaf: Any) -> tuple[str | None, ...]:
    """The logical axes of one leaf; leading axes that the annotation does not name are None.

    But the first of them is what an enclosing module calls it by a static field `stacked_axis`.
    """
    owner, field, node, stacked = None, "", tree, None
    for entry in path:
        stacked = getattr(node, "stacked_axis", stacked)
        if isinstance(entry, jtu.GetAttrKey):
            owner, field, node = node, entry.name, getattr(node, entry.name)
        else:
            node = node[getattr(entry, "idx", getattr(entry, "key", None))]
    dims = None if owner is None else _dim_str(_annotations(owner.__class__).get(field))
    if dims is None:
        raise ShardingError(
            f"{keystr(path)} of shape {leaf.shape} has no jaxtyping annotation to shard it by; "
            f'annotate the field, for example {field or "weight"}: Float[Array, "embed mlp"]'
        )
    renamed = dict(getattr(owner, "axes", ()))
    names = tuple(" ".join(renamed.get(name, name) for name in dims.split()).split())
    if len(names) > leaf.ndim:
        raise ShardingError(
            f"{keystr(path)} has the shape {leaf.shape}, of lower rank than its axes {names}"
        )
    unnamed = leaf.ndim - len(names)
    return ((stacked, *(None,) * (unnamed - 1)) if unnamed else ()) + names


def logical_axes(tree: PyTree) -> Any:
    """The logical axes of each parameter, from the annotations of the modules that hold them.

    The result is the tree with a tuple of names in place of each array (or ShapeDtypeStruct).
    Names are right-aligned: the leading axes of stacked layers are None. A generic layer renames
    its axes an instance at a time by a static field `axes`, pairs of (annotated, logical) names,
    the latter several with spaces between them where the former is variadic. A module that stacks
    others names their first leading axis by a static field `stacked_axis`.

    Raises:
        ShardingError: an array without an annotation, or of lower rank than its annotation.
    """
    return map_parameters(lambda path, names, leaf: names, tree)


def is_matrix(names: tuple[str | None, ...]) -> bool:
    """Whether logical axes name a matrix (what weight decay and Muon are for), not a vector.

    A head's axes count as one: ("heads", "head_dim") is a bias, ("embed", "heads", "head_dim") a
    matrix; so do ("gates", "hidden"). The leading axes of what is stacked do not count, nor do
    experts.
    """
    apart = (None, "member", "experts", "gates", "head_dim")
    return sum(name not in apart for name in names) >= 2


def matrix_axes(names: tuple[str | None, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input and the output axes of a matrix; the other leading ones tell matrices apart.

    A matrix maps its first axis to the others; a head's size goes with its head, so that
    ("heads", "head_dim", "embed") is a matrix of heads·head_dim by embed.
    """
    named = [axis for axis, name in enumerate(names) if name not in (None, "member", "experts")]
    inputs = 2 if names[named[1]] == "head_dim" else 1
    return tuple(named[:inputs]), tuple(named[inputs:])


_ENDS = {"vocab", "positions", "features", "classes"}


def is_hidden_matrix(names: tuple[str | None, ...]) -> bool:
    """Whether logical axes name a matrix whose inputs and outputs are not the model's own."""
    return is_matrix(names) and not _ENDS & set(names)
