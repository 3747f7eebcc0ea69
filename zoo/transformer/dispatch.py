"""The way of tokens to their experts and back, over the devices of a mesh.

Experts lie on the mesh axes of the logical axis "experts". Devices that differ in an axis which
splits the batch too have other tokens and other experts: they exchange one or the other.

- "all_reduce": each device gathers the tokens of all, computes its experts for all of them, and
  the results are added up and split again.
- "all_to_all": each token goes only to the devices of its experts, once for each, and back. All
  tokens go at once if the rows of each device fit into its buffer. No token is dropped, however
  uneven the load: where they do not fit, tokens go in rounds, of which each fits even if all of its
  rows go to one device.

With t devices and c choices per token, all_reduce moves t / c of the bytes of all_to_all, and has
room for t times a device's even share of the rows, where all_to_all has a buffer.

Legend of suffixes: B batch, T time, E embed, N tokens, C a token's choices, R routed rows,
X experts of a device, S sources and D destinations.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.products import custom_vjp, device_kind, platform
from zoo.nn.remat import POLICIES
from zoo.sharding import is_sharding, mesh_axes, partition_spec, spec_in_use
from zoo.transformer.row_orders import by_expert_first, in_order, summed, taken

Dispatch = Literal["auto", "all_reduce", "all_to_all"]

# The routing between these chips is too limited for `jax.lax.ragged_all_to_all`.
_WITHOUT_EXCHANGE = ("TPU v5 lite",)

# The name of a branch that a step seldom takes, by which a plan leaves it out.
RARELY = "rarely"

# The product of each row with the matrices of its expert; rows are in the order of the experts.
Experts = Callable[..., Float[Array, "rows embed"]]


class Routed(NamedTuple):
    """Tokens, and the weights and the numbers of the experts that each goes to."""

    x: Float[Array, "... embed"]
    weights: Float[Array, "... choices"]
    chosen: Int[Array, "... choices"]


class _Split(NamedTuple):
    """The mesh axes that experts lie on, and which of them split the tokens too."""

    axes: tuple[str, ...]
    exchanged: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        """The axes of devices with the same tokens."""
        return tuple(axis for axis in self.axes if axis not in self.exchanged)


def apply_experts(
    experts: Experts,
    routed: Routed,
    matrices: tuple[Array, ...],
    *,
    dispatch: Dispatch,
    buffer: float,
) -> Float[Array, "batch seq embed"]:
    """The weighted sum of each token's experts, which lie on the devices as `unshard` leaves them.

    `experts(rows, *matrices, sizes)` multiplies rows in the order of a device's own experts, as
    many of each as `sizes` says. XLA does not split that by itself. `matrices` are those of the
    gate, the other features and the output, and perhaps the biases of the first two.
    """
    if not is_sharding():
        return _for_all(experts, 0, routed, matrices)
    mesh = jax.sharding.get_abstract_mesh()
    tokens = partition_spec(["batch", "inner_seq"], mesh)
    # "embed" is whole, and so is "mlp" where the experts are split.
    on, hidden = spec_in_use(["experts", "mlp"], mesh)
    axes = mesh_axes([on])
    split = _Split(axes, tuple(axis for axis in axes if axis in mesh_axes(tokens)))
    added = (*split.others, *mesh_axes([hidden]))
    parts = math.prod(mesh.shape[axis] for axis in split.exchanged)
    if axes[: len(split.exchanged)] != split.exchanged:
        dispatch = "all_reduce"
    dispatch = dispatch_for(dispatch, parts, routed.chosen.shape[-1], device_kind())

    def local(routed: Routed, matrices: tuple[Array, ...]) -> Array:
        if dispatch == "all_to_all":
            y_BTE = _by_all_to_all(experts, routed, matrices, mesh, split, buffer)
        else:
            y_BTE = _by_all_reduce(experts, routed, matrices, split)
        return y_BTE[None]

    up, down = PartitionSpec(on, None, hidden), PartitionSpec(on, hidden, None)
    biases = (PartitionSpec(on, hidden),) * (len(matrices) - 3)
    # The kernel's results do not say over which axes they vary, which the check would ask for.
    y_SBTE = jax.shard_map(
        local,
        in_specs=(tokens, (up, up, down, *biases)),
        out_specs=PartitionSpec(added or None, *tokens),
        check_vma=False,
    )(routed, matrices)
    # Not `sum`, which would add up, and so send, bf16 as fp32.
    return jax.lax.reduce(y_SBTE, jnp.zeros((), y_SBTE.dtype), jax.lax.add, (0,))


def dispatch_for(dispatch: Dispatch, parts: int, choices: int, kind: str) -> Dispatch:
    """The dispatch over so many parts of the tokens on devices of a kind; "auto" is decided.

    Raises:
        ValueError: a kind of device that has no such exchange.
    """
    exchanges = kind not in _WITHOUT_EXCHANGE
    if dispatch == "auto":
        # Where both send as much, arrays of rows are smaller.
        dispatch = "all_to_all" if parts >= choices and exchanges else "all_reduce"
    if parts == 1:
        return "all_reduce"
    if dispatch == "all_to_all" and not exchanges:
        raise ValueError(
            f"experts.dispatch='all_to_all': the compiler for {kind} has no exchange of uneven "
            "parts; take 'auto' or 'all_reduce'"
        )
    return dispatch


def _by_all_reduce(
    experts: Experts, routed: Routed, matrices: tuple[Array, ...], split: _Split
) -> Float[Array, "batch seq embed"]:
    """A device's experts for the tokens of all devices that it exchanges with."""
    first = jax.lax.axis_index(split.axes) * matrices[0].shape[0] if split.axes else 0
    for axis in reversed(split.exchanged):
        gather = functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
        routed = Routed(*map(gather, routed))
    with jax.named_scope(_share(1, math.prod(map(jax.lax.axis_size, split.axes)))):
        y_BTE = _for_all(experts, first, routed, matrices)
    for axis in split.exchanged:
        y_BTE = jax.lax.psum_scatter(y_BTE, axis, tiled=True)
    return y_BTE


