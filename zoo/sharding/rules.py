"""The one table of logical axes: the mesh axes that shard each, and its kind; and layouts.

Its first column is `RULES`; a layout's rules may take their place. No file outside of this room
names a mesh axis. `use` sets a layout: a mesh, the rules, and names for foreign arrays.
"""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh, Mesh

from zoo.sharding.mesh import MESH_AXES, ShardingError, make_mesh

# The axes that only store a parameter: where it is used, it is gathered over them.
STORAGE_AXES = frozenset({"fsdp", "context"})

# The axes that split the batch and yet gather no expert: tokens go to experts over them.
EXPERT_AXES = frozenset({"expert"})


Kind = Literal["dimension", "end", "minor", "major", "stack", "activation"]


@dataclass(frozen=True)
class Axis:
    """A logical axis: the mesh axes that shard it, and its kind.

    Raises:
        ShardingError: an unknown kind.
    """

    mesh: str | tuple[str, ...] | None
    kind: Kind = "dimension"
    """Of parameters: `dimension` is a dimension of a matrix; `end` is one that is an input or an
    output of the whole model; `minor` is part of the dimension before it (a head's size), `major`
    of the one after it (a cell's gates); `stack` tells matrices apart (experts, and what has no
    name, such as layers). `activation` is an axis of activations alone."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ShardingError(f"kind={self.kind!r}: choose one of {get_args(Kind)}")


LOGICAL_AXES: Mapping[str, Axis] = types.MappingProxyType(
    {
        "batch": Axis(("data", "fsdp", "expert"), "activation"),
        # Between tensor-parallel parts, where adding "tensor" gives sequence parallelism.
        "seq": Axis("context", "activation"),
        # Inside them, where sequence parallelism does not split it.
        "inner_seq": Axis("context", "activation"),
        "embed": Axis(("fsdp", "expert", "context")),
        "mlp": Axis("tensor"),
        "heads": Axis("tensor"),
        "kv_heads": Axis("tensor"),
        "head_dim": Axis(None, "minor"),
        "hidden": Axis("tensor"),
        "gates": Axis(None, "major"),
        "groups": Axis(None),  # of heads with the same keys and queries
        "taps": Axis(None, "stack"),  # of a convolution over time
        "routes": Axis(None),  # a router's output for each expert
        "rank": Axis(None),  # of low-rank adapters
        "latent": Axis(("fsdp", "expert", "context")),  # what keys and values come from
        "vocab": Axis("tensor", "end"),
        "positions": Axis(None, "end"),
        "features": Axis(None, "end"),  # inputs that are no tokens: any number of them
        "patch_rows": Axis(None, "end"),  # pixels of a patch of an image
        "patch_columns": Axis(None, "end"),
        "channels": Axis(None, "end"),
        "classes": Axis(None, "end"),  # outputs that are no tokens
        # Of a mixture: each device holds whole ones.
        "experts": Axis(("expert", "tensor"), "stack"),
        # The first axis of an ensemble, which then leaves the tensor axis to no axis inside.
        "member": Axis("tensor", "stack"),
        # Of modules that are not the zoo's, which have names in `axes.py`, or none at all.
        "fan_out": Axis("tensor"),
        "fan_in": Axis(("fsdp", "expert", "context")),
        "element": Axis(None, "minor"),  # of a convolution's window, or of a norm
        "unnamed": Axis(("fsdp", "expert", "context")),
    }
)

Rule = str | tuple[str, ...] | Axis | None

Rules = Mapping[str, Rule]
"""Mesh axes by logical axis.

A name that `LOGICAL_AXES` lacks is a dimension of a matrix, unless its rule is an `Axis`.
"""

RULES: Rules = types.MappingProxyType({name: axis.mesh for name, axis in LOGICAL_AXES.items()})

SEQUENCE_PARALLEL: Rules = types.MappingProxyType({**RULES, "seq": ("context", "tensor")})

Axes = Mapping[str, str] | Callable[[str, Any], str | None]
"""Names for arrays without an annotation.

