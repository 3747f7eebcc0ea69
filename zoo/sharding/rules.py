"""The one table from logical axes to mesh axes, and the rules in use: a user's may take its place.

Outside of this room no file names a mesh axis.
"""

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

MESH_AXES = ("data", "fsdp", "tensor")

# The axes that only store a parameter: where it is used, it is gathered over them.
STORAGE_AXES = frozenset({"fsdp"})

Rules = Mapping[str, str | tuple[str, ...] | None]


class ShardingError(ValueError):
    """A mesh, a rules table and an array that do not fit together."""


RULES: Rules = types.MappingProxyType(
    {
        # activations
        "batch": ("data", "fsdp"),
        "seq": None,  # between tensor-parallel parts; "tensor" gives sequence parallelism there
        "inner_seq": None,  # inside a tensor-parallel part, where rows are whole
        # parameters
        "embed": "fsdp",
        "mlp": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "hidden": "tensor",
        "vocab": "tensor",
        "gates": None,
        "positions": None,
        "features": None,  # what a model reads and gives that are no tokens: any number of them
        "classes": None,
        "experts": "tensor",  # of a mixture: each device holds whole ones
        "routes": None,  # what a router says of each expert
        "rank": None,  # of low-rank adapters
        # the leading axis of an ensemble, which then leaves the tensor axis to no axis inside
        "member": "tensor",
    }
)

SEQUENCE_PARALLEL: Rules = types.MappingProxyType({**RULES, "seq": "tensor"})

_rules: ContextVar[Rules] = ContextVar("zoo_sharding_rules", default=RULES)


def rules_in_use() -> Rules:
    """The rules of the innermost `use`, or `RULES`."""
    return _rules.get()


def mesh_axes(spec: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """All mesh axes of a spec, or of some entries of one."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return tuple(axis for entry in entries for axis in entry)


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
