"""Rows of token ids in batches of a few shapes, and the log-likelihoods of a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from zoo import sharding
from zoo.decoding.sampling import bucket_of
from zoo.nn.protocols import HasReadout
from zoo.training.chunked_loss import cut_time
from zoo.training.losses import LOGITS_BYTES, cross_entropy

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, and of what continues it
Row = tuple[np.ndarray, int]  # ids, and how many of the last ones are scored


class Batch(NamedTuple):
    """Rows of one shape: their length, their number, and the places of those not of padding."""

    bucket: int
    rows: int
    places: list[int]

    def arrays(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """The batch."""
        shape = self.rows, self.bucket
        tokens, targets = np.zeros((2, *shape), np.int32)
        weights = np.zeros(shape, np.float32)
        for row, place in enumerate(self.places):
            ids, scored = rows[place]
            size = len(ids) - 1
            tokens[row, :size], targets[row, :size] = ids[:-1], ids[1:]
            weights[row, size - scored : size] = 1
        return {"tokens": tokens, "targets": targets, "weights": weights}


def batched(
    lengths: Sequence[int], longest: int, tokens: int, *, beside: int = 0, parts: int = 1
) -> list[Batch]:
    """Rows of these lengths by buckets of lengths, the longest first, each of one shape.

    A batch has about `tokens` tokens, of which each row has `beside` besides its own. Its number of
    rows is a power of two, or the next multiple of `parts`, and no more than a bucket needs.
    """
    by_bucket: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_bucket.setdefault(min(bucket_of(length), longest), []).append(place)
    batches = []
    for bucket, places in sorted(by_bucket.items(), reverse=True):
        most = max(1, tokens // (bucket + beside))
        rows = min(1 << (most.bit_length() - 1), 1 << (len(places) - 1).bit_length())
        rows = -(-rows // parts) * parts
        for begin in range(0, len(places), rows):
            batches.append(Batch(bucket, rows, places[begin : begin + rows]))
    return batches


def placed(arrays: Mapping[str, np.ndarray], mesh: Mesh | None) -> Mapping[str, Any]:
    """The arrays of a batch over the mesh, each process giving its devices' part."""
    if mesh is None:
        return arrays
    over = sharding.batch_sharding(mesh, 2)
    return {
        name: jax.make_array_from_callback(x.shape, over, x.__getitem__)
        for name, x in arrays.items()
    }


def row_scores(
    model: PyTree, batch: dict[str, Array], key: None
) -> tuple[Array, Array, dict[str, Array]]:
    """Each row's log-likelihood and whether it is greedy, as metrics of an evaluation step."""
    readout: Callable[[Array], Array] = lambda logits_BTV: logits_BTV  # noqa: E731
    if isinstance(model, HasReadout):
        inputs, readout = model.hidden(batch["tokens"]), model.readout()
    else:
        inputs = model(batch["tokens"])
    rows, seq = batch["tokens"].shape
    vocab = eqx.filter_eval_shape(readout, inputs).shape[-1]
    held = 4 * rows * seq * vocab // sharding.num_parts("batch", "inner_seq", "vocab")
    time = seq // sharding.num_parts("inner_seq")
    count = next(
        n for n in range(1, time + 1) if time % n == 0 and (held <= LOGITS_BYTES * n or n == time)
    )

    def chunk(parts: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        x, targets, weights = parts
        return _scored(readout(x), targets, weights)

    parts = (inputs, batch["targets"], batch["weights"])
    if count == 1:
        totals, greedy = chunk(parts)
    else:
        totals, greedy = jax.lax.map(chunk, jax.tree.map(lambda x: cut_time(x, count), parts))
        totals, greedy = totals.sum(0), greedy.all(0)
    zero = jnp.float32(0)
    return zero, zero, {"total": totals, "greedy": greedy}


def _scored(
    logits: Float[Array, "batch seq vocab"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
) -> tuple[Float[Array, "batch"], Array]:
    losses, _ = jax.vmap(cross_entropy)(logits, targets, weights)
    greedy = (logits.argmax(-1) == targets) | (weights == 0)
    return -losses, greedy.all(-1)
