"""What makes a model a decoder for `zoo.generate`: for attention with a cache, for recurrence with
the state in its place.

A decoder has these methods, whatever its family:

- `check_decoder(length)` raises a ValueError if it cannot continue a text to that length;
- `prefill(tokens, mask, length)` reads right-aligned prompts, and gives the logits behind each and
  a cache with room for `length` tokens a row, padding included;
- `for_decoding()` is the model as `decode` takes it;
- `decode(tokens, cache)` reads one more token a row, and gives the logits behind it and the cache.

A cache has `take(rows)`, which gives the cache of those rows, in that order.

`prefill` and `decode` call the parts of a model, those of subclasses too, in the place of its
forward pass. The methods that they go round are in `goes_round`: a subclass that overrides one
overrides `prefill` and `decode` as well, or is refused. A part maps each position on its own, but
for attention, which `attend` stands in for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.decoding.cache import Cache, Clock, LayerCache
from zoo.nn.attention import attention
from zoo.nn.parameters import gather
from zoo.nn.remat import scan_layers

Attend = Callable[..., Float[Array, "batch seq heads head_dim"]]
Tokens = Int[Array, "batch seq"]
Logits = Float[Array, "batch vocab"]


def check_overrides(cls: type) -> None:
    """Refuse a subclass of a family whose own forward pass decoding would go round.

    Raises:
        ValueError: it names the class and the method.
    """
    mro = cls.__mro__
    decoder = next((x for x in mro if "goes_round" in vars(x)), None)
    if decoder is None:
        return
    family = max(place for place, x in enumerate(mro) if decoder in x.__bases__)

    def owner(name: str) -> int:
        return next((place for place, x in enumerate(mro) if name in vars(x)), len(mro))

    for name in vars(decoder)["goes_round"]:
        place, passes = owner(name), max(owner("prefill"), owner("decode"))
        if place < family and place < passes:
            raise ValueError(
                f"{mro[place].__name__} overrides {name}, and decoding would not call it: prefill "
                f"and decode, of {mro[passes].__name__}, call the parts of the model themselves. "
                "Override these two as well (to be the same ones, if they fit), or the parts that "
                "they call"
            )


class AttentionDecoder(eqx.Module):
    """Decoding for a stack of `blocks` that take an `attend` in the place of `attention`.

    Kinds of layers take turns, each with a window and positions of its own.
    """

    goes_round: ClassVar[tuple[str, ...]] = ("__call__", "hidden", "hidden_and_balance")

    def check_decoder(self: Any, length: int) -> None:
        """Refuse an encoder, and more tokens than a table of learned positions has."""
        if not self.config.causal:
            raise ValueError("causal=False: this is an encoder, which has no next token")
        self.check_length(length)

    def prefill(
        self: Any, tokens: Tokens, mask: Bool[Array, "batch seq"], length: int
    ) -> tuple[Logits, Cache]:
        """Read prompts; a layer with a sliding window keeps only its window."""
        config = self.config
        positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        x_BTE, rotaries = self.embed(tokens, positions)
        segment_ids = mask.astype(jnp.int32)

        def block(kind: Any, block: Any, carry: tuple, index: Array) -> tuple:
            x_BTE, *stacks = carry
            kept: list[Array] = []
            name = type(getattr(block, "attention", block)).__name__

            def attend(q: Array, k: Array, v: Array, **options: Any) -> Array:
                kept.extend((k, v))
                causal, window = options["causal"], options["window"]
                if not causal or window != config.window_of(kind):
                    raise ValueError(
                        f"{name} attends with causal={causal}, window={window}, and decoding with "
                        f"causal=True, window={config.window_of(kind)}"
                    )
                return attention(q, k, v, **options)

            window = config.window_of(kind)
            x_BTE, _ = block(x_BTE, segment_ids, rotaries[kind], window, None, attend)
            if len(kept) != 2:
                raise ValueError(
                    f"{name} calls `attend` {len(kept) // 2} times, and decoding keeps the keys "
                    "and values of one call a layer"
                )
            return (x_BTE, *(s.at[index].set(new) for s, new in zip(stacks, kept, strict=True)))

        shape = (config.num_layers, *tokens.shape, config.kv_heads, config.head_size)
        empty = jnp.zeros(shape, x_BTE.dtype)
        x_BTE, keys, values = scan_layers(
            [partial(block, kind) for kind in config.layer_kinds],
            self.blocks,
            (x_BTE, empty, empty),
            scan=config.scan_layers,
        )
        windows = [config.window_of(kind) for kind in config.all_layer_kinds]
        layers = tuple(
            LayerCache.filled(k, v, min(length, window or length))
            for k, v, window in zip(keys, values, windows, strict=True)
        )
        logits = self.readout()(self.finish(x_BTE[:, -1:]))[:, 0]
        return logits, Cache(layers, Clock.after(mask))

    def for_decoding(self: Any) -> Any:
        """The model with its blocks apart: no step copies their weights out of the stack."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        blocks = tuple(
            eqx.combine(jax.tree.map(lambda x: x[index], arrays), static)  # noqa: B023
            for index in range(self.config.num_layers)
        )
        return eqx.tree_at(lambda model: model.blocks, self, blocks)

    def decode(self: Any, tokens: Int[Array, "batch"], cache: Cache) -> tuple[Logits, Cache]:
        """Read one more token a row."""
        clock = cache.clock
        x_B1E, rotaries = self.embed(tokens[:, None], clock.positions[:, None])
        layers: list[LayerCache] = []
        kinds = self.config.all_layer_kinds
        for kind, block, before in zip(kinds, self.blocks, cache.layers, strict=True):

            def attend(
                q: Array, k: Array, v: Array, *, soft_cap: Any, scale: Any, **_: Any
            ) -> Array:
                layers.append(before.write(k, v, clock))  # noqa: B023
                return layers[-1].attend(q, clock, soft_cap=soft_cap, scale=scale)

            x_B1E, _ = gather(block)(x_B1E, None, rotaries[kind], None, None, attend)
        return self.readout()(self.finish(x_B1E))[:, 0], Cache(tuple(layers), clock.tick())


