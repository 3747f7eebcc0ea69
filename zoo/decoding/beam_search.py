"""Beam search: the likeliest continuations that a search of a given width finds."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from zoo import sharding
from zoo.decoding.sampling import Prompt, Rows
from zoo.sharding import constrain


def beam_search(
    model: PyTree,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    num_beams: int = 4,
    stop_tokens: Sequence[int] | None = None,
) -> tuple[Any, Float[np.ndarray, "batch beams"]]:
    """The `num_beams` likeliest continuations that the search finds, best first, and their scores.

    A prompt int32[batch, prompt] gives tokens int32[batch, beams, prompt + max_new_tokens]; lists
    of ids give for each prompt a list of lists, which end with the stop token. A score is the sum
    of the log-probabilities of the new tokens, float32[batch, beams], and -inf where there are
    fewer continuations than beams. A beam that has come to one of the `stop_tokens` keeps its score
    and repeats the token to its end; divide scores by length to not prefer short ones.
    `stop_tokens` are the `eos_ids` of the model's configuration if not given.

    Raises:
        ValueError: as for `zoo.generate`, and fewer than one beam.
    """
    if num_beams < 1:
        raise ValueError(f"num_beams={num_beams} must be at least 1")
    rows = Rows(model, prompt, max_new_tokens, stop_tokens)
    count = len(rows.prompts)
    new = np.zeros((count, num_beams, 0), np.int32)
    scores = np.zeros((count, num_beams), np.float32)
    if max_new_tokens > 0:
        arrays = (rows.decoder, rows.tokens, rows.mask, rows.stops)
        with sharding.use(rows.mesh):
            found = _search(arrays, rows.length, num_beams, max_new_tokens)
        new, scores = np.asarray(found.tokens)[:count], np.asarray(found.scores)[:count]
    if isinstance(prompt, list | tuple):
        lists = [
            [[*ids.tolist(), *rows.cut(beam)] for beam in beams]
            for ids, beams in zip(rows.prompts, new, strict=True)
        ]
        return lists, scores
    prompts = np.repeat(np.stack(rows.prompts)[:, None], num_beams, axis=1)
    return jnp.asarray(np.concatenate([prompts, new], axis=2)), scores


class _Beams(eqx.Module):
    """The beams of each row, best first; `tokens` has room for all the new ones."""

    tokens: Int[Array, "batch beams new"]
    scores: Float[Array, "batch beams"]
    done: Bool[Array, "batch beams"]


@eqx.filter_jit
def _search(arrays: tuple[Any, ...], length: int, num_beams: int, num_tokens: int) -> _Beams:
    decoder, tokens, mask, stops = arrays
    batch = tokens.shape[0]
    logits, cache = decoder.prefill(tokens, mask, length)
    # At first all beams are the same, and only one of them is to have successors.
    scores = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
    beams = _Beams(
        jnp.zeros((batch, num_beams, num_tokens), jnp.int32),
        jnp.broadcast_to(scores, (batch, num_beams)),
        jnp.zeros((batch, num_beams), bool),
    )
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num_beams)
    beams, _ = _grow(beams, logits[rows], stops, jnp.int32(0))
    decoder = decoder.for_decoding()

    def step(carry: tuple[PyTree, _Beams], index: Array) -> tuple[tuple[PyTree, _Beams], None]:
        cache, beams = carry
        last = jax.lax.dynamic_index_in_dim(beams.tokens, index - 1, 2, keepdims=False)
        logits, cache = decoder.decode(last.reshape(-1), cache)
        beams, rows = _grow(beams, logits, stops, index)
        return (cache.take(rows), beams), None

    indices = jnp.arange(1, num_tokens, dtype=jnp.int32)
    _, beams = jax.lax.scan(step, (cache.take(rows), beams), indices)[0]
    # Whole on every device, and so in every process.
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), beams)


def _grow(
    beams: _Beams, logits: Float[Array, "rows vocab"], stops: Array, index: Array
) -> tuple[_Beams, Int[Array, "rows"]]:
    """The best beams with one more token, and which row of the logits each has grown from."""
    batch, num_beams, _ = beams.tokens.shape
    vocab = logits.shape[1]
    logs = jax.nn.log_softmax(logits, axis=-1).reshape(batch, num_beams, vocab)
    # A beam that has stopped has one successor, itself.
    itself = jnp.where(jnp.arange(vocab) == 0, 0.0, -jnp.inf)[None, None]
    sums = beams.scores[:, :, None] + jnp.where(beams.done[:, :, None], itself, logs)
    scores, best = jax.lax.top_k(sums.reshape(batch, -1), num_beams)
    parent, token = (best // vocab).astype(jnp.int32), (best % vocab).astype(jnp.int32)
    tokens = jnp.take_along_axis(beams.tokens, parent[:, :, None], 1)
    done = jnp.take_along_axis(beams.done, parent, 1)
    before = jax.lax.dynamic_index_in_dim(tokens, jnp.maximum(index - 1, 0), 2, keepdims=False)
    token = jnp.where(done, before, token)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, index, 2)
    done = done | (token[:, :, None] == stops[None, None]).any(-1)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * num_beams + parent
    return _Beams(tokens, scores, done), rows.reshape(-1)
