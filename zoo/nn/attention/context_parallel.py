"""Attention on each device of a mesh: its rows, its heads, and its part of each row's tokens.

Where the mesh splits the tokens of a row, a device has the queries of one stretch of it, and gets
the keys and values that they see. A window reaches into the neighbouring parts alone. Otherwise
they go around, part by part (`Ring`), so that no device ever has them all. Where that sends less,
devices exchange heads for tokens instead (`Exchange`).

Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from zoo.nn.attention.masks import NO_SEGMENT, Kernel, Mask, Segments, run
from zoo.nn.attention.ring import Ring, cut
from zoo.sharding import ShardingError, is_sharding, mesh_axes, split_by
from zoo.sharding.specs import partition_spec

# Of keys and values to the queries, or of heads for tokens; "auto" is what sends less.
Transfer = Literal["auto", "ring", "exchange"]


class Exchange(NamedTuple):
    """The exchange of heads for tokens among the devices that have the parts of a row.

    An all-to-all gives each device the queries, keys and values of whole rows for its share of the
    heads, and another brings the output back (Jacobs et al. 2023, DeepSpeed Ulysses).
    """

    axes: tuple[str, ...]
    """Mesh axes that cut the row."""
    parts: int
    heads: int
    """Heads of queries on a device, of each token that it has."""
    kv_heads: int

    @property
    def divides(self) -> bool:
        """Whether each device gets the same number of query heads."""
        return self.heads % self.parts == 0

    @property
    def copies(self) -> int:
        """How often each key-value head is sent: more than once if several devices need it."""
        group, share = self.heads // self.kv_heads, self.heads // self.parts
        if share % group == 0:
            return 1
        return group // share if group % share == 0 else group

    def numbers(self, length: int) -> float:
        """Numbers that a device sends per row, forward and backward, per element of a head.

        It keeps one part of the queries, keys, values and outputs of `length` tokens in all, and of
        their gradients: 4·(heads + copies·kv_heads)·(length/parts)·(parts-1)/parts.
        """
        sent = 4 * (self.heads + self.copies * self.kv_heads) * (length / self.parts)
        return sent * (self.parts - 1) / self.parts

    def numbers_of_keys(self, length: int, mask: Mask, reach: int) -> float:
        """The same where keys and values come to the queries.

        They go around twice, and their gradients, which are in fp32, once: 6·kv_heads·length;
        half of all that is causal is exchanged in zigzag: 2·(heads + kv_heads)·length/parts. Or
        `reach` positions of the neighbours are all that a window sees: 4·kv_heads·reach.
        """
        if mask.window is not None:
            return 4.0 * self.kv_heads * reach
        zigzag = 2 * (self.heads + self.kv_heads) * length / self.parts
        return 6.0 * self.kv_heads * length + (zigzag if mask.causal else 0)

    def sends_less(self, length: int, mask: Mask, reach: int) -> bool:
        """Whether it is possible, and sends less than `numbers_of_keys`."""
        return self.divides and self.numbers(length) < self.numbers_of_keys(length, mask, reach)

    def chosen(self, transfer: Transfer, length: int, mask: Mask, reach: int) -> bool:
        """Whether heads are exchanged for tokens, rather than keys brought to the queries."""
        if self.parts == 1 or transfer == "ring":
            return False
        if transfer == "exchange" and not self.divides:
            raise ShardingError(
                f"attention.kernel='exchange': {split_by('inner_seq')} of the mesh does not divide "
                f"the {self.heads} heads of a device; choose 'ring' or 'auto', or change the mesh"
            )
        return transfer == "exchange" or self.sends_less(length, mask, reach)

    def attend(
        self,
        kernel: Kernel,
        q: Array,
        k: Array,
        v: Array,
        segment_ids: Array | None,
        sinks: Array | None,
    ) -> Array:
        """Attention to whole rows, for this device's share of the heads, and back to its tokens."""
        if sinks is not None:
            share = self.heads // self.parts
            first = jax.lax.axis_index(self.axes) * share
            sinks = jax.lax.dynamic_slice_in_dim(sinks, first, share)
        to = functools.partial(jax.lax.all_to_all, axis_name=self.axes, tiled=True)
        k, v = (jnp.repeat(x, self.copies, axis=2) for x in (k, v))
        q, k, v = (to(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        segments = None if segment_ids is None else (segment_ids, segment_ids)
        return to(run(kernel, q, k, v, segments, sinks), split_axis=1, concat_axis=2)


def on_each_device(
    kernel: Kernel,
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    segment_ids: Int[Array, "batch keys"] | None,
    transfer: Transfer,
    sinks_N: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
    """Attention on each device's rows, heads and tokens: XLA does not split it well by itself.

    Raises:
        ShardingError: a causal row whose parts have no halves, where keys go around; heads that
            the parts do not divide, where they are to be exchanged.
    """
    if not is_sharding():
        segments = None if segment_ids is None else (segment_ids, segment_ids)
        return run(kernel, q_BTNH, k_BSKH, v_BSKH, segments, sinks_N)
    mesh, total = jax.sharding.get_abstract_mesh(), q_BTNH.shape[1]
    rows, time, heads = partition_spec(["batch", "inner_seq", "heads"], mesh)
    _, _, kv_heads = partition_spec(["batch", "inner_seq", "kv_heads"], mesh)
    of_queries = PartitionSpec(rows, time, heads)
    of_keys = PartitionSpec(rows, time, kv_heads if kv_heads == heads else None)
    total_heads, total_kv_heads = q_BTNH.shape[2], k_BSKH.shape[2]
    axes = mesh_axes([time])
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if kernel.mask.window is not None and kernel.mask.window >= total:
        kernel = kernel.under(Mask(kernel.mask.causal, None))
    mask = kernel.mask
    near = _Neighbours.of(mask, total, axes, parts)

    def local(
        q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None
    ) -> Array:
        if kv_heads != heads:
            group = total_heads // total_kv_heads
            axes_of_heads = mesh_axes([heads])
            first = jax.lax.axis_index(axes_of_heads) * q.shape[2] if axes_of_heads else 0
            k, v = (_heads_of(x, first, q.shape[2], group) for x in (k, v))
        exchange = Exchange(axes, parts, q.shape[2], k.shape[2])
        if exchange.chosen(transfer, total, mask, near.before + near.after):
            return exchange.attend(kernel, q, k, v, segment_ids, sinks)
        if parts == 1 or mask.window is not None:
            return near.attend(kernel, q, k, v, segment_ids, sinks)
        return Ring(kernel, axes, parts).attend(q, k, v, segment_ids, sinks)

    # A kernel's results do not say over which axes they vary, which the check would ask for.
    return jax.shard_map(
        local,
        in_specs=(of_queries, of_keys, of_keys, PartitionSpec(rows), PartitionSpec(heads)),
        out_specs=of_queries,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids, sinks_N)


def _heads_of(x_BSKH: Array, first: Array | int, num_heads: int, group: int) -> Array:
    """The key-value heads of `num_heads` query heads from `first` on, of `group` each."""
    if num_heads % group == 0 or group % num_heads == 0:
        num = max(num_heads // group, 1)
        return jax.lax.dynamic_slice_in_dim(x_BSKH, first // group, num, axis=2)
    return jnp.take(x_BSKH, (first + jnp.arange(num_heads)) // group, axis=2)


class _Neighbours(NamedTuple):
    """A part of a row whose queries see keys through a window: its own and those around it.

    `before` and `after` are the positions of other parts that it reaches.
    """

    axes: tuple[str, ...]
    number: int
    length: int
    before: int
    after: int

    @staticmethod
    def of(mask: Mask, total: int, axes: tuple[str, ...], number: int) -> "_Neighbours":
        """The neighbours for a row of `total` positions in `number` parts."""
        length = total // number
        reach = 0 if mask.window is None else min(mask.window - 1, total - length)
        return _Neighbours(axes, number, length, reach, 0 if mask.causal else reach)

    def attend(
        self,
        kernel: Kernel,
        q: Array,
        k: Array,
        v: Array,
        segment_ids: Array | None,
        sinks: Array | None,
    ) -> Array:
        """The output of this device's queries, whose keys and values are `k` and `v` so far."""
        segments = self._segments(segment_ids, q.shape[0])
        kernel = kernel.under(kernel.mask, first=self.before)
        return run(kernel, q, self._seen(k), self._seen(v), segments, sinks)

    def _seen(self, x_BSKH: Array) -> Array:
        """The keys or values that this device's queries see, given the part of them that it has."""
        before = [self._sent(x_BSKH, self.before, far) for far in self._distances(self.before)]
        after = [self._sent(x_BSKH, self.after, -far) for far in self._distances(self.after)]
        pieces = [*reversed(before), x_BSKH, *after]
        return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else x_BSKH

    def _distances(self, reach: int) -> range:
        """How many parts away the parts within reach are."""
        return range(1, math.ceil(reach / self.length) + 1)

    def _sent(self, x: Array, reach: int, far: int) -> Array:
        """The tokens within reach of the part `far` behind this one; zeros beyond the row."""
        size = min(self.length, reach - (abs(far) - 1) * self.length)
        x = x[:, -size:] if far > 0 else x[:, :size]
        ends = [(i, i + far) for i in range(self.number) if 0 <= i + far < self.number]
        return jax.lax.ppermute(x, self.axes, ends)

    def _segments(self, ids: Array | None, batch: int) -> Segments | None:
        """The segments of this device's queries and keys, given the whole row's."""
        if self.number == 1:
            return None if ids is None else (ids, ids)
        if ids is None:
            ids = jnp.zeros((batch, self.number * self.length), jnp.int32)
        # Beyond the ends of the row there are no keys.
        padded = jnp.pad(ids, ((0, 0), (self.before, self.after)), constant_values=NO_SEGMENT)
        start = jax.lax.axis_index(self.axes) * self.length
        keys = cut(padded, start, self.before + self.length + self.after)
        return cut(ids, start, self.length), keys