class RecurrentDecoder(eqx.Module):
    """Decoding for a network whose state is all that it knows of the tokens before."""

    goes_round: ClassVar[tuple[str, ...]] = ("__call__", "hidden", "run")

    def check_decoder(self: Any, length: int) -> None:
        """Refuse a network that reads from the end, pools its steps, or gives no tokens."""
        config = self.config
        for name, wanted in (("bidirectional", False), ("pooling", "none"), ("out_size", None)):
            if getattr(config, name) != wanted:
                raise ValueError(
                    f"{name}={getattr(config, name)!r}: this network has no next token; a "
                    f"language model has {wanted!r}"
                )

    def prefill(
        self: Any, tokens: Tokens, mask: Bool[Array, "batch seq"], length: int
    ) -> tuple[Logits, Any]:
        """Read prompts; the state takes the same room whatever the length."""
        count = mask.sum(1, dtype=jnp.int32)
        # With the padding last, as cuDNN wants it.
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] - count[:, None]
        tokens, mask = (jnp.take_along_axis(x, order % x.shape[1], 1) for x in (tokens, mask))
        x_BTD, state = self.read(tokens, self.initial_state(tokens.shape[0]), mask=mask)
        x_B1D = jnp.take_along_axis(x_BTD, count[:, None, None] - 1, 1)
        return self.readout()(x_B1D)[:, 0], state

    def for_decoding(self: Any) -> Any:
        """The model itself."""
        return self

    def decode(self: Any, tokens: Int[Array, "batch"], cache: Any) -> tuple[Logits, Any]:
        """Read one more token a row."""
        outputs, state = self.run(tokens[:, None], cache)
        return outputs[:, 0], state
