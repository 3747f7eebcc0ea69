"""Attention on each device of a mesh: its rows, its heads, and its part of each row's tokens.

Where the mesh splits the tokens of a row, a device has the queries of one stretch of it, and gets
the keys and values that they see. A window reaches into the neighbouring parts alone. Otherwise
they are gathered; then a causal row is cut in zigzag, so that all parts have equal work: each
device exchanges the second half of its queries for that of the device as far from the other end.
Where it sends less, devices exchange heads for tokens instead (`Exchange`).

Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from zoo.nn.attention.masks import NO_SEGMENT, WHOLE, Attend, Mask, Places, Segments
from zoo.sharding import ShardingError, is_sharding, mesh_axes, split_by
from zoo.sharding.specs import partition_spec

# Of keys and values to the queries, or of heads for tokens; "auto" is what sends less.
Transfer = Literal["auto", "gather", "exchange"]


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
        """Whether each device gets as many heads of queries."""
        return self.heads % self.parts == 0

    @property
    def copies(self) -> int:
        """How often each key-value head is sent: more than once if several devices need it."""
        group, share = self.heads // self.kv_heads, self.heads // self.parts
        if share % group == 0:
            return 1
        return group // share if group % share == 0 else group

    def numbers(self, length: int) -> float:
        """Numbers that a device sends per row and pass, per element of a head.

        Of queries, keys, values and outputs of `length` tokens in all it keeps one part, and so
        of their gradients backward: 2·(heads + copies·kv_heads)·(length/parts)·(parts-1)/parts.
        """
        sent = 2 * (self.heads + self.copies * self.kv_heads) * (length / self.parts)
        return sent * (self.parts - 1) / self.parts

    def gathered_numbers(self, length: int, mask: Mask, reach: int | None) -> float:
        """The same where keys and values come to the queries.

        They are gathered, and causal queries and outputs exchanged in zigzag, half of each:
        2·kv_heads·length·(parts-1)/parts + heads·length/parts. Or `reach` positions of the
        neighbours are all that a window sees: 2·kv_heads·reach. Gradients send as many backward.
        """
        if reach is not None:
            return 2.0 * self.kv_heads * reach
        gathered = 2 * self.kv_heads * length * (self.parts - 1) / self.parts
        return gathered + (self.heads * length / self.parts if mask.causal else 0)

    def sends_less(self, length: int, mask: Mask, reach: int | None) -> bool:
        """Whether it is possible, and sends less than `gathered_numbers`."""
        return self.divides and self.numbers(length) < self.gathered_numbers(length, mask, reach)

    def attend(
        self, attend: Attend, q: Array, k: Array, v: Array, segment_ids: Array | None
    ) -> Array:
        """`attend` to whole rows, for this device's share of the heads, and back to its tokens."""
        to = functools.partial(jax.lax.all_to_all, axis_name=self.axes, tiled=True)
        k, v = (jnp.repeat(x, self.copies, axis=2) for x in (k, v))
        q, k, v = (to(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        segments = None if segment_ids is None else (segment_ids, segment_ids)
        return to(attend(q, k, v, segments, WHOLE, 0), split_axis=1, concat_axis=2)


def on_each_device(
    attend: Attend,
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    segment_ids: Int[Array, "batch keys"] | None,
    mask: Mask,
    transfer: Transfer,
) -> Float[Array, "batch queries heads head_dim"]:
    """`attend` on each device's rows, heads and tokens: XLA does not split it well by itself.

    Raises:
        ShardingError: a causal row whose parts have no halves, where keys are gathered; heads that
            the parts do not divide, where they are to be exchanged.
    """
    if not is_sharding():
        segments = None if segment_ids is None else (segment_ids, segment_ids)
        return attend(q_BTNH, k_BSKH, v_BSKH, segments, WHOLE, 0)
    mesh = jax.sharding.get_abstract_mesh()
    rows, time, heads = partition_spec(["batch", "inner_seq", "heads"], mesh)
    _, _, kv_heads = partition_spec(["batch", "inner_seq", "kv_heads"], mesh)
    of_queries = PartitionSpec(rows, time, heads)
    of_keys = PartitionSpec(rows, time, kv_heads if kv_heads == heads else None)
    total_heads, total_kv_heads = q_BTNH.shape[2], k_BSKH.shape[2]
    part = _Part.of(mask, q_BTNH.shape[1], mesh_axes([time]), mesh)

    def local(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
        if kv_heads != heads:
            group = total_heads // total_kv_heads
            axes = mesh_axes([heads])
            first = jax.lax.axis_index(axes) * q.shape[2] if axes else 0
            k, v = (_heads_of(x, first, q.shape[2], group) for x in (k, v))
        exchange = Exchange(part.axes, part.number, q.shape[2], k.shape[2])
        way = exchange if part.exchanges(exchange, transfer) else part
        return way.attend(attend, q, k, v, segment_ids)

    # A kernel's results do not say over which axes they vary, which the check would ask for.
    return jax.shard_map(
        local,
        in_specs=(of_queries, of_keys, of_keys, PartitionSpec(rows)),
        out_specs=of_queries,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids)


def _heads_of(x_BSKH: Array, first: Array | int, num_heads: int, group: int) -> Array:
    """The key-value heads of `num_heads` query heads from `first` on, of `group` each."""
    if num_heads % group == 0 or group % num_heads == 0:
        num = max(num_heads // group, 1)
        return jax.lax.dynamic_slice_in_dim(x_BSKH, first // group, num, axis=2)
    return jnp.take(x_BSKH, (first + jnp.arange(num_heads)) // group, axis=2)


class _Part(NamedTuple):
    """A device's part of a row, and the keys that it needs besides its own.

    `before` and `after` are the positions of neighbouring parts that a window reaches, unless that
    is all of them: then keys are gathered.
    """

    mask: Mask
    axes: tuple[str, ...]
    number: int
    length: int
    before: int = 0
    after: int = 0
    gathers: bool = False

    @staticmethod
    def of(mask: Mask, total: int, axes: tuple[str, ...], mesh: AbstractMesh) -> "_Part":
        """The parts into which the mesh axes cut a row of `total` positions."""
        count = math.prod(mesh.shape[axis] for axis in axes)
        length = total // count
        before = total if mask.window is None else mask.window - 1
        after = 0 if mask.causal else before
        if count == 1:
            return _Part(mask, axes, count, length)
        if before + length + after < total:
            return _Part(mask, axes, count, length, before, after)
        return _Part(mask, axes, count, length, gathers=True)

    def exchanges(self, exchange: Exchange, transfer: Transfer) -> bool:
        """Whether heads are exchanged for tokens, rather than keys brought to the queries."""
        if self.number == 1 or transfer == "gather":
            return False
        if transfer == "exchange" and not exchange.divides:
            raise ShardingError(
                f"attention.kernel='exchange': {split_by('inner_seq')} of the mesh does not divide "
                f"the {exchange.heads} heads of a device; choose 'gather' or 'auto', or change the "
                "mesh"
            )
        reach = None if self.gathers else self.before + self.after
        is_less = exchange.sends_less(self.number * self.length, self.mask, reach)
        return transfer == "exchange" or is_less

    @property
    def zigzag(self) -> bool:
        """Whether parts exchange queries, for equal work."""
        return self.gathers and self.mask.causal

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """The first position in the row of each piece of each part's queries."""
        if not self.zigzag:
            return tuple((i * self.length,) for i in range(self.number))
        half, last = self.length // 2, 2 * self.number - 1
        return tuple((2 * i * half, (last - 2 * i) * half) for i in range(self.number))

    @property
    def places(self) -> Places:
        """Where the queries of each part lie among its keys."""
        if not self.gathers:
            return Places(((self.before,),))
        sees_all = self.mask == Mask(causal=False, window=None)
        return WHOLE if sees_all else Places(self.starts)

    def attend(
        self, attend: Attend, q: Array, k: Array, v: Array, segment_ids: Array | None
    ) -> Array:
        """The output of this device's queries, whose keys and values are `k` and `v` so far."""
        if self.zigzag and self.length % 2:
            raise ShardingError(
                f"a row of {self.number * self.length} tokens, split by {split_by('inner_seq')}: "
                "causal attention cuts each part in two, for equal work; make the length a "
                f"multiple of {2 * self.number}, or change the mesh"
            )
        index = jax.lax.axis_index(self.axes) if self.axes else 0
        segments = self._segments(segment_ids, q.shape[0], index)
        k, v = self._seen(k), self._seen(v)
        out = attend(self._exchanged(q), k, v, segments, self.places, index)
        return self._exchanged(out)

    def _seen(self, x_BSKH: Array) -> Array:
        """The keys or values that this device's queries see, and it has one part of."""
        if self.gathers:
            # By parts first: of the gradient, TPUs scatter the first axis alone, and reduce the
            # whole to every device for another.
            x_PBSKH = jax.lax.all_gather(x_BSKH, self.axes, axis=0)
            return jnp.moveaxis(x_PBSKH, 0, 1).reshape(x_BSKH.shape[0], -1, *x_BSKH.shape[2:])
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

    def _exchanged(self, x: Array) -> Array:
        """The second half exchanged with the device as far from the other end, in zigzag."""
        if not self.zigzag:
            return x
        first, second = jnp.split(x, 2, axis=1)
        ends = [(i, self.number - 1 - i) for i in range(self.number)]
        return jnp.concatenate([first, jax.lax.ppermute(second, self.axes, ends)], axis=1)

    def _segments(self, ids: Array | None, batch: int, index: Array | int) -> Segments | None:
        """The segments of this device's queries and keys, given the whole row's."""
        if ids is None and (self.gathers or self.number == 1):
            return None
        if ids is None:
            ids = jnp.zeros((batch, self.number * self.length), jnp.int32)
        if self.number == 1:
            return ids, ids
        cut = jax.lax.dynamic_slice_in_dim
        if not self.gathers:
            # Beyond the ends of the row there are no keys.
            around = ((0, 0), (self.before, self.after))
            padded = jnp.pad(ids, around, constant_values=NO_SEGMENT)
            keys = cut(padded, index * self.length, self.before + self.length + self.after, axis=1)
            return cut(ids, index * self.length, self.length, axis=1), keys
        starts = jnp.array(self.starts, jnp.int32)[index]
        size = self.length // len(starts)
        return jnp.concatenate([cut(ids, start, size, axis=1) for start in starts], axis=1), ids
