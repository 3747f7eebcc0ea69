"""The logical axes of parameters, read off the annotations of the modules that hold them."""

import functools
import typing
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from zoo.sharding.rules import ShardingError, kind_of


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

    But the first of them has the name that an enclosing module's field `stacked_axis` gives it.
    """
    names = annotated_axes(tree, path, leaf)
    stacked = next((x.stacked_axis for x in _nodes(tree, path) if hasattr(x, "stacked_axis")), None)
    if stacked is None or not names or names[0] is not None:
        return names
    if (kind := kind_of(stacked)) not in ("stack", None):
        raise ShardingError(
            f"{keystr(path)}: stacked_axis={stacked!r} is of the kind {kind!r}; take an axis of "
            f'the kind "stack", by a rule such as zoo.sharding.Axis(None, "stack")'
        )
    return (stacked, *names[1:])


def annotated_axes(tree: PyTree, path: tuple, leaf: Any) -> tuple[str | None, ...]:
    """The logical axes of one leaf by its own annotation: None for what stacks it from outside."""
    dims, owner, field = None, None, ""
    for node, entry in zip(_nodes(tree, path), path, strict=False):
        if isinstance(node, eqx.nn.State):
            return (None,) * leaf.ndim
        if isinstance(entry, jtu.GetAttrKey):
            owner, field = node, entry.name
    if owner is not None:
        dims = _dim_str(_annotations(owner.__class__).get(field))
    if dims is None:
        raise ShardingError(
            f"{keystr(path)} of shape {leaf.shape} has no jaxtyping annotation to shard it by; "
            f'annotate the field, for example {field or "weight"}: Float[Array, "embed mlp"]'
        )
    renamed = dict(getattr(owner, "axes", ()))
    names: tuple[str | None, ...] = ()
    for name in dims.split():
        found = renamed.get(name, name).split()
        names += tuple(found) if found or name.startswith("*") else (None,)
    if len(names) > leaf.ndim:
        raise ShardingError(
            f"{keystr(path)} has the shape {leaf.shape}, of lower rank than its axes {names}"
        )
    return (None,) * (leaf.ndim - len(names)) + names


def _nodes(tree: PyTree, path: tuple) -> Iterator[Any]:
    """The nodes of a tree along a path, from the root to the leaf."""
    yield tree
    for entry in path:
        if isinstance(tree, eqx.nn.State):  # replicated, and not subscriptable
            return
        if isinstance(entry, jtu.GetAttrKey):
            tree = getattr(tree, entry.name)
        else:
            tree = tree[getattr(entry, "idx", getattr(entry, "key", None))]
        yield tree


def logical_axes(tree: PyTree) -> Any:
    """The logical axes of each parameter, from the annotations of the modules that hold them.

    The result is the tree with a tuple of names in place of each array (or ShapeDtypeStruct).
    Names are right-aligned: the leading axes of stacked layers are None. A generic layer renames
    its axes per instance by a static field `axes`, pairs of (annotated, logical) names, the latter
    several with spaces between them where the former is variadic; "" leaves an axis without a name,
    as those of a convolution's window. A module that stacks others names their first leading axis
    by a static field `stacked_axis`.

    Raises:
        ShardingError: an array without an annotation, or of lower rank than its annotation.
    """
    return map_parameters(lambda path, names, leaf: names, tree)
