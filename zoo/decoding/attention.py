"""Decoding with a transformer, whose layers keep keys and values in rings of slots, or a state.

Rows are aligned to the right (padding first), so that every row's next token has the same index,
and goes to the same slot: index modulo the number of slots. A layer with a sliding window has as
many slots as its window, and so forgets the tokens that it must not see; with a draft it has room
for the drafted tokens too; the ones that are not kept are written over. A recurrent layer cannot
forget: it keeps its state behind each of the tokens that it has just read, until one is chosen.

Legend of suffixes: L layers, B batch, T new tokens, E embed, K key-value heads, N query heads,
S slots, H head size.
"""

from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PyTree

from zoo.nn.attention.attention import attend_to_slots, attention
from zoo.nn.parameters import unshard
from zoo.nn.recurrences.chunks import Mixer
from zoo.nn.recurrences.marks import Marks
from zoo.nn.remat import apart, scan_layers
from zoo.sharding import constrain, is_sharding
from zoo.transformer.config import Config, LayerKind, mixer_of
from zoo.transformer.latent import LatentAttention
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

    For latent attention, keys are values too.

    An array is [batch, kv_heads, slots, head_dim], on one device without the first two axes where
    they have size 1: XLA for CPU copies a ring with such an axis three times in every step,
    and four times one that is reshaped where it is read.
    """

    keys: Float[Array, "*rings slots head_dim"]
    values: Float[Array, "*rings slots head_dim"] | None
    window: int | None = eqx.field(static=True)

    @staticmethod
    def filled(
        k_BTKH: Float[Array, "batch seq kv_heads head_dim"],
        v_BTKH: Float[Array, "batch seq kv_heads head_dim"] | None,
        num_slots: int,
        window: int | None,
    ) -> "LayerCache":
        """The ring behind those tokens: the last `num_slots` of them, each in its slot."""

        def fill(x_BTKH: Array) -> Array:
            seq = x_BTKH.shape[1]
            x_BKSH = x_BTKH[:, -num_slots:].swapaxes(1, 2)
            x_BKSH = jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, max(0, num_slots - seq)), (0, 0)))
            return _place(jnp.roll(x_BKSH, max(0, seq - num_slots) % num_slots, axis=2))

        keys, values = jax.tree.map(fill, (k_BTKH, v_BTKH))
        return LayerCache(keys, values, window)

    def write(
        self,
        k_BTKH: Float[Array, "batch new kv_heads head_dim"],
        v_BTKH: Float[Array, "batch new kv_heads head_dim"] | None,
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

        keys, values = jax.tree.map(put, (self.keys, self.values), (k_BTKH, v_BTKH))
        return LayerCache(keys, values, self.window)

    def attend(
        self,
        q_BTNH: Float[Array, "batch new heads head_dim"],
        clock: Clock,
        *,
        soft_cap: float | None = None,
        scale: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
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
        keys = _with_rows(self.keys, batch)
        values = keys if self.values is None else _with_rows(self.values, batch)
        return attend_to_slots(
            q_BTNH, keys, values, seen_BTS, soft_cap=soft_cap, scale=scale, sinks=sinks
        )

    def take(self, rows: Int[Array, "rows"], batch: int) -> "LayerCache":
        """The ring of some of its `batch` rows."""
        taken = lambda x: _place(_with_rows(x, batch)[rows])  # noqa: E731
        keys, values = jax.tree.map(taken, (self.keys, self.values))
        return LayerCache(keys, values, self.window)

    def commit(self, count: Int[Array, ""] | int) -> "LayerCache":
        """The same: what is behind the first `count` of the tokens just written is not seen."""
        return self


def _with_rows(ring: Array, batch: int) -> Float[Array, "batch kv_heads slots head_dim"]:
    return ring.reshape(batch, -1, *ring.shape[-2:])


def _place(x_BKSH: Array) -> Float[Array, "*rings slots head_dim"]:
    if is_sharding():
        if x_BKSH.shape[1] == 1:  # of latent attention, for all heads
            return constrain(x_BKSH, "batch", None, None, "head_dim")
        return constrain(x_BKSH, "batch", "kv_heads", None, "head_dim")
    rings = [size for size in x_BKSH.shape[:2] if size > 1]
    return x_BKSH.reshape(*rings, *x_BKSH.shape[2:])


class RecurrentCache(eqx.Module):
    """The states of a recurrent layer, behind each token that it has read since the last commit."""

    states: PyTree[Float[Array, "new batch ..."]]

    def read(
        self, recurrence: Mixer, x_BTE: Float[Array, "batch new embed"]
    ) -> tuple["RecurrentCache", Float[Array, "batch new embed"]]:
        """Read the next tokens one by one, after a commit, and keep the state behind each."""

        def step(state: PyTree, x_BE: Array) -> tuple[PyTree, tuple[PyTree, Array]]:
            state, y_B1E = recurrence(x_BE[:, None], state, Marks())
            return state, (state, y_B1E[:, 0])

        state = jax.tree.map(lambda x: x[0], self.states)
        _, (states, y_TBE) = lax.scan(step, state, x_BTE.swapaxes(0, 1), unroll=x_BTE.shape[1] == 1)
        return RecurrentCache(states), y_TBE.swapaxes(0, 1)

    def take(self, rows: Int[Array, "rows"], batch: int) -> "RecurrentCache":
        """The states of some of the rows."""
        return RecurrentCache(jax.tree.map(lambda x: x[:, rows], self.states))

    def commit(self, count: Int[Array, ""] | int) -> "RecurrentCache":
        """The state behind the first `count` of the tokens just read."""
        last = lambda x: lax.dynamic_slice_in_dim(x, count - 1, 1)  # noqa: E731
        return RecurrentCache(jax.tree.map(last, self.states))


class Cache(eqx.Module):
    """The keys and values, or states, of all layers, and the clock of their rows."""

    layers: tuple[LayerCache | RecurrentCache, ...]
    clock: Clock

    def take(self, rows: Int[Array, "rows"]) -> "Cache":
        """The cache of some rows, in that order; one may come several times."""
        positions = self.clock.positions
        layers = tuple(layer.take(rows, len(positions)) for layer in self.layers)
        return Cache(layers, Clock(self.clock.index, positions[rows]))

    def commit(self, count: Int[Array, ""] | int) -> "Cache":
        """The cache with the first `count` of the tokens just written."""
        layers = tuple(layer.commit(count) for layer in self.layers)
        return Cache(layers, Clock(self.clock.index + count, self.clock.positions + count))


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
        segment_ids, marks = mask.astype(jnp.int32), Marks(mask)
        shape = (*tokens.shape, *config.cached)
        shapes = (shape, None if config.attention.latent.kv_rank else shape)
        mixers = [*map(mixer_of, config.layer_kinds)]

        def layer(turn: int, kind: LayerKind, block: Any, carry: tuple, index: Array) -> tuple:
            x_BTE, stacks = carry
            window = config.window_of(kind)
            kept: list[Any] = []
            attend = partial(_attend_and_keep, block, kept, (True, window, *shapes))
            recur = partial(_recur_and_keep, kept)
            rotary = rotaries[kind]
            x_BTE, _ = block(
                x_BTE, segment_ids, rotary, window, None, attend, marks=marks, recur=recur
            )
            if len(kept) != 1:
                raise ValueError(
                    f"{_name(block)} calls `attend` {len(kept)} times, and decoding keeps the keys "
                    "and values of one call per layer"
                )
            name = mixers[turn]
            place = index // len(mixers) * mixers.count(name) + mixers[:turn].count(name)
            put = jax.tree.map(lambda stack, x: stack.at[place].set(x), stacks[name], kept[0])
            return x_BTE, {**stacks, name: put}

        x_BTE, stacks = scan_layers(
            [partial(layer, turn, kind) for turn, kind in enumerate(config.layer_kinds)],
            self.model.blocks,
            (x_BTE, self._stacks(shapes, x_BTE.dtype)),
            own=config.own,
            first=config.num_first,
            scan=config.scan_layers,
        )
        layers: list[LayerCache | RecurrentCache] = []
        for index, kind in enumerate(config.all_layer_kinds):
            name = config.mixers[index]
            place = config.mixers[:index].count(name)
            kept = jax.tree.map(lambda x: x[place], stacks[name])  # noqa: B023
            if kind == "recurrent":
                layers.append(RecurrentCache(jax.tree.map(lambda x: x[None], kept)))
                continue
            window = config.window_of(kind)
            num_slots = length if window is None else min(window + ahead, length)
            keys, values = kept
            layers.append(LayerCache.filled(keys, values, num_slots, window))
        logits = self.model.readout()(self.model.finish(x_BTE[:, -1:]))[:, 0]
        return logits, Cache(tuple(layers), Clock.after(mask))

    def _stacks(self, shapes: tuple[Any, Any], dtype: DTypeLike) -> dict[str, Any]:
        """Room for what the layers of each mixer keep: keys and values of these shapes, or states.

        Values have none where keys are values too.
        """
        count = self.config.mixers.count
        keys = jnp.zeros((count("attention"), *shapes[0]), dtype)
        stacks: dict[str, Any] = {"attention": (keys, None if shapes[1] is None else keys)}
        recurrence = self.model.blocks.recurrence
        if recurrence is not None:
            one = apart(recurrence)[0].initial_state(shapes[0][0])
            zeros = lambda x: jnp.zeros((count("recurrence"), *x.shape), x.dtype)  # noqa: E731
            stacks["recurrence"] = jax.tree.map(zeros, one)
        return stacks

    def for_decoding(self) -> "AttentionDecoder":
        """The model with its blocks apart: no step copies their weights out of the stack."""
        blocks = tuple(map(_absorbed, apart(self.model.blocks, self.config.own)))
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
        layers: list[LayerCache | RecurrentCache] = []

        def attend(ring: Any, q: Array, k: Array, v: Array | None, **options: Any) -> Array:
            layers.append(written := ring.write(k, v, clock))
            given = {name: options[name] for name in ("soft_cap", "scale", "sinks")}
            return written.attend(q, clock, **given)

        def recur(layer: Any, recurrence: Mixer, x_BTE: Array, marks: Marks) -> Array:
            read, y_BTE = layer.read(recurrence, x_BTE)
            layers.append(read)
            return y_BTE

        kinds, caches = self.config.all_layer_kinds, cache.layers
        blocks: Any = self.model.blocks  # apart
        for kind, block, layer in zip(kinds, blocks, caches, strict=True):
            hooks = partial(attend, layer), partial(recur, layer)
            x_BTE, _ = unshard(block)(
                x_BTE, None, rotaries[kind], None, None, hooks[0], recur=hooks[1]
            )
        logits = self.model.readout()(self.model.finish(x_BTE))
        return logits, Cache(tuple(layers), clock)


def _absorbed(block: Any) -> Any:
    """A block with its latent attention, if it has any, for decoding."""
    if not isinstance(block.attention, LatentAttention):
        return block
    return eqx.tree_at(lambda block: block.attention, block, block.attention.absorbed())


def _attend_and_keep(
    block: Any, keeps: list, expected: tuple, q: Array, k: Array, v: Array, **options: Any
) -> Array:
    """As `zoo.nn.attention.attention`, or a ValueError where a cache would give another."""
    kept = options.pop("kept", (k, v))
    keeps.append(kept)
    found = options["causal"], options["window"], *(x if x is None else x.shape for x in kept)
    if found != expected:
        text = "causal={}, window={} to keys of the shape {} and values of {}"
        raise ValueError(
            f"{_name(block)} attends with {text.format(*found)}, and decoding with "
            f"{text.format(*expected)}, by kv_heads and head_dim of the configuration"
        )
    return attention(q, k, v, **options)


def _recur_and_keep(kept: list, recurrence: Mixer, x_BTE: Array, marks: Marks) -> Array:
    """As `from_zeros`, and keep the final state."""
    state, y_BTE = recurrence(x_BTE, recurrence.initial_state(len(x_BTE)), marks)
    kept.append(state)
    return y_BTE


def _name(block: Any) -> str:
    return type(getattr(block, "attention", block)).__name__
