"""Decoding with a transformer, whose layers keep their keys and values in a cache.

Legend of suffixes: B batch, T time, 1 the one token of a step, E embed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.decoding.cache import (
    Cache,
    Clock,
    LayerCache,
    NewTokens,
    PendingCache,
    StackedCache,
)
from zoo.nn.attention.attention import attention
from zoo.nn.parameters import unshard
from zoo.nn.remat import scan_layers
from zoo.transformer.blocks import Rotary
from zoo.transformer.config import Config, LayerKind
from zoo.transformer.model import Transformer

QKV = tuple[Array, Array, Array]

MOST_APART = 96
"""Layers that a step of decoding has apart; a loop runs over more, and their caches are stacked."""


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
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], length: int
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Read prompts; a layer with a sliding window keeps only its window."""
        config = self.config
        positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        x_BTE, rotaries = self.model.embed(tokens, positions)
        segment_ids = mask.astype(jnp.int32)

        def layer(kind: LayerKind, block: Any, carry: tuple, index: Array) -> tuple:
            x_BTE, *stacks = carry
            window = config.window_of(kind)
            kept = _Kept(block, window, shape[1:])
            x_BTE, _ = block(x_BTE, segment_ids, rotaries[kind], window, None, kept.attend)
            new = kept.keys_and_values()
            return (x_BTE, *(s.at[index].set(x) for s, x in zip(stacks, new, strict=True)))

        shape = (config.num_layers, *tokens.shape, config.kv_heads, config.head_size)
        empty = jnp.zeros(shape, x_BTE.dtype)
        x_BTE, keys, values = scan_layers(
            [partial(layer, kind) for kind in config.layer_kinds],
            self.model.blocks,
            (x_BTE, empty, empty),
            scan=config.scan_layers,
        )
        kinds = config.layer_kinds if self._loops else config.all_layer_kinds
        slots = [min(length, config.window_of(kind) or length) for kind in kinds]
        layers: tuple[LayerCache, ...] | tuple[StackedCache, ...]
        if self._loops:
            turns = [slice(turn, None, len(kinds)) for turn in range(len(kinds))]
            stacks = zip(turns, slots, strict=True)
            layers = tuple(StackedCache.filled(keys[x], values[x], n) for x, n in stacks)
        else:
            filled = zip(keys, values, slots, strict=True)
            layers = tuple(LayerCache.filled(k, v, n) for k, v, n in filled)
        logits = self.model.readout()(self.model.finish(x_BTE[:, -1:]))[:, 0]
        return logits, Cache(layers, Clock.after(mask))

    @property
    def _loops(self) -> bool:
        """Whether a step runs over its layers in a loop: many of them compile for minutes."""
        return self.config.num_layers > MOST_APART

    def for_decoding(self) -> "AttentionDecoder":
        """The model with its blocks apart, but for many: no step copies their weights out of the
        stack.
        """
        if self._loops:
            return self
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
        clock = cache.clock

        def step(turn: int, ring: Any, at: Array | None, qkv: QKV, **options: Any) -> tuple:
            if at is None:
                written = ring.write(*qkv[1:], clock)
                return written.attend(qkv[0], clock, **options), written
            written = ring.write(at, *qkv[1:], clock)
            return written[at].attend(qkv[0], clock, **options), written

        x_B1E, rotaries = self.model.embed(tokens[:, None], clock.positions[:, None])
        x_B1E, layers = self._through_layers(x_B1E, rotaries, cache.layers, step)
        logits = self.model.readout()(self.model.finish(x_B1E))[:, 0]
        return logits, Cache(layers, clock.tick())

    def extend(
        self, tokens: Int[Array, "batch new"], cache: Cache
    ) -> tuple[Float[Array, "batch new vocab"], PendingCache]:
        """Read some more tokens per row at once, without writing them into the cache yet."""
        clock, config = cache.clock, self.config
        kinds = config.layer_kinds if self._loops else config.all_layer_kinds

        def step(turn: int, pending: Any, at: Array | None, qkv: QKV, **options: Any) -> tuple:
            new, window = NewTokens(*qkv[1:]), config.window_of(kinds[turn])
            ring = cache.layers[turn] if at is None else cache.layers[turn][at]
            if at is None and window is None:
                written = ring.write_ahead(new, clock)
                return written.attend_written(qkv[0], clock, **options), written
            out = ring.attend_ahead(qkv[0], new, clock, window=window, **options)
            if at is not None:
                new = jax.tree.map(lambda s, x: s.at[at].set(x), pending, new)
            return out, new

        ahead = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x_BTE, rotaries = self.model.embed(tokens, clock.positions[:, None] + ahead)
        pending: tuple[Any, ...] = (None,) * len(cache.layers)
        if self._loops:
            shape = (*tokens.shape, config.kv_heads, config.head_size)
            stacks = [stack.layers.keys for stack in cache.layers]
            empty = [jnp.zeros((len(keys), *shape), keys.dtype) for keys in stacks]
            pending = tuple(NewTokens(zeros, zeros) for zeros in empty)
        x_BTE, pending = self._through_layers(x_BTE, rotaries, pending, step)
        logits = self.model.readout()(self.model.finish(x_BTE))
        return logits, PendingCache(cache, pending)

    def _through_layers(
        self,
        x_BTE: Float[Array, "batch new embed"],
        rotaries: dict[LayerKind, Rotary | None],
        states: tuple[Any, ...],
        step: Callable[..., tuple[Array, Any]],
    ) -> tuple[Float[Array, "batch new embed"], tuple[Any, ...]]:
        """The output of the last layer, and the states of all.

        `step(turn, state, at, (q, k, v), soft_cap=, scale=)` is the attention of a layer, and its
        state after that. In a loop a state is of all layers of a turn, and `at` the one at hand.
        """
        kinds = self.config.layer_kinds if self._loops else self.config.all_layer_kinds

        def layer(turn: int, at: Array | None, block: Any, x_BTE: Array, state: Any) -> tuple:
            after: list[Any] = []

            def attend(
                q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
            ) -> Array:
                out, new = step(turn, state, at, (q, k, v), soft_cap=soft_cap, scale=scale)
                after.append(new)
                return out

            x_BTE, _ = block(x_BTE, None, rotaries[kinds[turn]], None, None, attend)
            return x_BTE, after[-1]

        def looped(turn: int, block: Any, carry: tuple, index: Array) -> tuple:
            x_BTE, states = carry
            x_BTE, new = layer(turn, index // len(kinds), block, x_BTE, states[turn])
            return x_BTE, (*states[:turn], new, *states[turn + 1 :])

        if self._loops:
            functions = [partial(looped, turn) for turn in range(len(kinds))]
            return scan_layers(functions, self.model.blocks, (x_BTE, states))
        new: list[Any] = []
        blocks: Any = self.model.blocks  # apart
        for turn, (block, state) in enumerate(zip(blocks, states, strict=True)):
            x_BTE, after = layer(turn, None, unshard(block), x_BTE, state)
            new.append(after)
        return x_BTE, tuple(new)


class _Kept:
    """Attention that keeps the keys and values which it is called with."""

    def __init__(self, block: Any, window: int | None, shape: tuple[int, ...]):
        self.name = type(getattr(block, "attention", block)).__name__
        self.window = window
        self.shape = shape
        self.calls: list[tuple[Array, Array]] = []

    def attend(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """As `zoo.nn.attention.attention`, or a ValueError where a cache would give another."""
        self.calls.append((k, v))
        causal, window = options["causal"], options["window"]
        if not causal or window != self.window:
            raise ValueError(
                f"{self.name} attends with causal={causal}, window={window}, and decoding with "
                f"causal=True, window={self.window}"
            )
        if k.shape != self.shape or v.shape != self.shape:
            raise ValueError(
                f"{self.name} attends to keys of the shape {k.shape} and values of {v.shape}, and "
                f"the cache holds {self.shape}, by kv_heads and head_dim of the configuration"
            )
        return attention(q, k, v, **options)

    def keys_and_values(self) -> tuple[Array, Array]:
        """The keys and values of the layer's only call."""
        if len(self.calls) != 1:
            raise ValueError(
                f"{self.name} calls `attend` {len(self.calls)} times, and decoding keeps the keys "
                "and values of one call per layer"
            )
        return self.calls[0]
