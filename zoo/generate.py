"""Text from a model: sampling, token by token."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree


def generate(
    model: PyTree,
    prompt: Int[Array, "batch prompt"],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "batch total"]:
    """The prompt and `max_new_tokens` sampled tokens after it, int32[batch, prompt + new].

    Temperature 0 is greedy and needs no key. `top_k` keeps the k likeliest tokens, `top_p` the
    fewest whose probabilities add up to p (Holtzman et al. 2020).

    Raises:
        ValueError: an empty prompt, a sampling parameter out of range, or a missing key.
    """
    if prompt.shape[1] == 0:
        raise ValueError("prompt is empty: begin with the tokenizer's separator")
    if temperature < 0 or max_new_tokens < 0:
        raise ValueError(
            f"temperature={temperature}, max_new_tokens={max_new_tokens}: must not be negative"
        )
    if (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"top_k={top_k} must be at least 1, and top_p={top_p} in (0, 1]")
    if key is None:
        if temperature > 0:
            raise ValueError(f"temperature={temperature} samples, and needs a key; or set it to 0")
        key = jax.random.key(0)
    tokens = jnp.pad(prompt.astype(jnp.int32), ((0, 0), (0, max_new_tokens)))
    return _extend(model, tokens, prompt.shape[1], temperature, top_k, top_p, key)


@eqx.filter_jit
def _extend(
    model: PyTree,
    tokens: Int[Array, "batch total"],
    start: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    key: Key[Array, ""],
) -> Int[Array, "batch total"]:
    def add(position: Array, tokens: Array) -> Array:
        # What lies after the position is not seen: a decoder is causal.
        logits = jax.lax.dynamic_index_in_dim(model(tokens), position - 1, 1, keepdims=False)
        step_key = jax.random.fold_in(key, position)
        token = sample(logits, step_key, temperature=temperature, top_k=top_k, top_p=top_p)
        return jax.lax.dynamic_update_index_in_dim(tokens, token, position, 1)

    return jax.lax.fori_loop(start, tokens.shape[1], add, tokens)


def sample(
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "batch"]:
    """One token id a row, int32[batch], from logits float32[batch, vocab]."""
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        descending: Any = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token stays if those before it have not reached p, so at least one does.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p
        smallest = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
