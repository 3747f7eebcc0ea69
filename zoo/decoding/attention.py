"""Decoding with a transformer, whose layers keep their keys and values in rings of slots.

Rows are aligned to the right (padding first), so that every row's next token has the same index,
and goes to the same slot: index modulo the number of slots. A layer with a sliding window has as
many slots as its window, and so forgets the tokens that it must not see; with a draft it has room
for the drafted tokens too; the ones that are not kept are written over.

Legend of suffixes: L layers, B batch, T new tokens, E embed, K key-value heads, N query heads,
S slots, H head size.
"""

from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention.attention import attend_to_slots, attention
from zoo.nn.parameters import unshard
from zoo.nn.remat import scan_layers
from zoo.sharding import constrain, is_sharding
from zoo.transformer.config import Config, LayerKind
from zoo.transformer.model import Transformer


class Clock(eqx.Module):
    """Where all rows are: the next token's index in the padded rows, and its position in each."""

    index: Int[Array, ""]
    positions: Int[Array, "batch"]

    @staticmethod
    def after(mask: Bool[Array, "batch seq"]) -> "Clock":
        """The clock behind right-aligned rows; `mask` is False at the padding before them."""
        return Clock(jnp.asarray(mask.shape[1], jnp.int32), mask.sum(1, dtype=jnp.int32))


class LayerCache(eqx.Module):
    """The keys and values of one layer, in the dtype that it computed them in.

    An array is [batch, kv_heads, slots, head_dim], on one device without the first two axes where
    they have size 1: XLA for CPU copies a ring with such an axis three times in every step,
    and four times one that is reshaped where it is read.
    """

    keys: Float[Array, "*rings slots head_dim"]
    values: Float[Array, "*rings slots head_dim"]
    window: int | None = eqx.field(static=True)

    @staticmethod
    def filled(
        k_BTKH: Float[Array, "batch seq kv_heads head_dim"],
        v_BTKH: Float[Array, "batch seq kv_heads head_dim"],
        num_slots: int,
        window: int | None,
    ) -> "LayerCache":
        """The ring behind those tokens: the last `num_slots` of them, each in its slot."""

        def fill(x_BTKH: Array) -> Array:
            seq = x_BTKH.shape[1]
            x_BKSH = x_BTKH[:, -num_slots:].swapaxes(1, 2)
            x_BKSH = jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, max(0, num_slots - seq)), (0, 0)))
            return _place(jnp.roll(x_BKSH, max(0, seq - num_slots) % num_slots, axis=2))

        return LayerCache(fill(k_BTKH), fill(v_BTKH), window)

    def write(
        self,
        k_BTKH: Float[Array, "batch new kv_heads head_dim"],
        v_BTKH: Float[Array, "batch new kv_heads head_dim"],
        clock: Clock,
    ) -> "LayerCache":
        """The ring with the next tokens in it, in place of the oldest where it is full."""
        count = k_BTKH.shape[1]
        # A ring without a window has room for all; another may end between two of them.
        step = count if self.window is None else 1

        def put(ring: Array, x_BTKH: Array) -> Array:
            for place in range(0, count, step):
                part = _place(x_BTKH[:, place : place + step].swapaxes(1, 2))
                slot = (clock.index + place) % ring.shape[-2]
                ring = lax.dynamic_update_slice_in_dim(ring, part, slot, ring.ndim - 2)
            return ring

        return LayerCache(put(self.keys, k_BTKH), put(self.values, v_BTKH), self.window)

    def attend(
        self,
        q_BTNH: Float[Array, "batch new heads head_dim"],
        clock: Clock,
        *,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "batch new heads head_dim"]:
        """The attention output of the tokens just written, each over the slots that it sees."""
        batch, count = q_BTNH.shape[:2]
        num_slots = self.keys.shape[-2]
        now_T = clock.index + jnp.arange(count, dtype=jnp.int32)
        newest = clock.index + count - 1
        # Which token is in a slot. One that was drafted and not kept counts as an old one there.
        index_S = newest - (newest - jnp.arange(num_slots, dtype=jnp.int32)) % num_slots
        age_TS = now_T[:, None] - index_S[None]
        seen_TS = age_TS >= 0
        if self.window is not None:
            seen_TS &= age_TS < self.window
        # What is older than the row's first token is padding, or was never written.
        seen_BS = index_S[None] >= (clock.index - clock.positions)[:, None]
        seen_BTS = seen_TS[None] & seen_BS[:, None]
        keys, values = (_with_rows(x, batch) for x in (self.keys, self.values))
        return attend_to_slots(q_BTNH, keys, values, seen_BTS, soft_cap=soft_cap, scale=scale)


def _with_rows(ring: Array, batch: int) -> Float[Array, "batch kv_heads slots head_dim"]:
    return ring.reshape(batch, -1, *ring.shape[-2:])


def _place(x_BKSH: Array) -> Float[Array, "*rings slots head_dim"]:
    if is_sharding():
        return constrain(x_BKSH, "batch", "kv_heads", None, "head_dim")
    rings = [size for size in x_BKSH.shape[:2] if size > 1]
    return x_BKSH.reshape(*rings, *x_BKSH.shape[2:])


