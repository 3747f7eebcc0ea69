"""Text from a model: sampling token by token, at once or as a stream.

Any `zoo.decoding.decoder.Decoder` will do, whatever its family. Prompts are aligned to the right,
and padded to a bucket, so that a model's two programs, one that reads prompts and one that
continues them, are compiled once per bucket. A model computes in the dtype of its parameters.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from zoo import sharding
from zoo.decoding.decoder import Decoder, decoder_of
from zoo.decoding.drawing import Sampler, Sampling, SamplingOptions, State
from zoo.decoding.speculative import Draft, advance

Prompt = Int[Array | np.ndarray, "batch prompt"] | Sequence[Sequence[int] | Int[np.ndarray, "_"]]
SMALLEST_BUCKET = 16
logger = logging.getLogger(__name__)


def generate(
    model: PyTree,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    draft: PyTree | None = None,
    draft_tokens: int = 4,
    key: Key[Array, ""] | None = None,
    logprobs: bool = False,
    **options: Unpack[SamplingOptions],
) -> Any:
    """The prompts and up to `max_new_tokens` sampled tokens after each.

    The `options` are the fields of `zoo.Sampling`, such as `temperature=0.5`: they replace those of
    `sampling`. A row's tokens depend neither on the other rows nor on the mesh of the model.

    A prompt int32[batch, prompt] gives int32[batch, prompt + max_new_tokens], in which a row that
    has come to one of the `stop_tokens` repeats it to its end. Lists of ids, of any lengths, give
    lists of ids, which end with the stop token.

    `draft` is a smaller model with the same tokenizer, of any family: it proposes `draft_tokens`
    tokens at a time, which the model judges at once. The tokens have the same distribution as
    without it (Leviathan et al. 2023), and greedy ones are the same.

    With `logprobs` the result is a pair: the tokens, and the log-probability that the model itself
    gave each new token, before temperature, penalties and biases, float32[batch, max_new_tokens]
    (0 behind a stop token), or lists as long as the new tokens.

    Raises:
        ValueError: a model that is no decoder, an empty prompt, ids that it does not have, more
            tokens than it has positions, a sampling parameter out of range, a missing key, a draft
            of another vocabulary or mesh, or one together with penalties.
    """
    sampling = dataclasses.replace(sampling or Sampling(), **options)
    rows = Rows(model, prompt, max_new_tokens, sampling.stop_tokens, draft, draft_tokens)
    sampler = rows.sampler(sampling, key)
    new, logs = np.zeros((2, len(rows.prompts), 0))
    if max_new_tokens > 0:
        state, advance = _begin(rows, sampler, logprobs)
        state = advance(state, max_new_tokens)
        new = np.array(state.tokens)[: len(rows.prompts), :max_new_tokens]
        count = int(state.count)
        new[:, count:] = new[:, count - 1 : count]
        if state.logprobs is not None:
            logs = np.asarray(state.logprobs)[: len(rows.prompts), :max_new_tokens]
    tokens = _joined(rows, prompt, new.astype(np.int32))
    if not logprobs:
        return tokens
    if not isinstance(prompt, list | tuple):
        return tokens, jnp.asarray(logs, jnp.float32)
    lengths = [len(whole) - len(ids) for whole, ids in zip(tokens, rows.prompts, strict=True)]
    return tokens, [line[:n].tolist() for line, n in zip(logs, lengths, strict=True)]


def _joined(rows: "Rows", prompt: Prompt, new: np.ndarray) -> Any:
    """The prompts, each with its new tokens, in the form of the prompts."""
    if isinstance(prompt, list | tuple):
        return [[*p.tolist(), *rows.cut(line)] for p, line in zip(rows.prompts, new, strict=True)]
    return jnp.asarray(np.concatenate([np.stack(rows.prompts), new], axis=1))


def stream(
    model: PyTree,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    draft: PyTree | None = None,
    draft_tokens: int = 4,
    key: Key[Array, ""] | None = None,
    **options: Unpack[SamplingOptions],
) -> Iterator[Int[np.ndarray, "batch"]]:
    """The tokens of `generate` as they come, int32[batch] at a time, until all rows have stopped.

    A row that has come to a stop token repeats it while others continue.

    Raises:
        ValueError: as for `generate`, at the call.
    """
    sampling = dataclasses.replace(sampling or Sampling(), **options)
    rows = Rows(model, prompt, max_new_tokens, sampling.stop_tokens, draft, draft_tokens)
    sampler = rows.sampler(sampling, key)

    def tokens() -> Iterator[np.ndarray]:
        state, advance = _begin(rows, sampler)
        done = 0
        while done < max_new_tokens:
            state = advance(state, done + 1)
            new, count = np.asarray(state.tokens), min(int(state.count), max_new_tokens)
            yield from new[: len(rows.prompts), done:count].T
            done = count
            if np.asarray(state.done).all():
                return

    return tokens() if max_new_tokens > 0 else iter(())


class Rows:
    """Prompts, checked and aligned to the right in a bucket, in rows that the mesh divides."""

    def __init__(
        self,
        model: PyTree,
        prompt: Prompt,
        max_new_tokens: int,
        stop_tokens: Sequence[int] | None,
        draft: PyTree | None = None,
        draft_tokens: int = 0,
    ):
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
        self.prompts = _check_prompts(prompt)
        longest = max(len(ids) for ids in self.prompts)
        self.decoder = decoder_of(model)
        if stop_tokens is None:  # a decoder of another class may have none
            stop_tokens = getattr(self.decoder.config, "eos_ids", ())
        stops = np.asarray(stop_tokens).reshape(-1)
        self.decoder.check_decoder(longest + max_new_tokens)
        if longest + max_new_tokens > getattr(self.decoder.config, "max_seq_len", np.inf):
            _warn_of_length(self.decoder.config.max_seq_len)
        _check_ids("prompt", np.concatenate(self.prompts), self.decoder.config.vocab_size)
        _check_ids("stop_tokens", stops, self.decoder.config.vocab_size)
        self.prompts = [ids.astype(np.int32) for ids in self.prompts]  # once they are known to fit
        self.stops = stops.astype(np.int32)
        self.mesh = sharding.mesh_of(model)
        parts = sharding.num_batch_parts(self.mesh)
        num_rows = -(-len(self.prompts) // parts) * parts
        bucket = bucket_of(longest)
        self.tokens = np.zeros((num_rows, bucket), np.int32)
        self.mask = np.zeros((num_rows, bucket), bool)
        for row in range(num_rows):
            ids = self.prompts[min(row, len(self.prompts) - 1)]
            self.tokens[row, bucket - len(ids) :] = ids
            self.mask[row, bucket - len(ids) :] = True
        self.is_padding = np.arange(num_rows) >= len(self.prompts)  # for the mesh alone
        checked = (
            None if draft is None else Draft.checked(draft, draft_tokens, self.decoder, self.mesh)
        )
        self.draft = checked
        ahead = 0 if draft is None else draft_tokens  # beyond what is asked for
        self.room = bucket_of(max_new_tokens + ahead)
        # The last token is never read.
        self.length = bucket_of(bucket + max_new_tokens - 1 + ahead)

    def sampler(self, sampling: Sampling, key: Key[Array, ""] | None) -> Sampler:
        """How the tokens of these rows are drawn."""
        sampler = Sampler.of(sampling, self.decoder.config.vocab_size, key)
        if self.draft is not None and sampler.penalties is not None:
            raise ValueError(
                "a draft cannot go with repetition_penalty, presence_penalty or frequency_penalty: "
                "leave the one or the others out"
            )
        return sampler

    def cut(self, tokens: np.ndarray) -> list[int]:
        """A row's new tokens up to its first stop token."""
        stopped = np.flatnonzero(np.isin(tokens, self.stops))
        return tokens[: stopped[0] + 1 if len(stopped) else None].tolist()


