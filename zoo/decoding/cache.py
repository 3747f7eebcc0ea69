"""The cache of a decoder with attention: each layer's keys and values, in a ring of slots.

Rows are aligned to the right (padding first), so that every row's next token has the same index,
and goes to the same slot: index modulo the number of slots. A layer with a sliding window has as
many slots as its window, and so forgets the tokens that it must not see.

Legend of suffixes: L layers, B batch, T time, K key-value heads, N query heads, S slots, H head
size.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention.attention import attend_to_slots
from zoo.sharding import constrain, is_sharding


class Clock(eqx.Module):
    """Where all rows are: the next token's index in the padded rows, and its position in each."""

    index: Int[Array, ""]
    positions: Int[Array, "batch"]

    @staticmethod
    def after(mask: Bool[Array, "batch seq"]) -> "Clock":
        """The clock behind right-aligned rows; `mask` is False at the padding before them."""
        return Clock(jnp.asarray(mask.shape[1], jnp.int32), mask.sum(1, dtype=jnp.int32))

    def tick(self) -> "Clock":
        """The clock one token later."""
        return Clock(self.index + 1, self.positions + 1)

    def seen(self, num_slots: int) -> Bool[Array, "batch slots"]:
        """Which slots of a ring the token at this index sees, itself included."""
        age_S = (self.index - jnp.arange(num_slots, dtype=jnp.int32)) % num_slots
        # A slot older than the row's first token is padding, or was never written.
        return age_S[None, :] <= self.positions[:, None]


