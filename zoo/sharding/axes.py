"""The logical axes of parameters: annotated, given from outside, built in, or by default."""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from zoo.sharding.mesh import Layout, use
from zoo.sharding.names import (
    ANNOTATION,
    DEFAULT,
    Named,
    built_in,
    by_default,
    check_patterns,
    field_hint,
    given,
    names_of,
)
from zoo.sharding.rules import ShardingError, in_force, kind_of


def keystr(path: tuple) -> str:
    """A tree path as dotted text, such as `blocks.attention.wq`."""
    return jtu.keystr(path, simple=True, separator=".")


def is_parameter(x: Any) -> bool:
    """Whether a leaf is an array or the shape and dtype of one."""
    # `eqx.is_array` is False for a ShapeDtypeStruct, and a skeleton has to be placed too.
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def map_parameters(fn: Any, tree: PyTree) -> Any:
    """Map `fn(path, logical_axes, leaf)` over the arrays and array skeletons of a tree."""
    return map_named(lambda path, named, leaf: fn(path, named.names, leaf), tree)


def map_named(fn: Any, tree: PyTree) -> Any:
    """Map `fn(path, named, leaf)`, where `named` also says who named the axes."""

    def visit(path: tuple, leaf: Any) -> Any:
        return fn(path, _named(tree, path, leaf), leaf) if is_parameter(leaf) else leaf

    return jtu.tree_map_with_path(visit, tree)


def check_model(tree: PyTree, layout: Layout) -> None:
    """Refuse names from outside of which one names nothing in a whole model.

    A strict layout also refuses an array that nothing names.

    Raises:
        ShardingError: such a pattern, or such an array; and as `logical_axes`.
    """
    if layout.axes is None and not layout.strict:
        return
    found: dict[str, Named] = {}

    def add(path: tuple, named: Named, leaf: Any) -> None:
        found[keystr(path)] = named
        if layout.strict and named.by == DEFAULT:
            raise ShardingError(
                f"{keystr(path)} of shape {leaf.shape}: nothing names its axes, and strict=True "
                "refuses the default; annotate it, as weight: Float[Array, 'embed mlp'], or give "
                f"names from outside, as axes={{{keystr(path)!r}: 'embed mlp'}}"
            )

    with use(layout.without_mesh):
        map_named(add, tree)
    check_patterns(layout.axes or {}, found)


def _named(tree: PyTree, path: tuple, leaf: Any) -> Named:
    """The logical axes of one leaf: `stacked_axis` of a module around it names the first."""
    names, by = own = named_alone(tree, path, leaf)
    nodes = _nodes(tree, path)
    stacked = next((x.stacked_axis for x in nodes if hasattr(x, "stacked_axis")), None)
    if stacked is None or not names or names[0] is not None:
        return own
    if (kind := kind_of(stacked)) not in ("stack", None):
        raise ShardingError(
            f"{keystr(path)}: stacked_axis={stacked!r} is of the kind {kind!r}; take an axis of "
            f'the kind "stack", by a rule such as zoo.sharding.Axis(None, "stack")'
        )
    return Named((stacked, *names[1:]), by)


def named_alone(tree: PyTree, path: tuple, leaf: Any) -> Named:
    """The logical axes of one leaf by itself: None for an axis that stacks it from outside.

    By its annotation, if that has names of axes; or else by what is given from outside, by what is
    built in for Equinox's layers, or by default.
    """
    nodes, field = _nodes(tree, path), keystr(path)
    annotated, problem = None, None
    try:
        owner, hint, rest = _hint(tree, path)
        names = names_of(hint, rest, leaf.shape, _renamed(owner), field)
        if names is not None:
            annotated = Named(names, getattr(owner, "named_by", ANNOTATION))
            if all(name is None or kind_of(name) for name in names):
                return annotated
    except ShardingError as error:
        problem = error
    named = given(in_force.get().axes, field, leaf)
    if named is None:
        named = built_in(nodes, [keystr(path[i:]) for i in range(len(nodes))], leaf)
    if named is None and problem is not None:
        raise problem
    # An annotation with a name that the rules do not know is refused where it is placed.
    return named or annotated or by_default(leaf)


def annotation(tree: PyTree, path: tuple) -> Any:
    """The annotation of the field of a module that holds a node of a tree; None without any."""
    return _hint(tree, path)[1]


def _hint(tree: PyTree, path: tuple) -> tuple[Any, Any, tuple]:
    """The innermost module on a path, the annotation of its field there, and the path from it."""
    for index, node in reversed([*enumerate(_nodes(tree, path))]):
        if index < len(path) and isinstance(path[index], jtu.GetAttrKey):
            return node, field_hint(node.__class__, path[index].name), path[index + 1 :]
    return None, None, ()


def _renamed(owner: Any) -> dict[str, str]:
    """The logical names of a generic layer for those in its annotations."""
    pairs = getattr(owner, "axes", ())
    is_ours = isinstance(pairs, tuple) and all(
        isinstance(pair, tuple) and [*map(type, pair)] == [str, str] for pair in pairs
    )
    return dict(pairs) if is_ours else {}


def _nodes(tree: PyTree, path: tuple) -> list[Any]:
    """The nodes of a tree on the way to a leaf, from the root, as far as they can be entered."""
    nodes = [tree]
    for entry in path[:-1]:
        try:
            if isinstance(entry, jtu.GetAttrKey):
                tree = getattr(tree, entry.name)
            else:
                tree = tree[getattr(entry, "idx", getattr(entry, "key", None))]
        except (TypeError, LookupError):  # a container that JAX alone can open
            break
        nodes.append(tree)
    return nodes


def logical_axes(tree: PyTree) -> Any:
    """The logical axes of each parameter, from the annotations of the modules that hold them.

    The result is the tree with a tuple of names in place of each array (or ShapeDtypeStruct).
    Names are right-aligned: the leading axes of stacked layers are None. A generic layer renames
    its axes per instance by a static field `axes`, pairs of (annotated, logical) names, the latter
    several with spaces between them where the former is variadic; "" leaves an axis without a name,
    as those of a convolution's window. A module that stacks others names their first leading axis
    by a static field `stacked_axis`.

    An array without names in an annotation has the ones that `use` gives, or that are built in for
    Equinox's layers, or "unnamed" for each axis of a matrix and "element" for a vector's.

    Raises:
        ShardingError: an annotation that can't be resolved, or an array of lower rank than its
            annotation.
    """
    return map_parameters(lambda path, names, leaf: names, tree)
