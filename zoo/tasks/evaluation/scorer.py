"""Log-likelihoods and continuations of token ids by a model, in batches of a few shapes."""

import logging
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zoo import sharding
from zoo.data.tokenizer import Tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.nn.parameters import is_operand
from zoo.nn.precision import DTypeName
from zoo.sharding.placement import on_host
from zoo.tasks.evaluation.encoding import encode_pair as encode_pair
from zoo.tasks.evaluation.encoding import prefix_id, windows
from zoo.tasks.evaluation.rows import Batch, Pair, Row, batched, placed, row_scores
from zoo.tasks.generation import make_stops, stream_texts
from zoo.training.step import make_eval_step

DEFAULT_LENGTH = 2048  # of a model without a limit, as in lm-eval
logger = logging.getLogger(__name__)


class LogLikelihood(NamedTuple):
    """The log-probability of a continuation, summed over its tokens, in nats.

    `greedy` says whether each of its tokens is the likeliest one in its place.
    """

    total: float
    num_tokens: int
    greedy: bool


class Scorer:
    """A language model of any family that scores and continues token ids.

    Rows are padded to buckets of lengths, each compiled once, and lie over `mesh`, by default the
    model's own; a batch has about `batch_tokens` tokens. A row has `max_length` tokens at most,
    which are the model's positions if not given, or 2048 of a model without a limit. Results depend
    neither on the batch nor on the mesh, and every process gets all of them. The model computes in
    the dtype of its parameters.

    Raises:
        ValueError: a model without a next token, or a `max_length` beyond its positions.
    """

    def __init__(
        self,
        model: PyTree,
        tokenizer: Tokenizer,
        *,
        mesh: Mesh | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
    ):
        self.max_length = row_length(model, max_length)
        self._vocab_size = decoder_of(model).config.vocab_size
        self._model, self._tokenizer, self._batch_tokens = model, tokenizer, batch_tokens
        self._mesh = sharding.mesh_of(model) if mesh is None else mesh
        self._step = make_eval_step(row_scores, mesh=self._mesh, precision=precision_of(model))
        self._has_cut = False

    @property
    def prefix_id(self) -> int:
        """The id that stands before a text without a context: the begin of text, or its end."""
        return prefix_id(self._tokenizer)

    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[LogLikelihood]:
        """The log-likelihood of each continuation after its context.

        An empty context stands for `prefix_id`. A row that is too long loses the beginning of its
        context, which is said once.

        Raises:
            ValueError: an empty continuation, one that is longer than a row, or an id that the
                model does not have.
        """
        return _in_order(self.stream(pairs), len(pairs))

    def stream(
        self, pairs: Sequence[Pair], known: Collection[int] = ()
    ) -> Iterator[dict[int, LogLikelihood]]:
        """The results of `log_likelihoods`, a batch at a time, each by the index of its pair.

        A batch of `known` indices alone is left out; the others are as they would be without.

        Raises:
            ValueError: as for `log_likelihoods`, at the call.
        """
        for at, (_, continuation) in enumerate(pairs):
            self._check(at, continuation)
        rows = [self._row(context or [self.prefix_id], rest) for context, rest in pairs]
        parts = 1 if self._mesh is None else sharding.num_batch_parts(self._mesh)
        lengths = [len(ids) - 1 for ids, _ in rows]
        batches = batched(lengths, self.max_length, self._batch_tokens, parts=parts)
        batches = [batch for batch in batches if not set(batch.places) <= set(known)]
        return self._scores(rows, batches)

    def rolling(self, texts: Sequence[Sequence[int]]) -> list[LogLikelihood]:
        """The log-likelihood of each whole text, the first token after `prefix_id`.

        A text longer than a row is cut into `windows`: each token is scored once.
        """
        cut = [windows(text, self.prefix_id, self.max_length) for text in texts]
        scores = iter(self.log_likelihoods([pair for rows in cut for pair in rows]))
        return [joined([next(scores) for _ in rows]) for rows in cut]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stops: Sequence[str] = (),
        max_new_tokens: int,
        **sampling: Any,
    ) -> list[str]:
        """The continuation of each prompt as text, up to the model's own end or one of `stops`.

        Neither is part of it. `sampling` are options of `zoo.generate`; greedy without any. A
        prompt that leaves no room for `max_new_tokens` loses its beginning, which is said once.
        """
        streamed = self.stream_texts(
            prompts, stops=stops, max_new_tokens=max_new_tokens, **sampling
        )
        return _in_order(streamed, len(prompts))

    def stream_texts(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stops: Sequence[str] = (),
        max_new_tokens: int,
        known: Collection[int] = (),
        temperature: float = 0.0,
        key: Array | None = None,
        **sampling: Any,
    ) -> Iterator[dict[int, str]]:
        """The results of `generate`, a batch at a time, as `stream` has those of scores.

        Each batch has a random stream of its own, of `key` and its number, on any mesh.

        Raises:
            ValueError: no room for a prompt beside `max_new_tokens`.
        """
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the "
                f"{self.max_length} tokens of a row: lower it"
            )
        cut = [self._cut(list(ids) or [self.prefix_id], room) for ids in prompts]
        ends = make_stops(self._model, self._tokenizer, stops)
        lengths = [len(ids) for ids in cut]
        batches = batched(lengths, room, self._batch_tokens, beside=max_new_tokens)

        def texts() -> Iterator[dict[int, str]]:
            for number, batch in enumerate(batches):
                if set(batch.places) <= set(known):
                    continue
                given = [cut[place] for place in batch.places]
                given += given[-1:] * (batch.rows - len(given))  # the shape of the other batches
                rows, steps = stream_texts(
                    self._model,
                    self._tokenizer,
                    given,
                    ends,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    key=None if key is None else jax.random.fold_in(key, number),
                    **sampling,
                )
                for _ in steps:
                    pass
                for row in rows:
                    row.end()
                found = [_before(row.text, ends.texts) for row in rows]
                yield dict(zip(batch.places, found, strict=False))

        return texts()

    def _check(self, at: int, continuation: Sequence[int]) -> None:
        if not continuation:
            raise ValueError(f"pair {at} has an empty continuation: there is nothing to score")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"pair {at} has a continuation of {len(continuation)} tokens, and a row of this "
                f"model has {self.max_length}: shorten it"
            )

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> Row:
        """The ids of a row, cut to one more than are read, and how many of them are scored."""
        # The last token is never read.
        read = self._cut([*context, *continuation][:-1], self.max_length)
        ids = [*read, continuation[-1]]
        array = np.asarray(ids, np.int32)
        if (wrong := array[(array < 0) | (array >= self._vocab_size)]).size:
            raise ValueError(
                f"the id {wrong[0]} is none of the model's, which are 0 to {self._vocab_size - 1}"
            )
        return array, len(continuation)

    def _cut(self, ids: list[int], length: int) -> list[int]:
        if len(ids) > length and not self._has_cut:
            self._has_cut = True
            logger.warning(
                "a row of %d tokens is longer than the %d that there is room for: the beginning "
                "of its context is cut off, as that of all such rows",
                len(ids),
                length,
            )
        return ids[-length:]

    def _scores(self, rows: list[Row], batches: list[Batch]) -> Iterator[dict[int, LogLikelihood]]:
        shapes = {(batch.bucket, batch.rows) for batch in batches}
        under_way: deque[tuple[Batch, dict[str, Array]]] = deque()

        def read() -> dict[int, LogLikelihood]:
            batch, sums = under_way.popleft()
            totals, greedy = (on_host(sums[name]) for name in ("total", "greedy"))
            return {
                place: LogLikelihood(float(totals[row]), rows[place][1], bool(greedy[row] > 0))
                for row, place in enumerate(batch.places)
            }

        for bucket, count in sorted(shapes, reverse=True):
            empty = Batch(bucket, count, []).arrays(rows)
            self._step.compile(self._model, placed(empty, self._mesh))
        for batch in batches:
            arrays = placed(batch.arrays(rows), self._mesh)
            under_way.append((batch, self._step(self._model, arrays)[1]))
            if len(under_way) > 1:  # read while the next one runs
                yield read()
        while under_way:
            yield read()