From patterns of dotted paths to names, such as `{"*.query_proj.weight": "heads embed"}`, of which
the first that matches wins; or from a dotted path and an array to names, or None.
"""


class _InUse(NamedTuple):
    """The settings of `use`: rules, names of axes, strictness."""

    rules: Rules
    axes: Axes
    strict: bool


_OUTSIDE = _InUse(RULES, types.MappingProxyType({}), False)
in_force: ContextVar[_InUse] = ContextVar("zoo_sharding", default=_OUTSIDE)
"""The layout that `use` has set."""


@dataclass(frozen=True)
class Layout:
    """A mesh, and how arrays are placed on it; every argument `mesh=` takes one.

    Raises:
        ShardingError: as `make_mesh`; rules for a mesh axis that no mesh has, or names in another
            form.
    """

    mesh: Mesh | AbstractMesh | str | Mapping[str, int] | None = None
    """A mesh, or the text or sizes that `make_mesh` makes one from; None is one device."""
    rules: Rules | None = None
    """Mesh axes by logical axis; if not given, those in use around it, or `RULES`."""
    axes: Axes | None = None
    """Names for arrays without an annotation, by patterns of their dotted paths, as
    `{"*.query_proj.weight": "heads embed"}`, or by a function of a path and an array."""
    strict: bool = False
    """Refuse arrays that nothing names, and sizes that leave a mesh axis unused."""

    def __post_init__(self) -> None:
        if isinstance(self.mesh, str | Mapping):
            object.__setattr__(self, "mesh", make_mesh(self.mesh))
        for name, rule in (self.rules or {}).items():
            for axis in mesh_axes([rule]):
                if axis not in MESH_AXES:
                    raise ShardingError(
                        f"the sharding rule {name!r}: {rule!r}: no mesh has an axis {axis!r}; "
                        f"the axes are {MESH_AXES}"
                    )
        if isinstance(self.axes, Mapping):
            texts: list[Any] = [*self.axes.keys(), *self.axes.values()]
            is_known = all(isinstance(text, str) for text in texts)
        else:
            is_known = self.axes is None or callable(self.axes)
        if not is_known:
            raise ShardingError(
                f"axes={self.axes!r}: give a mapping from patterns of dotted paths to names, as in "
                "{'*.query_proj.weight': 'heads embed'}, or a function from a dotted path and an "
                "array to names or None"
            )

    @property
    def without_mesh(self) -> "Layout":
        """The same rules and names alone."""
        return dataclasses.replace(self, mesh=None)


def layout_of(mesh: Mesh | AbstractMesh | Layout | None) -> Any:
    """The layout of an argument `mesh=`."""
    return mesh if isinstance(mesh, Layout) else Layout(mesh)


@contextlib.contextmanager
def use(mesh: Mesh | Layout | None) -> Iterator[None]:
    """Set what a layout gives for placement, `constrain` and `unshard`; the rest stays as it is."""
    layout = layout_of(mesh)
    changes = {"rules": layout.rules, "axes": layout.axes, "strict": layout.strict or None}
    changes = {name: value for name, value in changes.items() if value is not None}
    token = in_force.set(in_force.get()._replace(**changes))
    try:
        with contextlib.nullcontext() if layout.mesh is None else jax.set_mesh(layout.mesh):
            yield
    finally:
        in_force.reset(token)


def rules_in_use() -> Rules:
    """The rules of the innermost `use`, or `RULES`."""
    return in_force.get().rules


def num_batch_parts(mesh: Mesh | AbstractMesh | Layout | None) -> int:
    """Into how many parts a mesh cuts a batch; without one it is whole."""
    layout = layout_of(mesh)
    if layout.mesh is None:
        return 1
    rules = rules_in_use() if layout.rules is None else layout.rules
    return math.prod(layout.mesh.shape.get(axis, 1) for axis in mesh_axes([rules.get("batch")]))


def without_axes(taken: Collection[str]) -> Rules:
    """The rules in use without some mesh axes."""

    def rest(name: str, rule: Rule) -> Axis:
        free = tuple(axis for axis in mesh_axes([rule]) if axis not in taken)
        return Axis(free, kind_of(name) or "dimension")

    return {name: rest(name, rule) for name, rule in rules_in_use().items()}


def whole_rows() -> Rules:
    """The rules in use, but for rows whose tokens nothing splits, as decoding reads them."""
    rules = rules_in_use()
    split = mesh_axes(rules.get(name) for name in ("seq", "inner_seq"))
    whole = Axis(None, "activation")
    return {**without_axes(STORAGE_AXES.intersection(split)), "seq": whole, "inner_seq": whole}


def kind_of(name: str) -> Kind | None:
    """The kind of a logical axis by the rules in use and the table; None if neither knows it."""
    rules = rules_in_use()
    rule = rules.get(name)
    if isinstance(rule, Axis):
        return rule.kind
    if name in LOGICAL_AXES:
        return LOGICAL_AXES[name].kind
    return "dimension" if name in rules else None


def unknown_axis(name: str, names: Sequence[str | None], field: str, rules: Rules) -> ShardingError:
    """The error of a name that the rules do not know, among the names of a field."""
    return ShardingError(
        f"{field or tuple(names)}: the logical axis {name!r} is not in the sharding rules; known "
        f"are {sorted(rules)}, and {{**zoo.sharding.RULES, {name!r}: None}} adds it as a dimension "
        f"of a matrix, zoo.sharding.Axis(None, kind) in place of None as one of {get_args(Kind)}"
    )


def mesh_axes(entries: Iterable[Rule]) -> tuple[str, ...]:
    """All mesh axes of some rules, of a spec, or of some entries of one."""
    found: list[str] = []
    for entry in entries:
        axes = entry.mesh if isinstance(entry, Axis) else entry
        found.extend((axes,) if isinstance(axes, str) else axes or ())
    return tuple(found)


def is_stack(name: str | None) -> bool:
    """Whether an axis of this name tells arrays apart: of the kind "stack", or without a name."""
    return name is None or kind_of(name) == "stack"


def is_matrix(names: Sequence[str | None], *, field: str = "") -> bool:
    """Whether logical axes name a matrix, which weight decay and Muon are for, and not a vector.

    A head's size is part of its head, and gates of their cell's units: ("heads", "head_dim") and
    ("gates", "hidden") are vectors, and so is ("experts", "embed"), a stack of them. `field` is
    named in an error.

    Raises:
        ShardingError: an axis of activations, or one that neither the table nor the rules in use
            know.
    """
    kinds = [_parameter_kind(name, names, field) for name in names]
    return sum(kind in ("dimension", "end") for kind in kinds) >= 2


def matrix_axes(names: Sequence[str | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input and the output axes of a matrix; the other leading ones tell matrices apart.

    A matrix maps its first dimension, with its parts, to the others: ("heads", "head_dim", "embed")
    is a matrix of heads·head_dim by embed.
    """
    axes = [axis for axis, name in enumerate(names) if not is_stack(name)]
    kinds = [_parameter_kind(names[axis], names, "") for axis in axes]
    inputs = next(i for i, kind in enumerate(kinds) if kind in ("dimension", "end")) + 1
    while kinds[inputs] == "minor":
        inputs += 1
    return tuple(axes[:inputs]), tuple(axes[inputs:])


def is_hidden_matrix(names: Sequence[str | None], *, field: str = "") -> bool:
    """Whether logical axes name a matrix whose inputs and outputs are not the model's own."""
    return is_matrix(names, field=field) and "end" not in (
        _parameter_kind(name, names, field) for name in names
    )


def _parameter_kind(name: str | None, names: Sequence[str | None], field: str) -> Kind:
    """The kind of an axis of a parameter."""
    if name is None:
        return "stack"
    kind = kind_of(name)
    if kind is None:
        raise unknown_axis(name, names, field, rules_in_use())
    if kind == "activation":
        raise ShardingError(
            f"{field or tuple(names)}: {name!r} is an axis of activations, and here of a parameter"
        )
    return kind