class LayerCache(eqx.Module):
    """The keys and values of one layer, in the dtype that it computed them in.

    An array is [batch, kv_heads, slots, head_dim], on one device without those of the first two
    axes that have size 1: XLA for CPU copies a ring with such an axis three times in every step,
    and four times one that is reshaped where it is read.
    """

    keys: Float[Array, "*rings slots head_dim"]
    values: Float[Array, "*rings slots head_dim"]

    @staticmethod
    def filled(
        k_BTKH: Float[Array, "batch seq kv_heads head_dim"],
        v_BTKH: Float[Array, "batch seq kv_heads head_dim"],
        num_slots: int,
    ) -> "LayerCache":
        """The ring behind those tokens: the last `num_slots` of them, each in its slot."""

        def fill(x_BTKH: Array) -> Array:
            seq = x_BTKH.shape[1]
            x_BKSH = x_BTKH[:, -num_slots:].swapaxes(1, 2)
            x_BKSH = jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, max(0, num_slots - seq)), (0, 0)))
            return _place(jnp.roll(x_BKSH, max(0, seq - num_slots) % num_slots, axis=2))

        return LayerCache(fill(k_BTKH), fill(v_BTKH))

    def write(
        self,
        k_B1KH: Float[Array, "batch 1 kv_heads head_dim"],
        v_B1KH: Float[Array, "batch 1 kv_heads head_dim"],
        clock: Clock,
    ) -> "LayerCache":
        """The ring with the next token in it, in place of the oldest if it is full."""

        def put(ring: Array, x_B1KH: Array) -> Array:
            axis = ring.ndim - 2
            slot = clock.index % ring.shape[axis]
            return lax.dynamic_update_slice_in_dim(ring, _place(x_B1KH.swapaxes(1, 2)), slot, axis)

        return LayerCache(put(self.keys, k_B1KH), put(self.values, v_B1KH))

    def attend(
        self,
        q_B1NH: Float[Array, "batch 1 heads head_dim"],
        clock: Clock,
        *,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "batch 1 heads head_dim"]:
        """The attention output of the token just written, over all slots that it sees."""
        seen_B1S = clock.seen(self.keys.shape[-2])[:, None]
        keys, values = (_with_rows(x, q_B1NH.shape[0]) for x in (self.keys, self.values))
        return attend_to_slots(q_B1NH, keys, values, seen_B1S, soft_cap=soft_cap, scale=scale)

    def attend_ahead(
        self,
        q_BTNH: Float[Array, "batch new heads head_dim"],
        new: "NewTokens",
        clock: Clock,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "batch new heads head_dim"]:
        """The attention output of tokens that are not in the ring yet, `new`, over it and them."""
        batch, count = q_BTNH.shape[:2]
        keys, values = (
            jnp.concatenate([_with_rows(ring, batch), x.swapaxes(1, 2)], axis=2)
            for ring, x in ((self.keys, new.keys), (self.values, new.values))
        )
        num_slots = self.keys.shape[-2]
        before = clock.index - 1
        indices = before - (before - jnp.arange(num_slots, dtype=jnp.int32)) % num_slots
        ahead = clock.index + jnp.arange(count, dtype=jnp.int32)
        indices = jnp.concatenate([indices, ahead])
        age_TS = ahead[:, None] - indices[None]
        seen_TS = age_TS >= 0
        if window is not None:
            seen_TS &= age_TS < window
        # What is older than the row's first token is padding, or was never written.
        seen_BS = indices[None] >= (clock.index - clock.positions)[:, None]
        seen_BTS = seen_TS[None] & seen_BS[:, None]
        return attend_to_slots(q_BTNH, keys, values, seen_BTS, soft_cap=soft_cap, scale=scale)

    def write_ahead(self, new: "NewTokens", clock: Clock) -> "LayerCache":
        """The ring, which has room, with all new tokens in it; those not kept are written over."""

        def put(ring: Array, x_BTKH: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(
                ring, _place(x_BTKH.swapaxes(1, 2)), clock.index, ring.ndim - 2
            )

        return LayerCache(put(self.keys, new.keys), put(self.values, new.values))

    def attend_written(
        self,
        q_BTNH: Float[Array, "batch new heads head_dim"],
        clock: Clock,
        *,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "batch new heads head_dim"]:
        """The attention output of tokens written ahead of the clock, each over those up to it."""
        batch, count = q_BTNH.shape[:2]
        slots = jnp.arange(self.keys.shape[-2], dtype=jnp.int32)
        last_T = clock.index + jnp.arange(count, dtype=jnp.int32)
        seen_BS = slots[None] >= (clock.index - clock.positions)[:, None]
        seen_BTS = (slots[None] <= last_T[:, None])[None] & seen_BS[:, None]
        keys, values = (_with_rows(x, batch) for x in (self.keys, self.values))
        return attend_to_slots(q_BTNH, keys, values, seen_BTS, soft_cap=soft_cap, scale=scale)

    def write_first(self, new: "NewTokens", count: Int[Array, ""], clock: Clock) -> "LayerCache":
        """The ring with the first `count` of the new tokens in it."""

        def put(ring: Array, x_BTKH: Array) -> Array:
            axis = ring.ndim - 2
            for place in range(x_BTKH.shape[1]):
                slot = (clock.index + place) % ring.shape[axis]
                old = lax.dynamic_slice_in_dim(ring, slot, 1, axis)
                one = _place(x_BTKH[:, place : place + 1].swapaxes(1, 2))
                one = jnp.where(place < count, one, old)
                ring = lax.dynamic_update_slice_in_dim(ring, one, slot, axis)
            return ring

        return LayerCache(put(self.keys, new.keys), put(self.values, new.values))

    def take(self, rows: Int[Array, "rows"], batch: int) -> "LayerCache":
        """The cache of some rows, out of the `batch` that it has."""
        return jax.tree.map(lambda x: _place(_with_rows(x, batch)[rows]), self)


class NewTokens(eqx.Module):
    """The keys and values of tokens that a layer, or each of a stack of them, has read, and that
    are not in its ring.
    """

    keys: Float[Array, "*layers batch new kv_heads head_dim"]
    values: Float[Array, "*layers batch new kv_heads head_dim"]


class StackedCache(eqx.Module):
    """The rings of layers with as many slots each, stacked along the first axis."""

    layers: LayerCache

    @staticmethod
    def filled(
        k_LBTKH: Float[Array, "layers batch seq kv_heads head_dim"],
        v_LBTKH: Float[Array, "layers batch seq kv_heads head_dim"],
        num_slots: int,
    ) -> "StackedCache":
        """The rings behind those tokens, as `LayerCache.filled`."""
        fill = jax.vmap(lambda k_BTKH, v_BTKH: LayerCache.filled(k_BTKH, v_BTKH, num_slots))
        return StackedCache(fill(k_LBTKH, v_LBTKH))

    def __getitem__(self, index: Int[Array, ""]) -> LayerCache:
        return jax.tree.map(lambda x: x[index], self.layers)

    def write(
        self,
        index: Int[Array, ""],
        k_B1KH: Float[Array, "batch 1 kv_heads head_dim"],
        v_B1KH: Float[Array, "batch 1 kv_heads head_dim"],
        clock: Clock,
    ) -> "StackedCache":
        """The rings with the next token in that layer's; no other slot of it is written."""

        def put(stack: Array, x_B1KH: Array) -> Array:
            slot = clock.index % stack.shape[-2]
            between = (jnp.zeros((), jnp.int32),) * (stack.ndim - 3)
            start = (index, *between, slot, jnp.zeros((), jnp.int32))
            return lax.dynamic_update_slice(stack, _place(x_B1KH.swapaxes(1, 2))[None], start)

        keys, values = put(self.layers.keys, k_B1KH), put(self.layers.values, v_B1KH)
        return StackedCache(LayerCache(keys, values))

    def write_first(self, new: NewTokens, count: Int[Array, ""], clock: Clock) -> "StackedCache":
        """The rings with the first `count` of each layer's new tokens in them."""
        write = jax.vmap(lambda layer, new: layer.write_first(new, count, clock))
        return StackedCache(write(self.layers, new))

    def take(self, rows: Int[Array, "rows"], batch: int) -> "StackedCache":
        """The cache of some rows, out of the `batch` that it has."""
        return StackedCache(jax.vmap(lambda layer: layer.take(rows, batch))(self.layers))


class Cache(eqx.Module):
    """The rings of all layers, and the clock of their rows.

    They are apart, or, where a loop runs over many layers, stacked: those of the same turn together
    in a model whose kinds of layers take turns.
    """

    layers: tuple[Any, ...]
    """Each a `LayerCache`, or each a `StackedCache`."""
    clock: Clock

    def take(self, rows: Int[Array, "rows"]) -> "Cache":
        """The cache of some rows, in that order; one may come several times."""
        positions = self.clock.positions
        layers = tuple(layer.take(rows, len(positions)) for layer in self.layers)
        return Cache(layers, Clock(self.clock.index, positions[rows]))


class PendingCache(eqx.Module):
    """A cache, and the tokens that have been read after it, of which some are to be kept.

    Those of a layer without a window are in its ring already: it has room, and nothing is lost.
    """

    before: Cache
    new: tuple[NewTokens | LayerCache, ...]

    def commit(self, count: Int[Array, ""]) -> Cache:
        """The cache with the first `count` of them."""
        clock = self.before.clock
        layers = tuple(
            new if isinstance(new, LayerCache) else layer.write_first(new, count, clock)
            for layer, new in zip(self.before.layers, self.new, strict=True)
        )
        return Cache(layers, Clock(clock.index + count, clock.positions + count))


def _with_rows(ring: Array, batch: int) -> Float[Array, "batch kv_heads slots head_dim"]:
    return ring.reshape(batch, -1, *ring.shape[-2:])


def _place(x_BKSH: Array) -> Float[Array, "*rings slots head_dim"]:
    if is_sharding():
        return constrain(x_BKSH, "batch", "kv_heads", None, "head_dim")
    rings = [size for size in x_BKSH.shape[:2] if size > 1]
    return x_BKSH.reshape(*rings, *x_BKSH.shape[2:])
