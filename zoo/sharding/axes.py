"""The logical axes of parameters: annotated, given from outside, built in, or by default.

The dimensions of a jaxtyping annotation are names. What Equinox's layers have built in follows
their layout: of a linear layer, (outputs, inputs).
"""

import fnmatch
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from zoo.sharding.mesh import ShardingError
from zoo.sharding.rules import Axes, Layout, in_force, kind_of, use

Names = tuple[str | None, ...]
ANNOTATION, GIVEN, DEFAULT = "annotation", "given", "default"


class Named(NamedTuple):
    """The names of an array's axes, and who named them."""

    names: Names
    by: str
    """`ANNOTATION`, `GIVEN`, the class of Equinox, or `DEFAULT`."""

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody named this very array, so that a name that does not fit is an error."""
        return self.by in (ANNOTATION, GIVEN)


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


def logical_axes(tree: PyTree) -> Any:
    """The logical axes of each parameter, from the annotations of the modules that hold them.

    The result is the tree with a tuple of names in place of each array (or ShapeDtypeStruct). Names
    are right-aligned: the leading axes of stacked layers are None. A generic layer renames its axes
    per instance by a static field `axes`, pairs of (annotated, logical) names. For a variadic
    annotated name, the logical one is several with spaces between them; "" leaves an axis without a
    name, as in a convolution's window. A module that stacks others names their first leading axis
    by a static field `stacked_axis`.

    An array whose annotation has no names takes the ones that `use` gives, or that are built in for
    Equinox's layers, or "unnamed" for each axis of a matrix and "element" for a vector's.

    Raises:
        ShardingError: an annotation that can't be resolved, or an array of lower rank than its
            annotation.
    """
    return map_parameters(lambda path, names, leaf: names, tree)


def check_model(tree: PyTree, layout: Layout) -> None:
    """Refuse names given from outside if one of their patterns names nothing in a whole model.

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
    """The logical axes of one leaf; the `stacked_axis` of a module around it names the first."""
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

    From its annotation, if that names axes; else from what is given from outside, what is built in
    for Equinox's layers, or the default.
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
    """A generic layer's own logical names, by the names in its annotations."""
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


@functools.cache
def field_hint(cls: type, field: str) -> Any:
    """The annotation of a field of a class or of its bases; None if it has none.

    Raises:
        ShardingError: an annotation with something that does not exist at run time.
    """
    for base in cls.__mro__:
        hint = inspect.get_annotations(base).get(field)
        if hint is None:
            continue
        # This annotation alone, so that no other one has to resolve.
        holder = type(cls.__name__, (), {"__annotations__": {field: hint}})
        holder.__module__ = base.__module__
        try:
            return typing.get_type_hints(holder, localns=dict(vars(base)))[field]
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            raise ShardingError(
                f"the annotation {hint!r} of {cls.__qualname__}.{field} can't be resolved: "
                f"{error}; import it at run time, or name the array's axes from outside, by "
                f"axes={{'*.{field}': 'embed mlp'}}"
            ) from error
    return None


def names_of(
    hint: Any, path: tuple, shape: Sequence[int], renamed: Mapping[str, str], field: str
) -> Names | None:
    """The names of an array's axes by an annotation; None if it names none.

    `path` leads from the annotated field to the array, through containers. Of a union, the part
    that has the array's rank counts. `renamed` leads from annotated names to a generic layer's own.

    Raises:
        ShardingError: an array of lower rank than its annotation; `field` names it.
    """
    found = [dims.split() for dims in _dimensions(hint, path)]
    # Dimensions such as `"4 _"` do not say how to shard; a scalar has none, which says enough.
    says = lambda dims: not dims or any(dim in renamed or _name(dim) for dim in dims)  # noqa: E731
    parsed = [parse(dims, renamed) for dims in found if says(dims)]
    if not parsed:
        return None
    return align(min(parsed, key=functools.partial(_num_missing, len(shape))), shape, field)


def _num_missing(rank: int, names: tuple) -> float:
    """How many axes of an array get none of the names; infinity if there are too many names."""
    free = rank - len([name for name in names if name is not ...])
    return math.inf if free < 0 else 0.0 if ... in names else float(free)


def _dimensions(hint: Any, path: tuple) -> Iterator[str]:
    """The dimensions in an annotation, also inside a union or a container."""
    if hasattr(hint, "dim_str"):
        yield hint.dim_str
        return
    arguments: Sequence[Any] = typing.get_args(hint)
    if hasattr(hint, "leaftype"):  # of PyTree[...]
        arguments = [hint.leaftype]
    elif typing.get_origin(hint) not in (typing.Union, types.UnionType):
        if typing.get_origin(hint) is tuple and path and ... not in arguments:
            arguments = arguments[path[0].idx :][:1]
        path = path[1:]
    for argument in arguments:
        yield from _dimensions(argument, path)


def parse(dims: Sequence[str], renamed: Mapping[str, str] = types.MappingProxyType({})) -> tuple:
    """Names of dimensions: None for one without, `...` for any number, "#name" if broadcast."""
    names: tuple = ()
    for dim in dims:
        modifiers = dim[: len(dim) - len(dim.lstrip("#*?_"))]
        if dim in renamed:
            found = tuple(renamed[dim].split())
            names += found or (() if "*" in modifiers else (None,))
        else:
            names += (...,) if dim == "..." or "*" in modifiers else (_name(dim),)
    return names


