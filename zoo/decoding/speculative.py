"""Speculative decoding: a small model drafts some tokens, and the model itself judges all at once.

A drafted token is kept with a probability, and where one is not, another is drawn, such that the
tokens have the distribution of sampling from the model alone (Leviathan et al. 2023; Chen et al.
2023). All rows keep as many tokens as the row that keeps the fewest, so that they stay aligned:
what is kept, and where that ends, depends on no later token, so that this changes no distribution.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from zoo import sharding
from zoo.decoding.decoder import Decoder, decoder_of
from zoo.decoding.drawing import Sampler, State


@runtime_checkable
class Pending(Protocol):
    """Tokens that a decoder has read, before it is known how many of them are kept."""

    def commit(self, count: Int[Array, ""]) -> PyTree:
        """The cache behind the first `count` of them, one at least."""


class _Caches(eqx.Module):
    """The cache behind each token, along a first axis: of a decoder that reads one by one."""

    caches: PyTree

    def commit(self, count: Int[Array, ""]) -> PyTree:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, count - 1, keepdims=False), self.caches
        )


def extend(
    decoder: Decoder, tokens: Int[Array, "batch new"], cache: PyTree
) -> tuple[Float[Array, "batch new vocab"], Pending]:
    """Read some more tokens per row: the logits behind each of them, and the caches.

    A decoder with a method `extend` reads them at once, and has a fourth argument of `prefill`, how
    many tokens there may be beyond the first; of any other, each step's cache is kept.
    """
    if hasattr(decoder, "extend"):
        return decoder.extend(tokens, cache)

    def step(cache: PyTree, token: Array) -> tuple[PyTree, tuple[Array, PyTree]]:
        logits, cache = decoder.decode(token, cache)
        return cache, (logits, cache)

    _, (logits, caches) = jax.lax.scan(step, cache, tokens.T)
    return logits.swapaxes(0, 1), _Caches(caches)


class Draft(eqx.Module):
    """The model that drafts, and how many tokens at a time."""

    decoder: Decoder
    num_tokens: int = eqx.field(static=True)

    @staticmethod
    def checked(model: PyTree, num_tokens: int, of: Decoder, mesh: Any) -> "Draft":
        """The draft for another model, or a ValueError that says why it cannot be one."""
        if num_tokens < 1:
            raise ValueError(f"draft_tokens={num_tokens} must be at least 1")
        decoder = decoder_of(model)
        sizes = decoder.config.vocab_size, of.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft has vocab_size={sizes[0]} and the model {sizes[1]}: a draft has the "
                "model's tokenizer"
            )
        if sharding.mesh_of(model) != mesh:
            raise ValueError(
                f"the draft lies on {sharding.mesh_of(model)} and the model on {mesh}: load both "
                "on one mesh"
            )
        return Draft(decoder, num_tokens)


def read(
    decoder: Decoder,
    tokens: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    length: int,
    draft: Draft | None,
) -> tuple[Float[Array, "batch vocab"], PyTree]:
    """Read prompts; the cache of a decoder that has `extend` has room for drafted tokens too."""
    prefill: Callable[..., Any] = decoder.prefill
    ahead = (draft.num_tokens,) if draft is not None and hasattr(decoder, "extend") else ()
    return prefill(tokens, mask, length, *ahead)


def draft_and_judge(
    decoder: Decoder, draft: Draft, sampler: Sampler, stops: Array, state: State
) -> State:
    """One step of the model: the drafted tokens that it keeps, and one of its own."""
    assert state.steps is not None
    num = draft.num_tokens
    last = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, 1, keepdims=False)
    key = None if sampler.key is None else jax.random.fold_in(sampler.key, state.count)
    drafted, q_BDV = _draft(draft, sampler, key, last, state.draft_cache)
    block = jnp.concatenate([last[:, None], drafted], axis=1)
    logits, pending = extend(decoder, block, state.cache)
    p_BTV = sampler.probabilities(logits)

    at_draft = drafted[:, :, None]
    p, q = (jnp.take_along_axis(x, at_draft, 2)[:, :, 0] for x in (p_BTV[:, :num], q_BDV))
    uniform = 0.5 if key is None else jax.random.uniform(jax.random.fold_in(key, num), p.shape)
    kept = jnp.cumprod((uniform * q < p) | state.done[:, None], axis=1, dtype=jnp.int32).sum(1)
    fewest = kept.min()
    # For the token behind the kept ones: what the draft gave too little of, or behind all,
    # anything.
    here = lambda x: jax.lax.dynamic_index_in_dim(x, fewest, 1, keepdims=False)  # noqa: E731
    rest = jnp.maximum(here(p_BTV) - here(jnp.pad(q_BDV, ((0, 0), (0, 1), (0, 0)))), 0)
    if key is None:
        own = rest.argmax(-1).astype(jnp.int32)
    else:
        own = jax.random.categorical(jax.random.fold_in(key, num + 1), jnp.log(rest))
        own = own.astype(jnp.int32)
    own = jnp.where(kept > fewest, here(jnp.pad(drafted, ((0, 0), (0, 1)))), own)

    new = jnp.concatenate([drafted, own[:, None]], axis=1)
    new = jnp.where((jnp.arange(num + 1) == fewest)[None], own[:, None], new)
    _, draft_pending = extend(draft.decoder, block, state.draft_cache)
    return state.append(
        new,
        logits,
        fewest + 1,
        stops,
        cache=pending.commit(fewest + 1),
        draft_cache=draft_pending.commit(fewest + 1),
        steps=state.steps + 1,
    )


def _draft(
    draft: Draft, sampler: Sampler, key: Array | None, last: Array, cache: PyTree
) -> tuple[Int[Array, "batch drafted"], Float[Array, "batch drafted vocab"]]:
    """The drafted tokens, and the distribution that each of them is drawn from."""

    def step(carry: tuple[Array, PyTree], index: Array) -> tuple[tuple, tuple[Array, Array]]:
        token, cache = carry
        logits, cache = draft.decoder.decode(token, cache)
        q = sampler.probabilities(logits)
        if key is None:
            token = q.argmax(-1)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, index), jnp.log(q))
        token = token.astype(jnp.int32)
        return (token, cache), (token, q)

    indices = jnp.arange(draft.num_tokens, dtype=jnp.int32)
    _, (tokens, q) = jax.lax.scan(step, (last, cache), indices)
    return tokens.T, q.swapaxes(0, 1)
