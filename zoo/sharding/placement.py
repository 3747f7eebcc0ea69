"""Meshes, and the one table from logical axes to mesh axes: no other file names a mesh axis.

The jaxtyping annotation of a parameter is its sharding annotation: `Float[Array, "embed mlp"]`
names two logical axes, and `RULES` maps each of them to a mesh axis (or to none).
"""

import contextlib
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from zoo.nn.precision import cast_for_use
from zoo.sharding.axes import ShardingError, is_parameter, keystr, map_parameters

MESH_AXES = ("data", "fsdp", "tensor")

# The axes that only store a parameter: where it is used, it is gathered over them.
STORAGE_AXES = frozenset({"fsdp"})

Tree = TypeVar("Tree")
Rules = Mapping[str, str | tuple[str, ...] | None]

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


def make_mesh(
    spec: str | Mapping[str, int] = "", devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Make a mesh with the axes `data`, `fsdp` and `tensor` from a text such as "fsdp=4,tensor=2".

    An axis that is not named has size 1, one may be -1 (whatever is left), and "" is one device.
    A mesh smaller than `devices` (default: all of this run's) takes the first of them. Axes are
    Auto: XLA places what the annotations leave open.

    Raises:
        ShardingError: an unknown axis, a size that is no integer, or too many or too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict.fromkeys(MESH_AXES, 1) | _parse_mesh(spec)
    unknown = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(unknown) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ShardingError(f"mesh {spec!r}: sizes are positive, and one at most is -1")
    if unknown:
        if len(devices) % known:
            raise ShardingError(
                f"mesh {spec!r}: {known} does not divide the {len(devices)} devices"
            )
        sizes[unknown[0]] = len(devices) // known
    total = math.prod(sizes.values())
    if total > len(devices):
        raise ShardingError(
            f"mesh {spec!r} needs {total} devices, and this run has {len(devices)}; on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={total} makes as many"
        )
    if jax.process_count() > 1 and total < len(devices):
        raise ShardingError(
            f"mesh {spec!r} has {total} of the {len(devices)} devices of {jax.process_count()} "
            f"processes, and needs all of them; for example {'data=-1'!r}"
        )
    # Not `jax.make_mesh`: a slice of 8×8 TPUs has an axis of 2 too, if an axis of its own is split.
    try:
        placed = mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices[:total], allow_split_physical_axes=True
        )
    except AssertionError:  # by a slice of TPUs
        raise ShardingError(
            f"mesh {spec!r} has {total} of the {len(devices)} devices, which are no block of the "
            "slice; take all of them, or a half or a quarter"
        ) from None
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _parse_mesh(spec: str | Mapping[str, int]) -> dict[str, int]:
    if isinstance(spec, str):
        items = [item.strip().partition("=") for item in spec.split(",") if item.strip()]
        try:
            sizes = {axis.strip(): int(size) for axis, _, size in items}
        except ValueError:
            raise ShardingError(
                f"mesh {spec!r}: write it as axis=size, such as 'fsdp=4,tensor=2'"
            ) from None
    else:
        sizes = dict(spec)
    for axis in sizes:
        if axis not in MESH_AXES:
            raise ShardingError(f"mesh {spec!r}: no axis {axis!r}; the axes are {MESH_AXES}")
    return sizes


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


def partition_spec(
    names: Sequence[str | None],
    mesh: Mesh | jax.sharding.AbstractMesh,
    rules: Rules | None = None,
    *,
    without: frozenset[str] = frozenset(),
    field: str = "",
) -> PartitionSpec:
    """The PartitionSpec of logical axis names: each takes the mesh axes still free, left to right.

    None names an axis that is not sharded; mesh axes in `without` are left out.

    Raises:
        ShardingError: a name that the rules do not know, or rules for an axis that no mesh has.
    """
    check_rules(rules)
    rules = _rules.get() if rules is None else rules
    used = set(without)
    entries: list[str | tuple[str, ...] | None] = []
    for name in names:
        if name is not None and name not in rules:
            raise ShardingError(
                f"{field or tuple(names)}: the logical axis {name!r} is not in the sharding rules; "
                f"known are {sorted(rules)}, and {{**zoo.sharding.RULES, {name!r}: None}} adds it"
            )
        axes = rules[name] if name is not None else None
        axes = (axes,) if isinstance(axes, str) else axes or ()
        free = tuple(axis for axis in axes if axis in mesh.axis_names and axis not in used)
        used.update(free)
        entries.append(free[0] if len(free) == 1 else free or None)
    return PartitionSpec(*entries)


def _check_divides(field: str, shape: Sequence[int], spec: PartitionSpec, mesh: Any) -> None:
    for size, entry in zip(shape, spec, strict=True):
        parts = _size(PartitionSpec(entry), mesh)
        if size % parts:
            axes = (entry,) if isinstance(entry, str) else entry
            raise ShardingError(
                f"{field} of shape {tuple(shape)}: the size {size} is not divisible by "
                f"{'*'.join(axes)}={parts} of the mesh; change the size, the mesh or the rules"
            )


def num_parts(*names: str | None) -> int:
    """Into how many parts the mesh that is set cuts an activation of these logical axes."""
    if not is_sharding():
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    return _size(partition_spec(names, mesh), mesh)


def _size(spec: PartitionSpec, mesh: Any) -> int:
    """The number of parts of a whole spec."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(spec))


def mesh_axes(spec: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """All mesh axes of a spec, or of some entries of one."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return tuple(axis for entry in entries for axis in entry)


def is_sharding() -> bool:
    """Whether a mesh of several devices is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.size == 1)


def constrain(x: Array, *names: str | None) -> Array:
    """Shard an activation by logical axis names, one a dimension; without a mesh, the identity.

    Raises:
        ShardingError: a number of names that is not the rank, an unknown name, or a size that
            the mesh axis does not divide.
    """
    if not is_sharding():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    if len(names) != x.ndim:
        raise ShardingError(f"an activation of shape {x.shape} is named {names}")
    spec = partition_spec(names, mesh)
    _check_divides(f"the activation {names}", x.shape, spec, mesh)
    return jax.lax.with_sharding_constraint(x, spec)


def gather(tree: Tree) -> Tree:
    """Cast parameters to the compute dtype, and gather them over the axes that only store them.

    Those are `STORAGE_AXES` and all that split the batch, whose devices need the parameters for
    rows of their own. Call it where they are used: inside the scan over layers, on the layer in
    use, so that one layer at a time is whole, and what crosses the network is in the compute
    dtype. Gradients go the same way back: reduced to the parts that are stored, in the compute
    dtype.
    """
    tree = cast_for_use(tree)
    if not is_sharding():
        return tree
    mesh = jax.sharding.get_abstract_mesh()

    def gather_leaf(path: tuple, names: tuple, leaf: Any) -> Any:
        stored = partition_spec(names, mesh, field=keystr(path))
        used = spec_in_use(names, mesh)
        return _reshard(leaf, used, stored)

    return map_parameters(gather_leaf, tree)


def spec_in_use(
    names: Sequence[str | None], mesh: Mesh | jax.sharding.AbstractMesh
) -> PartitionSpec:
    """The PartitionSpec of a parameter where it is used, as `gather` leaves it."""
    split_the_batch = mesh_axes(partition_spec(["batch"], mesh))
    return partition_spec(names, mesh, without=STORAGE_AXES.union(split_the_batch))


# A constraint's own gradient is constrained alike: whole, by an all-reduce of twice the bytes.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reshard(x: Array, used: PartitionSpec, stored: PartitionSpec) -> Array:
    """The identity: sharded as `used`, and its gradient as `stored`."""
    # First as stored, or XLA may gather before the cast to the compute dtype, which is before this.
    x = jax.lax.with_sharding_constraint(x, stored)
    return jax.lax.with_sharding_constraint(x, used)


def _reshard_forward(x: Array, used: PartitionSpec, stored: PartitionSpec) -> tuple[Array, None]:
    return _reshard(x, used, stored), None


def _reshard_backward(
    used: PartitionSpec, stored: PartitionSpec, residuals: None, g: Array
) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(g, stored),)


_reshard.defvjp(_reshard_forward, _reshard_backward)


@contextlib.contextmanager
def mapped(name: str) -> Iterator[tuple[str, ...] | None]:
    """Within, `jax.vmap` over a logical axis has the mesh axes of that axis to itself.

    Yields them for `spmd_axis_name`; None where nothing shards it.
    """
    if not is_sharding():
        yield None
        return
    mesh = jax.sharding.get_abstract_mesh()
    [entry] = partition_spec([name], mesh)
    taken = (entry,) if isinstance(entry, str) else entry or ()

    def rest(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        axes = (axes,) if isinstance(axes, str) else axes or ()
        return tuple(axis for axis in axes if axis not in taken)

    with use(None, {axis: rest(axes) for axis, axes in _rules.get().items()}):
        yield taken or None


def shardings(tree: PyTree, mesh: Mesh, rules: Rules | None = None) -> Any:
    """The NamedSharding of each parameter; other leaves stay as they are.

    Raises:
        ShardingError: as `logical_axes`; an axis that the rules do not know; or a size that the
            mesh axis does not divide.
    """

    def place(path: tuple, names: tuple, leaf: Any) -> NamedSharding:
        spec = partition_spec(names, mesh, rules, field=keystr(path))
        _check_divides(keystr(path), leaf.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return map_parameters(place, tree)


def like_parameters(
    tree: PyTree, parameters: PyTree, mesh: Mesh, rules: Rules | None = None
) -> Any:
    """The NamedSharding of optimizer state: each array as the parameter that its path ends in.

    An array of the parameter's shape, or of that shape less one axis (a factored second moment),
    is sharded alike. What belongs to no parameter is replicated: counters, placeholders.
    """
    placed = shardings(parameters, mesh, rules)
    leaves = jtu.tree_leaves_with_path(parameters)
    table = {
        path: (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(placed), strict=True)
        if is_parameter(leaf)
    }

    def place(path: tuple, leaf: Any) -> Any:
        if not is_parameter(leaf):
            return leaf
        suffixes = (path[start:] for start in range(len(path)))
        shape, spec = next((table[s] for s in suffixes if s in table), ((), PartitionSpec()))
        if leaf.shape == shape:
            return NamedSharding(mesh, spec)
        for axis in range(len(shape)):
            if leaf.shape == shape[:axis] + shape[axis + 1 :]:
                return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
        return replicated(mesh)

    return jtu.tree_map_with_path(place, tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of scalars and counters: whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, ndim: int, rules: Rules | None = None) -> NamedSharding:
    """The sharding of one array of a batch, of rank `ndim`: the first axis over the batch axes."""
    names = ("batch",) + (None,) * (ndim - 1) if ndim else ()
    return NamedSharding(mesh, partition_spec(names, mesh, rules))


def canonical(placed: jax.sharding.Sharding) -> Any:
    """A form of a sharding that is equal for equal placements, of a NamedSharding its mesh axes.

    XLA returns a spec that may name axes of size 1 or leave out trailing dimensions.
    """
    if not isinstance(placed, NamedSharding):
        return placed
    entries: list[tuple[str, ...]] = []
    for entry in placed.spec:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        entries.append(tuple(axis for axis in axes if placed.mesh.shape[axis] > 1))
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that a model or state was placed on; None if on one device, without a mesh."""
    for leaf in jax.tree.leaves(tree):
        placed = getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh):
            return placed.mesh
    return None