def _for_all(
    experts: Experts,
    first_expert: Int[Array, ""] | int,
    routed: Routed,
    matrices: tuple[Array, ...],
) -> Float[Array, "batch seq embed"]:
    """The weighted outputs of the experts from `first_expert` on, summed per token."""
    x_BTE, _, chosen_BTC = routed
    num_local, choices = matrices[0].shape[0], chosen_BTC.shape[-1]
    expert_R = chosen_BTC.reshape(-1) - first_expert
    # Rows for the experts of other devices go behind all groups, and are not computed here.
    expert_R = jnp.where((expert_R >= 0) & (expert_R < num_local), expert_R, num_local)
    order, sizes_X = in_order(expert_R, num_local)
    mine_R1 = (jnp.arange(len(expert_R), dtype=jnp.int32) < sizes_X.sum())[:, None]
    rows_RE = taken(x_BTE.reshape(-1, x_BTE.shape[-1]), order, choices)
    rows_RE = jnp.where(mine_R1, rows_RE, jnp.zeros_like(rows_RE))
    y_RE = experts(rows_RE, *matrices, sizes_X)
    y_RE = jnp.where(mine_R1, y_RE, jnp.zeros_like(y_RE))
    y_NE = summed(y_RE, routed.weights.reshape(-1, choices), order)
    return y_NE.reshape(x_BTE.shape)