class Cache(eqx.Module):
    """The rings of all layers, and the clock of their rows."""

    layers: tuple[LayerCache, ...]
    clock: Clock

    def take(self, rows: Int[Array, "rows"]) -> "Cache":
        """The cache of some rows, in that order; one may come several times."""
        positions = self.clock.positions
        layers = jax.tree.map(lambda x: _place(_with_rows(x, len(positions))[rows]), self.layers)
        return Cache(layers, Clock(self.clock.index, positions[rows]))

    def commit(self, count: Int[Array, ""] | int) -> "Cache":
        """The cache with the first `count` of the tokens just written."""
        clock = self.clock
        return Cache(self.layers, Clock(clock.index + count, clock.positions + count))


class AttentionDecoder(eqx.Module):
    """A transformer as a `zoo.decoding.decoder.Decoder`."""

    model: Transformer
    bypassed: ClassVar[tuple[str, ...]] = ("__call__", "hidden", "hidden_and_balance")

    @property
    def config(self) -> Config:
        """The configuration of the model."""
        return self.model.config

    def check_decoder(self, length: int) -> None:
        """Refuse an encoder, and more tokens than a table of learned positions has."""
        if not self.config.causal:
            raise ValueError("causal=False: this is an encoder, which has no next token")
        self.model.check_length(length)

    def prefill(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"],
        length: int,
        ahead: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Read prompts; a layer with a sliding window keeps its window, and room for `ahead`."""
        config = self.config
        positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        x_BTE, rotaries = self.model.embed(tokens, positions)
        segment_ids = mask.astype(jnp.int32)
        shape = (*tokens.shape, config.kv_heads, config.head_size)

        def layer(kind: LayerKind, block: Any, carry: tuple, index: Array) -> tuple:
            x_BTE, *stacks = carry
            window = config.window_of(kind)
            kept: list[tuple[Array, Array]] = []
            attend = partial(_attend_and_keep, block, kept, (True, window, shape, shape))
            x_BTE, _ = block(x_BTE, segment_ids, rotaries[kind], window, None, attend)
            if len(kept) != 1:
                raise ValueError(
                    f"{_name(block)} calls `attend` {len(kept)} times, and decoding keeps the keys "
                    "and values of one call per layer"
                )
            return (x_BTE, *(s.at[index].set(x) for s, x in zip(stacks, kept[0], strict=True)))

        empty = jnp.zeros((config.num_layers, *shape), x_BTE.dtype)
        x_BTE, keys, values = scan_layers(
            [partial(layer, kind) for kind in config.layer_kinds],
            self.model.blocks,
            (x_BTE, empty, empty),
            scan=config.scan_layers,
        )
        layers = []
        for index, kind in enumerate(config.all_layer_kinds):
            window = config.window_of(kind)
            num_slots = length if window is None else min(window + ahead, length)
            layers.append(LayerCache.filled(keys[index], values[index], num_slots, window))
        logits = self.model.readout()(self.model.finish(x_BTE[:, -1:]))[:, 0]
        return logits, Cache(tuple(layers), Clock.after(mask))

    def for_decoding(self) -> "AttentionDecoder":
        """The model with its blocks apart: no step copies their weights out of the stack."""
        arrays, static = eqx.partition(self.model.blocks, eqx.is_array)
        blocks = tuple(
            eqx.combine(jax.tree.map(lambda x: x[index], arrays), static)  # noqa: B023
            for index in range(self.config.num_layers)
        )
        return eqx.tree_at(lambda decoder: decoder.model.blocks, self, blocks)

    def decode(
        self, tokens: Int[Array, "batch"], cache: Cache
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Read one more token per row."""
        logits, cache = self.extend(tokens[:, None], cache)
        return logits[:, 0], cache.commit(1)

    def extend(
        self, tokens: Int[Array, "batch new"], cache: Cache
    ) -> tuple[Float[Array, "batch new vocab"], Cache]:
        """Read some more tokens per row at once; the cache's `commit` says how many are kept."""
        clock = cache.clock
        ahead = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x_BTE, rotaries = self.model.embed(tokens, clock.positions[:, None] + ahead)
        layers: list[LayerCache] = []

        def attend(
            ring: LayerCache, q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
        ) -> Array:
            layers.append(ring.write(k, v, clock))
            return layers[-1].attend(q, clock, soft_cap=soft_cap, scale=scale)

        blocks: Any = self.model.blocks  # apart
        kinds = self.config.all_layer_kinds
        for kind, block, ring in zip(kinds, blocks, cache.layers, strict=True):
            rotary = rotaries[kind]
            x_BTE, _ = unshard(block)(x_BTE, None, rotary, None, None, partial(attend, ring))
        logits = self.model.readout()(self.model.finish(x_BTE))
        return logits, Cache(tuple(layers), clock)


def _attend_and_keep(
    block: Any, kept: list, expected: tuple, q: Array, k: Array, v: Array, **options: Any
) -> Array:
    """As `zoo.nn.attention.attention`, or a ValueError where a cache would give another."""
    kept.append((k, v))
    found = options["causal"], options["window"], k.shape, v.shape
    if found != expected:
        text = "causal={}, window={} to keys of the shape {} and values of {}"
        raise ValueError(
            f"{_name(block)} attends with {text.format(*found)}, and decoding with "
            f"{text.format(*expected)}, by kv_heads and head_dim of the configuration"
        )
    return attention(q, k, v, **options)


def _name(block: Any) -> str:
    return type(getattr(block, "attention", block)).__name__
