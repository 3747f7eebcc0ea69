"""Text from a model: sampling token by token, at once or as a stream.

Any `zoo.decoding.decoder.Decoder` will do. Prompts are aligned to the right,
and padded to a bucket, so that a model's two programs, one that reads prompts and one that
continues them, are compiled once per bucket. A model computes in the dtype of its parameters.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from zoo import sharding
from zoo.common.configuration import check_ids, require
from zoo.decoding.decoder import Decoder, decoder_of
from zoo.decoding.drawing import Sampler, Sampling, SamplingOptions, State
from zoo.decoding.speculative import Draft, draft_and_judge, read

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
    logprobs: bool | Literal["scaled"] = False,
    **options: Unpack[SamplingOptions],
) -> Any:
    """The prompts and up to `max_new_tokens` sampled tokens after each.

    The `options` are the fields of `zoo.Sampling`, such as `temperature=0.5`: they replace the
    fields of `sampling`. A row's tokens depend neither on the other rows nor on the model's mesh.
    With a draft that is so of greedy tokens, and of the distribution of others.

    A prompt int32[batch, prompt] gives int32[batch, prompt + max_new_tokens], in which a row that
    has come to one of the `stop_tokens` repeats it to its end. Lists of ids, of any lengths, give
    lists of ids, which end with the stop token.

    `draft` is a smaller model with the same tokenizer, of any family: it proposes `draft_tokens`
    tokens at a time, which the model judges at once. The tokens have the same distribution as
    without it (Leviathan et al. 2023), and greedy ones are the same.

    With `logprobs` the result is a pair: the tokens, and the log-probability that the model itself
    gave each new token, before temperature, penalty and biases, float32[batch, max_new_tokens]
    (0 behind a stop token), or lists as long as the new tokens. With "scaled" it is that after
    these three, before `top_k`, `top_p` and `min_p`.

    Raises:
        ValueError: a model that is no decoder, an empty prompt, ids that it does not have, more
            tokens than it has positions, a sampling parameter out of range, a missing key, a draft
            of another vocabulary or mesh, or one together with a penalty.
    """
    sampling = dataclasses.replace(sampling or Sampling(), **options)
    rows = Rows(model, prompt, max_new_tokens, sampling.stop_tokens, draft, draft_tokens)
    sampler = rows.sampler(sampling, key)
    if logprobs == "scaled":
        require(draft is None, "logprobs='scaled' cannot go with a draft: leave one of them out")
        sampler = dataclasses.replace(sampler, scales_logprobs=True)
    new = np.zeros((len(rows.prompts), 0), np.int32)
    logs = np.zeros(new.shape, np.float32)
    if max_new_tokens > 0:
        state, advance = _begin(rows, sampler, bool(logprobs))
        state = advance(state, max_new_tokens)
        new = np.array(state.tokens)[: len(rows.prompts), :max_new_tokens]
        count = int(state.count)
        new[:, count:] = new[:, count - 1 : count]
        if state.logprobs is not None:
            logs = np.asarray(state.logprobs)[: len(rows.prompts), :max_new_tokens]
    if not isinstance(prompt, list | tuple):
        tokens = jnp.asarray(np.concatenate([np.stack(rows.prompts), new], axis=1))
        return (tokens, jnp.asarray(logs)) if logprobs else tokens
    texts = [rows.cut(line) for line in new]
    lists = [[*ids.tolist(), *text] for ids, text in zip(rows.prompts, texts, strict=True)]
    if not logprobs:
        return lists
    return lists, [line[: len(text)].tolist() for line, text in zip(logs, texts, strict=True)]


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
        for name, ids in (("prompt", np.concatenate(self.prompts)), ("stop_tokens", stops)):
            check_ids(name, np.unique(ids).tolist(), self.decoder.config.vocab_size)
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
        self.is_padding = np.arange(num_rows) >= len(self.prompts)  # only for the mesh
        self.draft: Draft | None = None
        ahead = 0  # tokens beyond what is asked for
        if draft is not None:
            self.draft = Draft.checked(draft, draft_tokens, self.decoder, self.mesh)
            ahead = draft_tokens
        self.room = bucket_of(max_new_tokens + ahead)
        # The last token is never read.
        self.length = bucket_of(bucket + max_new_tokens - 1 + ahead)

    def sampler(self, sampling: Sampling, key: Key[Array, ""] | None) -> Sampler:
        """How the tokens of these rows are drawn."""
        sampler = Sampler.of(sampling, self.decoder.config.vocab_size, key)
        if self.draft is not None and sampler.repetition is not None:
            raise ValueError("a draft cannot go with repetition_penalty: leave one of them out")
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


def _begin(
    rows: Rows, sampler: Sampler, logprobs: bool = False
) -> tuple[State, Callable[[State, int], State]]:
    """The state behind the prompts and one token, and the function that continues it to a limit."""
    placed = functools.partial(sharding.use, sharding.Layout(rows.mesh, sharding.whole_rows()))
    with placed():
        arrays = (rows.tokens, rows.mask, rows.stops, rows.is_padding)
        models = (rows.decoder, rows.draft)
        state = _read_prompts((*models, sampler, *arrays), rows.length, rows.room, logprobs)
        decoder, draft = _for_decoding(models)

    def to(state: State, limit: int) -> State:
        if limit == 1:  # it is there
            return state
        with placed():
            return _advance((decoder, draft, sampler, rows.stops, np.int32(limit)), state)

    return state, to


@eqx.filter_jit
def _for_decoding(models: tuple[Decoder, Draft | None]) -> tuple[Decoder, Draft | None]:
    """The decoder, and the draft's, as `decode` takes them."""
    decoder, draft = models
    if draft is not None:
        draft = Draft(draft.decoder.for_decoding(), draft.num_tokens)
    return decoder.for_decoding(), draft


@eqx.filter_jit
def _read_prompts(arrays: tuple[Any, ...], length: int, room: int, logprobs: bool) -> State:
    """Read the prompts, and draw the first new token; no one waits for rows of padding."""
    decoder, draft, sampler, tokens, mask, stops, is_padding = arrays
    logits, cache = read(decoder, tokens, mask, length, draft)
    empty = jnp.zeros((tokens.shape[0], room), jnp.int32)
    seen = sampler.begin(tokens, mask, logits.shape[1])
    logs = jnp.zeros(empty.shape) if logprobs else None
    state = State(empty, jnp.int32(0), is_padding, cache, seen, logs)
    if draft is not None:
        _, draft_cache = read(draft.decoder, tokens, mask, length, draft)
        state = dataclasses.replace(state, draft_cache=draft_cache, steps=jnp.int32(0))
    token = sampler.draw(logits, state.count, seen)
    return state.append(token[:, None], sampler.judged(logits, seen)[:, None], 1, stops)


@eqx.filter_jit(donate="all-except-first")
def _advance(arrays: tuple[Any, ...], state: State) -> State:
    """Continue to `limit` tokens in all (a draft more at most), or until all rows have stopped."""
    decoder, draft, sampler, stops, limit = arrays

    def unfinished(state: State) -> Array:
        return (state.count < limit) & ~state.done.all()

    def step(state: State) -> State:
        if draft is not None:
            return draft_and_judge(decoder, draft, sampler, stops, state)
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, 1, keepdims=False)
        logits, cache = decoder.decode(last, state.cache)
        token = sampler.draw(logits, state.count, state.seen)
        judged = sampler.judged(logits, state.seen)
        return state.append(token[:, None], judged[:, None], 1, stops, cache=cache)

    return jax.lax.while_loop(unfinished, step, state).whole()