@functools.cache
def _warn_of_length(max_seq_len: int) -> None:
    """Say once that a text may become longer than what the model knows."""
    logger.warning(
        "the prompt and max_new_tokens together exceed max_seq_len=%d, the longest text that the "
        "model was made for: beyond it expect a worse one, or lower max_new_tokens",
        max_seq_len,
    )


def bucket_of(length: int) -> int:
    """The power of two that a length is padded to, 16 at least."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def _check_prompts(prompt: Prompt) -> list[np.ndarray]:
    prompts = [np.asarray(ids) for ids in prompt]
    if not prompts or any(ids.ndim != 1 for ids in prompts):
        raise ValueError(
            f"prompt={prompt!r:.100}: give int32[batch, prompt], or a list of lists of "
            "ids; one prompt is a batch of one, [ids]"
        )
    if any(ids.size == 0 for ids in prompts):
        raise ValueError("prompt is empty: begin with the tokenizer's separator")
    if not all(np.issubdtype(ids.dtype, np.integer) for ids in prompts):
        raise ValueError(f"prompt holds {prompts[0].dtype}, and token ids are integers")
    return prompts


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} has the id {wrong[0]}: the model's are 0 to {vocab_size - 1}")


def _begin(
    rows: Rows, sampler: Sampler, logprobs: bool = False
) -> tuple[Any, Callable[[Any, int], Any]]:
    """The state behind the prompts and one token, and the function that continues it to a limit."""
    inputs = (rows.tokens, rows.mask)
    with sharding.use(sharding.Layout(rows.mesh, sharding.whole_rows())):
        arrays = (rows.decoder, sampler, *inputs, rows.stops, rows.is_padding)
        state: Any = _read_prompts(arrays, rows.length, rows.room, logprobs)
        fixed: tuple[Any, ...] = (for_decoding(rows.decoder), sampler, rows.stops)
        proceed: Callable[..., Any] = _advance
        if rows.draft is not None:
            decoder = rows.draft.decoder
            draft_cache = _read_drafted_prompts((decoder, *inputs), rows.length)
            draft = Draft(for_decoding(decoder), rows.draft.num_tokens)
            state = dataclasses.replace(state, draft_cache=draft_cache, steps=jnp.int32(0))
            fixed, proceed = (fixed[0], draft, *fixed[1:]), advance

    def to(state: Any, limit: int) -> Any:
        if limit == 1:  # it is there
            return state
        with sharding.use(sharding.Layout(rows.mesh, sharding.whole_rows())):
            return proceed((*fixed, np.int32(limit)), state)

    return state, to


@eqx.filter_jit
def _read_drafted_prompts(arrays: tuple[Any, ...], length: int) -> PyTree:
    """The cache of the drafting model behind the prompts."""
    decoder, tokens, mask = arrays
    return decoder.prefill(tokens, mask, length)[1]


@eqx.filter_jit
def for_decoding(decoder: Decoder) -> Decoder:
    """The decoder as its `decode` takes it."""
    return decoder.for_decoding()


@eqx.filter_jit
def _read_prompts(arrays: tuple[Any, ...], length: int, room: int, logprobs: bool) -> State:
    """Read the prompts, and draw the first new token; no one waits for rows of padding."""
    decoder, sampler, tokens, mask, stops, is_padding = arrays
    logits, cache = decoder.prefill(tokens, mask, length)
    empty = jnp.zeros((tokens.shape[0], room), jnp.int32)
    seen = sampler.begin(tokens, mask, logits.shape[1])
    logs = jnp.zeros(empty.shape) if logprobs else None
    state = State(empty, jnp.int32(0), is_padding, cache, seen, logs)
    return _append(state, sampler, logits, stops)


@eqx.filter_jit(donate="all-except-first")
def _advance(arrays: tuple[Any, ...], state: State) -> State:
    """Continue to `limit` tokens in all, or until all rows have stopped."""
    decoder, sampler, stops, limit = arrays

    def unfinished(state: State) -> Array:
        return (state.count < limit) & ~state.done.all()

    def step(state: State) -> State:
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, 1, keepdims=False)
        logits, cache = decoder.decode(last, state.cache)
        state = eqx.tree_at(lambda s: s.cache, state, cache)
        return _append(state, sampler, logits, stops)

    return jax.lax.while_loop(unfinished, step, state).whole()


def _append(state: State, sampler: Sampler, logits: Array, stops: Array) -> State:
    """The state with one more token per row; a row that has stopped repeats its last."""
    before = jax.lax.dynamic_index_in_dim(
        state.tokens, jnp.maximum(state.count - 1, 0), 1, keepdims=False
    )
    drawn = sampler.draw(logits, state.count, state.seen)
    token = jnp.where(state.done, before, drawn)
    tokens = jax.lax.dynamic_update_index_in_dim(state.tokens, token, state.count, 1)
    logprobs = state.logprobs
    if logprobs is not None:
        logs = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
        logs = jnp.where(state.done, 0.0, logs)
        logprobs = jax.lax.dynamic_update_index_in_dim(logprobs, logs, state.count, 1)
    done = state.done | (token[:, None] == stops[None, :]).any(1)
    seen = None if state.seen is None else state.seen.add(token)
    return State(tokens, state.count + 1, done, state.cache, seen, logprobs).whole()