def _name(dim: str) -> str | None:
    """The name of one dimension; `4`, `_`, `_name`, `...`, `*name` and `n+1` have none."""
    name = dim.lstrip("#?").partition("=")[0]  # of `name=4` too
    if not name.isidentifier() or name.startswith("_"):
        return None
    return f"#{name}" if "#" in dim else name


def align(names: tuple, shape: Sequence[int], field: str) -> Names:
    """The names of all axes of an array: right-aligned, so that what stacks it is None.

    Raises:
        ShardingError: an array of lower rank than its names; `field` names it.
    """
    fixed = tuple(name for name in names if name is not ...)
    if len(fixed) > len(shape):
        raise ShardingError(
            f"{field} has the shape {tuple(shape)}, of lower rank than its axes {fixed}"
        )
    start = names.index(...) if ... in names else 0
    whole = (*fixed[:start], *(None,) * (len(shape) - len(fixed)), *fixed[start:])
    return tuple(
        # What is broadcast may have the size 1, which nothing divides.
        None if name is None or (name.startswith("#") and size == 1) else name.lstrip("#")
        for name, size in zip(whole, shape, strict=True)
    )


def given(axes: Axes, path: str, leaf: Any) -> Named | None:
    """The names given from outside for the array of a dotted path; None without any."""
    if isinstance(axes, Mapping):
        names = next((axes[each] for each in axes if fnmatch.fnmatchcase(path, each)), None)
    else:
        names = axes(path, leaf)
    return None if names is None else Named(align(parse(names.split()), leaf.shape, path), GIVEN)


def check_patterns(axes: Axes, named: Mapping[str, Named]) -> None:
    """Refuse a pattern that names no array of a model, whose paths are the keys of `named`.

    Raises:
        ShardingError: such a pattern, with the paths that it may be for.
    """
    if not isinstance(axes, Mapping):
        return
    left = [path for path, found in named.items() if found.by == GIVEN]
    for pattern in axes:
        used = fnmatch.filter(left, pattern)
        if not used:
            paths = fnmatch.filter(named, pattern) or list(named)
            shown = ", ".join(paths[:20]) + ", …" * (len(paths) > 20)
            raise ShardingError(
                f"axes={{{pattern!r}: {axes[pattern]!r}}} names nothing: no other array than those "
                f"with an annotation, or of a pattern before it; there are {shown}"
            )
        left = [path for path in left if path not in used]


def by_default(leaf: Any) -> Named:
    """The names of an array that nothing names: a matrix, or a vector if its rank is below 2."""
    return Named(("unnamed" if leaf.ndim > 1 else "element",) * leaf.ndim, DEFAULT)


def built_in(nodes: Sequence[Any], paths: Sequence[str], leaf: Any) -> Named | None:
    """The names that a layer of Equinox has for its array; None if no node is such a layer.

    `nodes` lead to the array, the outermost first, which knows best; `paths` are the dotted paths
    from each of them to the array.
    """
    for node, path in zip(nodes, paths, strict=True):
        if isinstance(node, eqx.nn.State | eqx.nn.StateIndex):
            return Named((None,) * leaf.ndim, "eqx.nn.State")
        for cls in type(node).__mro__:
            names = BUILT_IN[cls](node).get(path, "").split() if cls in BUILT_IN else []
            if names and len(names) <= leaf.ndim:
                return Named(align(tuple(names), leaf.shape, path), f"eqx.nn.{cls.__name__}")
    return None


def _convolution(layer: Any) -> dict[str, str]:
    window = " element" * layer.num_spatial_dims
    return {"weight": "fan_out fan_in" + window, "bias": "fan_out" + window}


def _norm(layer: Any) -> dict[str, str]:
    names = " ".join(["element"] * len(getattr(layer, "shape", "1")))
    return {"weight": names, "bias": names}


# The gates of a cell, which share an axis, are taken apart at every time step: not over devices.
_CELL = {"weight_ih": "unnamed fan_in", "weight_hh": "unnamed fan_in"}
_CELL |= {"bias": "element", "bias_n": "element"}
_ATTENTION = {"output_proj.weight": "embed heads", "output_proj.bias": "embed"}
for _projection in ("query_proj", "key_proj", "value_proj"):
    _ATTENTION |= {f"{_projection}.weight": "heads embed", f"{_projection}.bias": "heads"}

# From a class to the names of its arrays by their path, given a layer of it.
BUILT_IN: Mapping[type, Callable[[Any], dict[str, str]]] = {
    eqx.nn.Linear: lambda layer: {"weight": "fan_out fan_in", "bias": "fan_out"},
    eqx.nn.Conv: _convolution,
    eqx.nn.ConvTranspose: _convolution,
    eqx.nn.Embedding: lambda layer: {"weight": "vocab embed"},
    eqx.nn.MultiheadAttention: lambda layer: _ATTENTION,
    eqx.nn.GRUCell: lambda layer: _CELL,
    eqx.nn.LSTMCell: lambda layer: _CELL,
    eqx.nn.LayerNorm: _norm,
    eqx.nn.RMSNorm: _norm,
    eqx.nn.GroupNorm: _norm,
    eqx.nn.BatchNorm: _norm,
    eqx.nn.WeightNorm: lambda layer: {
        "g": "element element" + " element" * getattr(layer.layer, "num_spatial_dims", 0)
    },
}
