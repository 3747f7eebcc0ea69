"""Log-likelihoods and continuations of token ids by a model, in batches of a few shapes."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zoo import sharding
from zoo.data.tokenizer import Tokenizer, begin_id, end_id
from zoo.decoding.decoder import decoder_of
from zoo.decoding.sampling import bucket_of
from zoo.nn.precision import DTypeName
from zoo.nn.products import is_operand
from zoo.sharding.placement import gathered
from zoo.tasks.generation import make_stops, stream_texts
from zoo.training.losses import class_logits, readout_and_input, token_losses, token_values
from zoo.training.step import make_eval_step

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, and of what continues it
Row = tuple[np.ndarray, int]  # ids, and how many of the last ones are scored
LogLikelihood = tuple[float, bool]  # nats, and whether each token is the likeliest in its place

DEFAULT_LENGTH = 2048  # of a model without a limit, as in lm-eval
logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Rows of one shape: their length, their number, and the places without padding."""

    bucket: int
    rows: int
    places: list[int]


def batched(
    lengths: Sequence[int], longest: int, tokens: int, *, beside: int = 0, parts: int = 1
) -> list[Batch]:
    """Rows of these lengths in batches of one bucket of lengths each, in the order of their ends.

    A batch has about `tokens` tokens, of which each row has `beside` besides its own. Its number of
    rows is a power of two, or the next multiple of `parts`, and no more than a bucket needs.
    """
    by_bucket: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_bucket.setdefault(min(bucket_of(length), longest), []).append(place)
    batches = []
    for bucket, places in by_bucket.items():
        most = max(1, tokens // (bucket + beside))
        rows = min(1 << (most.bit_length() - 1), 1 << (len(places) - 1).bit_length())
        rows = -(-rows // parts) * parts
        for begin in range(0, len(places), rows):
            batches.append(Batch(bucket, rows, places[begin : begin + rows]))
    return sorted(batches, key=lambda batch: batch.places[-1])


class Scorer:
    """A model of any family that scores and continues token ids.

    Rows are padded to buckets of lengths, each compiled once, and lie over `mesh`, by default the
    model's own; a batch has about `batch_tokens` tokens. A row has `max_length` tokens at most,
    which are the model's positions if not given, or 2048 for a model without a limit. Results
    depend neither on the batch nor on the mesh but for rounding, and every process gets all of
    them. The model computes in the dtype of its parameters.

    Raises:
        ValueError: a language model without a next token, or a `max_length` beyond its positions.
    """

    def __init__(
        self,
        model: PyTree,
        tokenizer: Tokenizer,
        *,
        mesh: Mesh | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        classifies: bool = False,
    ):
        self.max_length = row_length(model, max_length, classifies)
        self._model, self._tokenizer, self._batch_tokens = model, tokenizer, batch_tokens
        self._mesh = sharding.mesh_of(model) if mesh is None else mesh
        sums = class_scores if classifies else row_scores
        self._step = make_eval_step(sums, mesh=self._mesh, precision=precision_of(model))
        self._has_cut = False

    @property
    def prefix_id(self) -> int:
        """The id that stands before a text without a context: the begin of text, or its end."""
        begin = getattr(self._tokenizer, "bos_id", begin_id(self._tokenizer))
        return end_id(self._tokenizer) if begin is None else begin

    def stream(self, pairs: Sequence[Pair]) -> Iterator[dict[int, LogLikelihood]]:
        """The log-likelihood of each continuation after its context, a batch at a time.

        Each comes by the index of its pair. An empty context stands for `prefix_id`. A row that is
        too long loses the beginning of its context, which is said once.

        Raises:
            ValueError: at the call, an empty continuation, one that is longer than a row, or an id
                that the model does not have.
        """
        vocab_size = decoder_of(self._model).config.vocab_size
        rows: list[Row] = []
        for at, (context, continuation) in enumerate(pairs):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {at} has a continuation of {len(continuation)} tokens, and a row of "
                    f"this model has 1 to {self.max_length}: change the task"
                )
            # The last token is never read.
            read = self._cut([*(context or [self.prefix_id]), *continuation][:-1], self.max_length)
            ids = np.asarray([*read, continuation[-1]], np.int32)
            if (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
                raise ValueError(f"id {wrong[0]}: the model has ids from 0 to {vocab_size - 1}")
            rows.append((ids, len(continuation)))

        def arrays(batch: Batch) -> dict[str, np.ndarray]:
            shape = batch.rows, batch.bucket
            tokens, targets = np.zeros((2, *shape), np.int32)
            weights = np.zeros(shape, np.float32)
            for row, place in enumerate(batch.places):
                ids, scored = rows[place]
                size = len(ids) - 1
                tokens[row, :size], targets[row, :size] = ids[:-1], ids[1:]
                weights[row, size - scored : size] = 1
            return {"tokens": tokens, "targets": targets, "weights": weights}

        for batch, found in self._run([len(ids) - 1 for ids, _ in rows], arrays):
            scores = zip(batch.places, found["total"], found["greedy"], strict=False)
            yield {place: (float(total), bool(greedy > 0)) for place, total, greedy in scores}

    def stream_classes(self, texts: Sequence[Sequence[int]]) -> Iterator[dict[int, list[float]]]:
        """The log-probability of each class for each text, in nats, a batch at a time.

        A text that is too long loses its end, which is said once.
        """
        rows = [self._cut(ids, self.max_length, at_end=True) for ids in texts]

        def arrays(batch: Batch) -> dict[str, np.ndarray]:
            shape = batch.rows, batch.bucket
            inputs, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
            for row, place in enumerate(batch.places):
                inputs[row, : len(rows[place])] = rows[place]
                mask[row, : len(rows[place])] = True
            return {"inputs": inputs, "mask": mask}

        for batch, found in self._run([len(ids) for ids in rows], arrays):
            yield dict(zip(batch.places, found["classes"].tolist(), strict=False))

    def stream_texts(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stops: Sequence[str] = (),
        max_new_tokens: int,
        temperature: float = 0.0,
        key: Array | None = None,
        **sampling: Any,
    ) -> Iterator[dict[int, str]]:
        """The continuation of each prompt, up to the model's own end or one of `stops`.

        They come a batch at a time, each without its end. `sampling` are options of `zoo.generate`;
        each batch has a random stream of its own, from `key` and its number, on any mesh. A prompt
        that leaves no room for `max_new_tokens` loses its beginning, which is said once.

        Raises:
            ValueError: no room for a prompt beside `max_new_tokens`.
        """
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the "
                f"{self.max_length} tokens of a row: lower it (max_gen_toks in the task)"
            )
        cut = [self._cut(list(ids) or [self.prefix_id], room) for ids in prompts]
        ends = make_stops(self._model, self._tokenizer, stops)
        lengths = [len(ids) for ids in cut]
        batches = batched(lengths, room, self._batch_tokens, beside=max_new_tokens)
        for number, batch in enumerate(batches):
            given = [[*cut[place]] for place in batch.places]
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

    def _cut(self, ids: Sequence[int], length: int, at_end: bool = False) -> Sequence[int]:
        if len(ids) > length and not self._has_cut:
            self._has_cut = True
            logger.warning(
                "a row of %d tokens is longer than the %d that fit: its %s is cut "
                "off, as in all such rows",
                len(ids),
                length,
                "end" if at_end else "beginning",
            )
        return ids[:length] if at_end else ids[-length:]

    def _run(
        self, lengths: Sequence[int], arrays: Callable[[Batch], dict[str, np.ndarray]]
    ) -> Iterator[tuple[Batch, dict[str, np.ndarray]]]:
        """Each batch with its sums, which are read while the next one runs."""
        parts = 1 if self._mesh is None else sharding.num_batch_parts(self._mesh)
        batches = batched(lengths, self.max_length, self._batch_tokens, parts=parts)
        for bucket, rows in sorted({(batch.bucket, batch.rows) for batch in batches}, reverse=True):
            self._step.compile(self._model, self._placed(arrays(Batch(bucket, rows, []))))
        under_way: deque[tuple[Batch, dict[str, Array]]] = deque()
        for batch in [*batches, None]:
            if batch is not None:
                sums = self._step(self._model, self._placed(arrays(batch)))[1]
                under_way.append((batch, sums))
            while len(under_way) > (batch is not None):
                done, sums = under_way.popleft()
                yield done, {name: gathered(x) for name, x in sums.items()}

    def _placed(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """The arrays of a batch over the mesh, each process giving its devices' part."""
        if self._mesh is None:
            return arrays
        over = sharding.batch_sharding(self._mesh, 2)
        return {
            name: jax.make_array_from_callback(x.shape, over, x.__getitem__)
            for name, x in arrays.items()
        }


def row_scores(
    model: PyTree, batch: dict[str, Array], key: None
) -> tuple[Array, Array, dict[str, Array]]:
    """Each row's log-likelihood and whether it is greedy, as metrics of an evaluation step."""
    targets, weights = batch["targets"], batch["weights"]

    def scored(logits: Array, targets: Array) -> tuple[Array, Array]:
        return token_losses(logits, targets), logits.argmax(-1) == targets

    readout, inputs = readout_and_input(model, batch, None)
    losses, greedy = token_values(scored, readout, inputs, targets)
    totals = -jnp.where(weights != 0, losses * weights, 0.0).sum(-1)
    zero = jnp.float32(0)
    return zero, zero, {"total": totals, "greedy": (greedy | (weights == 0)).all(-1)}


def class_scores(
    model: PyTree, batch: dict[str, Array], key: None
) -> tuple[Array, Array, dict[str, Array]]:
    """The log-probability of each class for each row, as a metric of an evaluation step."""
    logits = class_logits(model, batch, None).astype(jnp.float32)
    zero = jnp.float32(0)
    return zero, zero, {"classes": jax.nn.log_softmax(logits)}


def row_length(model: PyTree, max_length: int | None, classifies: bool) -> int:
    """The tokens that a row of a model has at most.

    Raises:
        ValueError: a language model without a next token, or a `max_length` that it does not have.
    """
    decoder = model if classifies else decoder_of(model)
    limit = getattr(decoder.config, "max_seq_len", None)
    length = max_length or limit or DEFAULT_LENGTH
    if max_length is not None and not 1 <= max_length <= (limit or max_length):
        raise ValueError(
            f"max_length={max_length} must be at least 1, and at most the {limit} positions that "
            "the model was made for (its max_seq_len)"
        )
    if not classifies:
        decoder.check_decoder(length)
    return length


def precision_of(model: PyTree) -> DTypeName:
    """The precision of the dtype of most of a model's numbers."""
    sizes: dict[Any, int] = {}
    for x in jax.tree.leaves(model, is_leaf=is_operand):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
            sizes[jnp.dtype(x.dtype)] = sizes.get(jnp.dtype(x.dtype), 0) + math.prod(x.shape)
    half: dict[Any, DTypeName] = {jnp.dtype("bfloat16"): "bf16", jnp.dtype("float16"): "fp16"}
    return half.get(max(sizes, key=sizes.__getitem__), "fp32")


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stops."""
    return text[: min([len(text), *(at for stop in stops if (at := text.find(stop)) >= 0)])]
