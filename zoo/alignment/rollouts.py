"""Rollouts: the answers of a model to prompts, and the batches of a policy's loss made of them."""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Key, PyTree

from zoo.common.configuration import require
from zoo.data.datasets import HostBatch
from zoo.decoding import sampling
from zoo.nn.stateful import cast


class Rollouts(NamedTuple):
    """Answers to prompts: those to prompt i are rows i * group, i * group + 1, …"""

    prompts: list[list[int]]
    """The prompt of each row."""
    answers: list[list[int]]
    """The ids of each answer, with the one that ended it."""
    log_probs: list[list[float]]
    """The log-probability with which each was drawn."""
    cut: np.ndarray
    """bool[rows]: no end came within the tokens that an answer may have."""


def rollouts(
    model: PyTree,
    prompts: Sequence[Sequence[int]],
    *,
    group: int,
    max_new_tokens: int,
    key: Key[Array, ""],
    temperature: float = 1.0,
    stop_tokens: Sequence[int],
) -> Rollouts:
    """`group` answers to each prompt, drawn at a temperature from the whole distribution.

    They depend on the key, the places of the prompts and the weights, and not on the mesh. Every
    process of a mesh calls it with all prompts.

    Raises:
        ValueError: a temperature of 0, which explores nothing; as for `zoo.generate`.
    """
    require(temperature > 0, f"temperature={temperature}: must be positive, to draw answers")
    rows = [[*ids] for ids in prompts for _ in range(group)]
    texts, log_probs = sampling.generate(
        model,
        rows,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_tokens=tuple(stop_tokens),
        key=key,
        logprobs="scaled",
    )
    answers = [text[len(ids) :] for ids, text in zip(rows, texts, strict=True)]
    cut = np.array([answer[-1] not in {*stop_tokens} for answer in answers])
    return Rollouts(rows, answers, log_probs, cut)


def rows_of(found: Rollouts, gains: Float[np.ndarray, "rows"], seq_len: int) -> HostBatch:
    """A batch of `PolicyLoss`: a prompt and its answer per row, padded on the right."""
    shape = len(found.prompts), seq_len
    batch: HostBatch = {
        **{name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids")},
        **{name: np.zeros(shape, np.float32) for name in ("weights", "drawn")},
        "positions": np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
        "advantages": np.asarray(gains, np.float32),
    }
    rows = zip(found.prompts, found.answers, found.log_probs, strict=True)
    for row, (prompt, answer, log_probs) in enumerate(rows):
        ids, end = [*prompt, *answer], len(prompt) + len(answer) - 1
        batch["tokens"][row, :end], batch["targets"][row, :end] = ids[:-1], ids[1:]
        batch["segment_ids"][row, :end] = 1
        answered = slice(len(prompt) - 1, end)
        batch["weights"][row, answered], batch["drawn"][row, answered] = 1, log_probs
    return batch


def in_dtype(model: PyTree, dtype: DTypeLike) -> PyTree:
    """The model in a dtype, of which only what has another is a copy: no frozen base twice."""
    like = eqx.filter_eval_shape(cast, model, dtype)
    wanted, structure = jax.tree.flatten(like)
    leaves = jax.tree.leaves(model)
    pairs = enumerate(zip(leaves, wanted, strict=True))
    others = {i: x for i, (x, y) in pairs if eqx.is_array(x) and x.dtype != y.dtype}
    found = eqx.filter_jit(cast)(others, dtype)
    return jax.tree.unflatten(structure, [found.get(i, x) for i, x in enumerate(leaves)])