def num_batch_parts(mesh: Mesh, rules: Rules | None = None) -> int:
    """Into how many parts the mesh cuts a batch."""
    return _size(partition_spec(["batch"], mesh, rules), mesh)


def placement_table(tree: PyTree, mesh: Mesh, rules: Rules | None = None) -> str:
    """A text table of where each parameter goes: path, shape, dtype, axes, spec, bytes a device."""
    rows = [("parameter", "shape", "dtype", "logical axes", "mesh axes", "bytes a device")]
    total = 0

    def add(path: tuple, names: tuple, leaf: Any) -> None:
        nonlocal total
        spec = partition_spec(names, mesh, rules, field=keystr(path))
        _check_divides(keystr(path), leaf.shape, spec, mesh)
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        size = math.prod(shard) * leaf.dtype.itemsize
        total += size
        shape = "×".join(map(str, leaf.shape))
        axes = " ".join(name or "·" for name in names)
        placed = " ".join("+".join((e,) if isinstance(e, str) else e or "·") for e in spec)
        rows.append((keystr(path), shape, str(leaf.dtype), axes, placed, f"{size:,}"))

    map_parameters(add, tree)
    rows.append(("all", "", "", "", "", f"{total:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        + "  "
        + row[-1].rjust(widths[-1])
        for row in rows
    )
