"""The one table of logical axes: the mesh axes that shard each, and its kind.

Its first column is `RULES`; a user's rules may take their place. No file outside of this room names
a mesh axis.
"""

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

import jax
from jax.sharding import Mesh

MESH_AXES = ("data", "fsdp", "tensor")

# The axes that only store a parameter: where it is used, it is gathered over them.
STORAGE_AXES = frozenset({"fsdp"})


class ShardingError(ValueError):
    """A mesh, a rules table and an array that do not fit together."""


Kind = Literal["dimension", "end", "minor", "major", "stack", "activation"]


@dataclass(frozen=True)
class Axis:
    """A logical axis: the mesh axes that shard it, and its kind.

    Raises:
        ShardingError: a kind that there is not.
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
        "batch": Axis(("data", "fsdp"), "activation"),
        # Between tensor-parallel parts; "tensor" gives sequence parallelism there.
        "seq": Axis(None, "activation"),
        # Inside them, where sequence parallelism does not split it.
        "inner_seq": Axis(None, "activation"),
        "embed": Axis("fsdp"),
        "mlp": Axis("tensor"),
        "heads": Axis("tensor"),
        "kv_heads": Axis("tensor"),
        "head_dim": Axis(None, "minor"),
        "hidden": Axis("tensor"),
        "gates": Axis(None, "major"),
        "routes": Axis(None),  # a router's output for each expert
        "rank": Axis(None),  # of low-rank adapters
        "vocab": Axis("tensor", "end"),
        "positions": Axis(None, "end"),
        "features": Axis(None, "end"),  # inputs that are no tokens: any number of them
        "classes": Axis(None, "end"),  # outputs that are no tokens
        "experts": Axis("tensor", "stack"),  # of a mixture: each device holds whole ones
        # The first axis of an ensemble, which then leaves the tensor axis to no axis inside.
        "member": Axis("tensor", "stack"),
    }
)

Rule = str | tuple[str, ...] | Axis | None

# A name that `LOGICAL_AXES` lacks is a dimension of a matrix, unless its rule is an `Axis`.
Rules = Mapping[str, Rule]

RULES: Rules = types.MappingProxyType({name: axis.mesh for name, axis in LOGICAL_AXES.items()})

SEQUENCE_PARALLEL: Rules = types.MappingProxyType({**RULES, "seq": "tensor"})

_rules: ContextVar[Rules] = ContextVar("zoo_sharding_rules", default=RULES)


def rules_in_use() -> Rules:
    """The rules of the innermost `use`, or `RULES`."""
    return _rules.get()


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


def check_rules(rules: Rules | None) -> None:
    """Refuse rules for a mesh axis that no mesh has, which would shard nothing in silence.

    Raises:
        ShardingError: such a rule, by name.
    """
    for name, axes in (rules or {}).items():
        for axis in mesh_axes([axes]):
            if axis not in MESH_AXES:
                raise ShardingError(
                    f"the sharding rule {name!r}: {axes!r}: no mesh has an axis {axis!r}; "
                    f"the axes are {MESH_AXES}"
                )


@contextlib.contextmanager
def use(mesh: Mesh | None, rules: Rules | None = None) -> Iterator[None]:
    """Set the mesh and the rules that `constrain` and `gather` see; None leaves either as it is.

    Raises:
        ShardingError: rules for a mesh axis that no mesh has.
    """
    check_rules(rules)
    token = _rules.set(_rules.get() if rules is None else rules)
    try:
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            yield
    finally:
        _rules.reset(token)