def row_length(model: PyTree, max_length: int | None = None) -> int:
    """The tokens that a row of a model, or of its skeleton, has at most.

    Raises:
        ValueError: a model without a next token, or a `max_length` that it does not have.
    """
    decoder = decoder_of(model)
    limit = getattr(decoder.config, "max_seq_len", None)
    length = max_length or limit or DEFAULT_LENGTH
    if max_length is not None and not 1 <= max_length <= (limit or max_length):
        raise ValueError(
            f"max_length={max_length} must be at least 1, and at most the {limit} positions that "
            "the model was made for (its max_seq_len)"
        )
    decoder.check_decoder(length)
    return length


def precision_of(model: PyTree) -> DTypeName:
    """The precision of the dtype of most of a model's numbers, or of its skeleton's."""
    sizes: dict[Any, int] = {}
    for x in jax.tree.leaves(model, is_leaf=is_operand):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
            sizes[jnp.dtype(x.dtype)] = sizes.get(jnp.dtype(x.dtype), 0) + math.prod(x.shape)
    half: dict[Any, DTypeName] = {jnp.dtype("bfloat16"): "bf16", jnp.dtype("float16"): "fp16"}
    return half.get(max(sizes, key=sizes.__getitem__), "fp32")


def joined(parts: Sequence[LogLikelihood]) -> LogLikelihood:
    """The log-likelihood of a text, from those of its parts."""
    total, count = sum(part.total for part in parts), sum(part.num_tokens for part in parts)
    return LogLikelihood(float(total), count, all(part.greedy for part in parts))


def _in_order(streamed: Iterator[dict[int, Any]], count: int) -> list[Any]:
    found: dict[int, Any] = {}
    for batch in streamed:
        found |= batch
    return [found[place] for place in range(count)]


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stops."""
    return text[: min([len(text), *(at for stop in stops if (at := text.find(stop)) >= 0)])]
