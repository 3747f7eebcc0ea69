"""Beam search: the likeliest continuations that a search of a given width finds.

Beams end as they do in `generate` of `transformers` (`GenerationMixin._beam_search`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.decoding.sampling import Prompt, Rows
from zoo.sharding import constrain


def beam_search(
    model: PyTree,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    num_beams: int = 4,
    length_penalty: float = 0.0,
    early_stopping: bool = False,
    stop_tokens: Sequence[int] | None = None,
) -> tuple[Any, Float[np.ndarray, "batch beams"]]:
    """The `num_beams` likeliest continuations that the search finds, best first, and their scores.

    A prompt int32[batch, prompt] gives tokens int32[batch, beams, prompt + max_new_tokens]; lists
    of ids give for each prompt a list of lists, which end with the stop token. A score is the sum
    of the log-probabilities of the new tokens, the stop token's too, divided by their number to the
    power of `length_penalty` (1 is their mean, and more prefers long texts), float32[batch, beams];
    it is -inf where there are fewer continuations.

    A continuation that has come to one of the `stop_tokens` (the `eos_ids` of the model's
    configuration if not given) leaves its beam to another, and repeats the token to its end. A row
    is done when no beam can come before its `num_beams` best ones any more, or with
    `early_stopping` as soon as it has as many, as in `generate` of `transformers`.

    Raises:
        ValueError: as for `zoo.generate`, fewer than one beam, or a length penalty that is no
            number.
    """
    require(num_beams > 0, f"num_beams={num_beams}: must be at least 1")
    require(
        math.isfinite(length_penalty),
        f"length_penalty={length_penalty}: must be a number; 0 prefers no length",
    )
    rows = Rows(model, prompt, max_new_tokens, stop_tokens)
    count = len(rows.prompts)
    new = np.zeros((count, num_beams, 0), np.int32)
    scores = np.zeros((count, num_beams), np.float32)
    if max_new_tokens > 0:
        arrays = (rows.decoder, rows.tokens, rows.mask, rows.stops, np.float32(length_penalty))
        with sharding.use(sharding.Layout(rows.mesh, sharding.whole_rows())):
            found = _search(arrays, rows.length, num_beams, max_new_tokens, early_stopping)
        new, scores = (np.asarray(x)[:count] for x in (found.tokens, found.scores))
    if isinstance(prompt, list | tuple):
        lists = [
            [[*ids.tolist(), *rows.cut(beam)] for beam in beams]
            for ids, beams in zip(rows.prompts, new, strict=True)
        ]
        return lists, scores
    prompts = np.repeat(np.stack(rows.prompts)[:, None], num_beams, axis=1)
    return jnp.asarray(np.concatenate([prompts, new], axis=2)), scores


class _Beams(eqx.Module):
    """Some continuations of each row, best first; `tokens` has room for all the new ones."""

    tokens: Int[Array, "batch beams new"]
    scores: Float[Array, "batch beams"]  # -inf without one

    @staticmethod
    def none(batch: int, num_beams: int, num_tokens: int) -> "_Beams":
        tokens = jnp.zeros((batch, num_beams, num_tokens), jnp.int32)
        return _Beams(tokens, jnp.full((batch, num_beams), -jnp.inf))

    def best(self, count: int) -> tuple["_Beams", Int[Array, "batch beams"]]:
        """The best `count` of them, and where they were."""
        scores, places = jax.lax.top_k(self.scores, count)
        return _Beams(jnp.take_along_axis(self.tokens, places[:, :, None], 1), scores), places


class _Search(eqx.Module):
    """A search in progress: `count` tokens in each beam that still grows, and the ended ones."""

    growing: _Beams  # by sums of log-probabilities
    ended: _Beams  # by scores
    is_open: Bool[Array, "batch"]  # a growing beam may still come before an ended one
    count: Int[Array, ""]
    cache: PyTree


@eqx.filter_jit
def _search(
    arrays: tuple[Any, ...], length: int, num_beams: int, num_tokens: int, early_stopping: bool
) -> _Beams:
    decoder, tokens, mask, stops, length_penalty = arrays
    batch = tokens.shape[0]
    logits, cache = decoder.prefill(tokens, mask, length)
    none = _Beams.none(batch, num_beams, num_tokens)
    # At first all beams are the same, and only one of them is to have successors.
    growing = _Beams(none.tokens, none.scores.at[:, 0].set(0.0))
    every = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num_beams)
    search = _Search(growing, none, jnp.ones(batch, bool), jnp.int32(0), cache.take(every))
    grow = functools.partial(_grow, stops, length_penalty, early_stopping)
    search = grow(search, logits[every])
    decoder = decoder.for_decoding()

    def unfinished(search: _Search) -> Array:
        return (search.count < num_tokens) & search.is_open.any()

    def step(search: _Search) -> _Search:
        last = jax.lax.dynamic_index_in_dim(
            search.growing.tokens, search.count - 1, 2, keepdims=False
        )
        logits, cache = decoder.decode(last.reshape(-1), search.cache)
        return grow(eqx.tree_at(lambda s: s.cache, search, cache), logits)

    ended = jax.lax.while_loop(unfinished, step, search).ended
    # Whole on every device, and so in every process.
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), ended)


def _grow(
    stops: Int[Array, "stops"],
    length_penalty: Float[Array, ""],
    early_stopping: bool,
    search: _Search,
    logits: Float[Array, "rows vocab"],
) -> _Search:
    """The search with one more token in each growing beam."""
    before, count = search.growing, search.count
    batch, num_beams, num_tokens = before.tokens.shape
    vocab = logits.shape[1]
    logs = jax.nn.log_softmax(logits, axis=-1).reshape(batch, num_beams, vocab)
    sums = (before.scores[:, :, None] + logs).reshape(batch, -1)
    # Enough of them that `num_beams` grow on, whichever come to a stop.
    num_candidates = min((1 + max(1, len(stops))) * num_beams, sums.shape[1])
    sums, places = jax.lax.top_k(sums, num_candidates)
    parent, token = (places // vocab).astype(jnp.int32), (places % vocab).astype(jnp.int32)
    tokens = jnp.take_along_axis(before.tokens, parent[:, :, None], 1)
    # The token to the end: what grows on writes over it, and what has ended repeats it.
    tokens = jnp.where((jnp.arange(num_tokens) < count)[None, None], tokens, token[:, :, None])

    count = count + 1
    ends = (token[:, :, None] == stops[None, None]).any(-1) | (count == num_tokens)
    power = count.astype(jnp.float32) ** length_penalty
    is_full = jnp.isfinite(search.ended.scores).all(1) & early_stopping
    counts = (
        ends & (jnp.arange(num_candidates) < num_beams)[None] & (search.is_open & ~is_full)[:, None]
    )
    ended, _ = _Beams(
        jnp.concatenate([search.ended.tokens, tokens], 1),
        jnp.concatenate([search.ended.scores, jnp.where(counts, sums / power, -jnp.inf)], 1),
    ).best(num_beams)
    candidates = _Beams(tokens, jnp.where(ends, -jnp.inf, sums))
    growing, chosen = candidates.best(num_beams)
    is_open = search.is_open & (growing.scores[:, 0] / power > ended.scores[:, -1])
    if early_stopping:
        is_open &= ~jnp.isfinite(ended.scores).all(1)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * num_beams
    rows = rows + jnp.take_along_axis(parent, chosen, 1)
    return _Search(growing, ended, is_open, count, search.cache.take(rows.reshape(-1)))
