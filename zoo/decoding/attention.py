"""Decoding with a model of attention, whose layers keep their keys and values in a cache.

Legend of suffixes: B batch, T time, 1 the one token of a step, E embed.
"""

from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

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
from zoo.nn.layers import Readout
from zoo.nn.parameters import unshard
from zoo.nn.remat import scan_layers
from zoo.transformer.blocks import Rotary
from zoo.transformer.config import Config, LayerKind

MOST_APART = 96
"""Layers that a step of decoding has apart; a loop runs over more, and their caches are stacked."""


@runtime_checkable
class AttentionModel(Protocol):
    """The parts of a model that decoding calls in the place of its forward pass.

    Each maps every position on its own, except attention, which `attend` stands in for.
    """

    @property
    def config(self) -> Config:
        """The configuration: kinds of layers take turns, each with its window and positions."""

    @property
    def blocks(self) -> Any:
        """The layers, stacked along their arrays' first axis; apart in `for_decoding`.

        A block is called as `zoo.transformer.blocks.Block`.
        """

    def check_length(self, length: int) -> None:
        """Raise a ValueError for more tokens than the model has positions."""

    def embed(
        self, tokens: Int[Array, "batch seq"], positions: Int[Array, "#batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], dict[LayerKind, Rotary | None]]:
        """The input of the first layer, and each kind's tables of rotary positions."""

    def finish(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """The input of the output head, from the output of the last layer."""

    def readout(self) -> Readout:
        """The output head."""


class AttentionDecoder(eqx.Module):
    """A model of attention as a `zoo.decoding.decoder.Decoder`."""

    model: AttentionModel
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
        x_B1E, rotaries = self.model.embed(tokens[:, None], clock.positions[:, None])
        if self._loops:
            return self._decode_in_a_loop(x_B1E, rotaries, cache)
        layers: list[LayerCache] = []
        kinds = self.config.all_layer_kinds
        for kind, block, before in zip(kinds, self.model.blocks, cache.layers, strict=True):

            def attend(
                q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
            ) -> Array:
                layers.append(before.write(k, v, clock))  # noqa: B023
                return layers[-1].attend(q, clock, soft_cap=soft_cap, scale=scale)

            x_B1E, _ = unshard(block)(x_B1E, None, rotaries[kind], None, None, attend)
        logits = self.model.readout()(self.model.finish(x_B1E))[:, 0]
        return logits, Cache(tuple(layers), clock.tick())

    def _decode_in_a_loop(
        self, x_B1E: Float[Array, "batch 1 embed"], rotaries: dict, cache: Cache
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        clock, kinds = cache.clock, self.config.layer_kinds

        def layer(turn: int, block: Any, carry: tuple, index: Array) -> tuple:
            x_B1E, stacks = carry
            written: list[StackedCache] = []

            def attend(
                q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
            ) -> Array:
                at = index // len(kinds)
                written.append(stacks[turn].write(at, k, v, clock))
                return written[-1][at].attend(q, clock, soft_cap=soft_cap, scale=scale)

            x_B1E, _ = block(x_B1E, None, rotaries[kinds[turn]], None, None, attend)
            return x_B1E, (*stacks[:turn], written[-1], *stacks[turn + 1 :])

        functions = [partial(layer, turn) for turn in range(len(kinds))]
        x_B1E, stacks = scan_layers(functions, self.model.blocks, (x_B1E, cache.layers))
        logits = self.model.readout()(self.model.finish(x_B1E))[:, 0]
        return logits, Cache(stacks, clock.tick())

    def _extend_in_a_loop(
        self, x_BTE: Float[Array, "batch new embed"], rotaries: dict, cache: Cache
    ) -> tuple[Float[Array, "batch new vocab"], PendingCache]:
        clock, kinds, config = cache.clock, self.config.layer_kinds, self.config

        def layer(turn: int, block: Any, carry: tuple, index: Array) -> tuple:
            x_BTE, pending = carry
            at, kept = index // len(kinds), []

            def attend(
                q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
            ) -> Array:
                kept.append(NewTokens(k, v))
                window = config.window_of(kinds[turn])
                options = {"window": window, "soft_cap": soft_cap, "scale": scale}
                return cache.layers[turn][at].attend_ahead(q, kept[-1], clock, **options)

            x_BTE, _ = block(x_BTE, None, rotaries[kinds[turn]], None, None, attend)
            new = jax.tree.map(lambda s, x: s.at[at].set(x), pending[turn], kept[-1])
            return x_BTE, (*pending[:turn], new, *pending[turn + 1 :])

        shape = (*x_BTE.shape[:2], config.kv_heads, config.head_size)
        counts = [len(stack.layers.keys) for stack in cache.layers]
        dtype = cache.layers[0].layers.keys.dtype
        empty = tuple(NewTokens(*(jnp.zeros((n, *shape), dtype),) * 2) for n in counts)
        functions = [partial(layer, turn) for turn in range(len(kinds))]
        x_BTE, pending = scan_layers(functions, self.model.blocks, (x_BTE, empty))
        logits = self.model.readout()(self.model.finish(x_BTE))
        return logits, PendingCache(cache, pending)

    def extend(
        self, tokens: Int[Array, "batch new"], cache: Cache
    ) -> tuple[Float[Array, "batch new vocab"], PendingCache]:
        """Read some more tokens per row at once, without writing them into the cache yet."""
        clock = cache.clock
        ahead = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x_BTE, rotaries = self.model.embed(tokens, clock.positions[:, None] + ahead)
        if self._loops:
            return self._extend_in_a_loop(x_BTE, rotaries, cache)
        pending: list[NewTokens | LayerCache] = []
        kinds = self.config.all_layer_kinds
        for kind, block, before in zip(kinds, self.model.blocks, cache.layers, strict=True):

            def attend(
                q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
            ) -> Array:
                new, window = NewTokens(k, v), self.config.window_of(kind)  # noqa: B023
                options = {"soft_cap": soft_cap, "scale": scale}
                if window is None:
                    written = before.write_ahead(new, clock)  # noqa: B023
                    pending.append(written)
                    return written.attend_written(q, clock, **options)
                pending.append(new)
                return before.attend_ahead(q, new, clock, window=window, **options)  # noqa: B023

            x_BTE, _ = unshard(block)(x_BTE, None, rotaries[kind], None, None, attend)
        logits = self.model.readout()(self.model.finish(x_BTE))
        return logits, PendingCache(cache, tuple(pending))


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
        """Those of the layer's only call."""
        if len(self.calls) != 1:
            raise ValueError(
                f"{self.name} calls `attend` {len(self.calls)} times, and decoding keeps the keys "
                "and values of one call per layer"
            )
        return self.calls[0]
