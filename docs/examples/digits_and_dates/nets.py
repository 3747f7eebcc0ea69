"""Two networks of Equinox's own layers; nothing in this file knows the zoo.

Legend of suffixes: C channels, H height, W width, S source, T target, E embed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import data


class ConvNet(eqx.Module):
    """An image [1, 8, 8] to the logits of ten digits: convolutions, each with a batch norm."""

    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, width: int, key: Array):
        keys = jax.random.split(key, 4)
        sizes = [(1, width, 1), (width, width, 2), (width, 2 * width, 2)]
        self.convolutions = [
            eqx.nn.Conv2d(before, after, 3, stride, padding=1, use_bias=False, key=key)
            for (before, after, stride), key in zip(sizes, keys[:3], strict=True)
        ]
        self.norms = [
            eqx.nn.BatchNorm(after, "batch", momentum=0.9, mode="batch") for _, after, _ in sizes
        ]
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(2 * width, 10, key=keys[3])

    def __call__(
        self, x_CHW: Array, state: eqx.nn.State, key: Array | None
    ) -> tuple[Array, eqx.nn.State]:
        """Without a key there is no dropout."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x_CHW, state = norm(convolution(x_CHW), state)
            x_CHW = jax.nn.relu(x_CHW)
        x_C = self.dropout(x_CHW.mean((1, 2)), key=key, inference=key is None)
        return self.head(x_C), state


class Block(eqx.Module):
    """Attention to the sequence itself, with a memory also to that, and an MLP; norms before."""

    attention: eqx.nn.MultiheadAttention
    to_memory: eqx.nn.MultiheadAttention | None
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout

    def __init__(self, size: int, num_heads: int, has_memory: bool, key: Array):
        first, second, third = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(num_heads, size, key=first)
        self.to_memory = (
            eqx.nn.MultiheadAttention(num_heads, size, key=second) if has_memory else None
        )
        self.mlp = eqx.nn.MLP(size, size, 4 * size, 1, activation=jax.nn.gelu, key=third)
        self.norms = [eqx.nn.LayerNorm(size) for _ in range(3 if has_memory else 2)]
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(
        self,
        x_TE: Array,
        mask_TT: Array,
        memory_SE: Array | None,
        mask_TS: Array | None,
        key: Array | None,
    ) -> Array:
        """Without a key there is no dropout."""
        keys = iter(jax.random.split(key, 3) if key is not None else [None] * 3)
        norms = (jax.vmap(norm) for norm in self.norms)

        def dropped(y_TE: Array) -> Array:
            return self.dropout(y_TE, key=next(keys), inference=key is None)

        y_TE = next(norms)(x_TE)
        x_TE = x_TE + dropped(self.attention(y_TE, y_TE, y_TE, mask_TT))
        if self.to_memory is not None:
            y_TE = next(norms)(x_TE)
            x_TE = x_TE + dropped(self.to_memory(y_TE, memory_SE, memory_SE, mask_TS))
        return x_TE + dropped(jax.vmap(self.mlp)(next(norms)(x_TE)))


class EncoderDecoder(eqx.Module):
    """Ids [source] and the prefix of a translation [target] to the logits of its next ids."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    encoder: list[Block]
    decoder: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self, num_tokens: int, length: int, size: int, num_heads: int, num_layers: int, key: Array
    ):
        keys = iter(jax.random.split(key, 2 * num_layers + 3))
        self.tokens = eqx.nn.Embedding(num_tokens, size, key=next(keys))
        self.positions = eqx.nn.Embedding(length, size, key=next(keys))
        self.encoder = [Block(size, num_heads, False, next(keys)) for _ in range(num_layers)]
        self.decoder = [Block(size, num_heads, True, next(keys)) for _ in range(num_layers)]
        self.norm = eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, num_tokens, key=next(keys))

    def __call__(self, source_S: Array, prefix_T: Array, key: Array | None) -> Array:
        """Without a key there is no dropout."""
        count = len(self.encoder) + len(self.decoder)
        keys = iter(jax.random.split(key, count) if key is not None else [None] * count)
        given_S = source_S != 0
        x_SE = self._embed(source_S)
        for block in self.encoder:
            mask_SS = jnp.broadcast_to(given_S, (len(source_S), len(source_S)))
            x_SE = block(x_SE, mask_SS, None, None, next(keys))
        y_TE = self._embed(prefix_T)
        mask_TT = jnp.tril(jnp.ones((len(prefix_T), len(prefix_T)), bool))
        mask_TS = jnp.broadcast_to(given_S, (len(prefix_T), len(source_S)))
        for block in self.decoder:
            y_TE = block(y_TE, mask_TT, x_SE, mask_TS, next(keys))
        return jax.vmap(self.head)(jax.vmap(self.norm)(y_TE))

    def _embed(self, ids_T: Array) -> Array:
        positions = jax.vmap(self.positions)(jnp.arange(len(ids_T)))
        return jax.vmap(self.tokens)(ids_T) + positions


def digits(width: int, key: Array) -> tuple[ConvNet, eqx.nn.State]:
    """The convolutional network and its state."""
    return eqx.nn.make_with_state(ConvNet)(width, key)


def dates(size: int, num_layers: int, key: Array) -> EncoderDecoder:
    """The encoder-decoder."""
    sizes = {"num_heads": 4, "size": size, "num_layers": num_layers}
    return EncoderDecoder(data.NUM_TOKENS, data.SOURCE_LENGTH, **sizes, key=key)