def _by_all_to_all(
    experts: Experts,
    routed: Routed,
    matrices: tuple[Array, ...],
    mesh: AbstractMesh,
    split: _Split,
    buffer: float,
) -> Float[Array, "batch seq embed"]:
    """The rows of a device's tokens by the devices of their experts: all at once if they fit.

    All devices of the mesh take the same branch, or some would wait for what no other sends.
    """
    parts = math.prod(mesh.shape[axis] for axis in split.exchanged)
    others = math.prod(mesh.shape[axis] for axis in split.others)
    num_local = matrices[0].shape[0]
    flat = Routed(*(x.reshape(-1, x.shape[-1]) for x in routed))
    most = parts * flat.chosen.size
    room = min(math.ceil(buffer * flat.chosen.size / others), most)
    rounds, nobody = math.ceil(most / room), parts * others * num_local

    def round_(routed: Routed, room: int, fits: Bool[Array, ""] | bool = True) -> Array:
        return _one_round(experts, routed, matrices, split, parts, others, room, fits)

    # Only a round's inputs and orders are kept, or all rounds together would keep all rows.
    @functools.partial(jax.checkpoint, policy=POLICIES["full"], prevent_cse=False)
    def one(_: None, routed: Routed) -> tuple[None, Array]:
        return None, round_(routed, parts * routed.chosen.size)

    def in_rounds(routed: Routed) -> Array:
        padding = -len(routed.x) % rounds

        def cut(x: Array, value: int) -> Array:
            padded = jnp.pad(x, ((0, padding), (0, 0)), constant_values=value)
            return padded.reshape(rounds, -1, x.shape[-1])

        x, weights, chosen = routed
        with jax.named_scope(RARELY):
            each = Routed(cut(x, 0), cut(weights, 0), cut(chosen, nobody))
            return jax.lax.scan(one, None, each)[1].reshape(-1, x.shape[-1])[: len(x)]

    if rounds == 1:
        return round_(flat, room).reshape(routed.x.shape)
    devices_D = jnp.arange(parts * others, dtype=jnp.int32)
    sent_D = (flat.chosen.reshape(-1, 1) // num_local == devices_D[None]).sum(0)
    got = jax.lax.pmax(jax.lax.psum(sent_D, split.exchanged).max(), mesh.axis_names)
    # Members of an ensemble take both branches: what does not fit is not sent in the first.
    at_once = functools.partial(round_, room=room, fits=got <= room)
    return jax.lax.cond(got <= room, at_once, in_rounds, flat).reshape(routed.x.shape)


def _one_round(
    experts: Experts,
    routed: Routed,
    matrices: tuple[Array, ...],
    split: _Split,
    parts: int,
    others: int,
    room: int,
    fits: Bool[Array, ""] | bool,
) -> Float[Array, "tokens embed"]:
    """Rows sent to the devices of their experts, multiplied there, and sent back.

    Only if `fits`, which says that each device has `room` for the rows that it gets; else none is
    sent.
    """
    num_local, choices = matrices[0].shape[0], routed.chosen.shape[-1]
    device_R, expert_R = jnp.divmod(routed.chosen.reshape(-1), num_local)
    here = jax.lax.axis_index(split.others) if split.others else 0
    # Where several devices have the same tokens, each sends the rows for experts of its number.
    mine_R = (device_R % others == here) & (device_R < parts * others)
    expert_R = jnp.where(mine_R, device_R // others * num_local + expert_R, parts * num_local)
    order, sizes = in_order(expert_R, parts * num_local)
    sizes = jnp.where(fits, sizes, jnp.zeros_like(sizes))
    sizes_SDX = jax.lax.all_gather(sizes.reshape(parts, num_local), split.exchanged)
    sizes_SX = sizes_SDX[:, jax.lax.axis_index(split.exchanged)]

    rows_RE = taken(routed.x, order, choices)
    got_RE = _exchange(rows_RE, sizes_SDX.sum(-1), split.exchanged, room)
    by_expert = by_expert_first(sizes_SX, room)
    with jax.named_scope(_share(math.ceil(rows_RE.shape[0] / others), room)):
        y_RE = experts(taken(got_RE, by_expert, 1), *matrices, sizes_SX.sum(0))
    y_RE = taken(y_RE, by_expert.inverse, 1)
    y_RE = _exchange(y_RE, sizes_SDX.sum(-1).T, split.exchanged, rows_RE.shape[0])
    return summed(y_RE, routed.weights, order)


def _share(rows: int, room: int) -> str:
    """The name that tells a plan how many of a device's rows go to its experts under an even load.

    The kernel leaves out the tiles of the others.
    """
    return f"runs_{rows}_of_{room}_steps"


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _exchange(x_RE: Array, sizes_SD: Array, axes: tuple[str, ...], room: int) -> Array:
    """The rows that all devices have for this one, in the order of the devices, then zeros.

    Each has its rows in the order of their destinations; `sizes_SD` says how many go from each
    source to each destination. With it transposed, the exchange is its own inverse.
    """
    here = jax.lax.axis_index(axes)
    sent_D, got_S = sizes_SD[here], sizes_SD[:, here]
    starts_SD = jnp.cumsum(sizes_SD, 1) - sizes_SD  # of the rows at their sources
    ends_SD = jnp.cumsum(sizes_SD, 0) - sizes_SD  # and at their destinations
    if platform() != "cpu":
        out_RE = jnp.zeros((room, x_RE.shape[1]), x_RE.dtype)
        offsets = (starts_SD[here], sent_D, ends_SD[here], got_S)
        return jax.lax.ragged_all_to_all(x_RE, out_RE, *offsets, axis_name=axes)
    # XLA for CPU has no such exchange: each device gathers all rows, and takes its own.
    x_SRE = jax.lax.all_gather(x_RE, axes)
    source_R = jnp.repeat(jnp.arange(len(got_S), dtype=jnp.int32), got_S, total_repeat_length=room)
    index_R = jnp.arange(room, dtype=jnp.int32)
    place_R = index_R - ends_SD[source_R, here] + starts_SD[source_R, here]
    out_RE = x_SRE[source_R, jnp.minimum(place_R, x_RE.shape[0] - 1)]
    return jnp.where((index_R < got_S.sum())[:, None], out_RE, jnp.zeros_like(out_RE))


def _exchange_forward(
    x_RE: Array, sizes_SD: Array, axes: tuple[str, ...], room: int
) -> tuple[Array, tuple[Array, Array]]:
    # Of the rows, only their number is needed.
    return _exchange(x_RE, sizes_SD, axes, room), (sizes_SD, x_RE[:, :0])


def _exchange_backward(
    axes: tuple[str, ...], room: int, residuals: tuple[Array, Array], g_RE: Array
) -> tuple[Array, None]:
    sizes_SD, rows = residuals
    return _exchange(g_RE, sizes_SD.T, axes, len(rows)), None


_exchange.defvjp(_exchange_forward, _exchange_backward)
