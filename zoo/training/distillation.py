"""Distillation: the loss of a student beside a teacher's distribution (Hinton et al. 2015).

At each position it is `weight` T² KL(teacher ‖ student), of both distributions at temperature T,
plus 1 - `weight` times the loss on the next token. T² keeps the gradients of both in proportion.

Of the teacher there are all logits, or its likeliest tokens, their log-probabilities and the mass
of the rest (`TEACHER_ENTRIES` of a batch): the rest is then one more outcome, of the student too.

Legend of suffixes: B batch, T time, E embed, V vocabulary, K likeliest tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from zoo.common.configuration import require
from zoo.data.top_k import IDS, LOG_PROBS, REST
from zoo.nn.parameters import CastsAtUse, casts_at_use, casts_inputs, dropping_out
from zoo.nn.products import custom_vjp
from zoo.nn.protocols import HasReadout
from zoo.training import losses
from zoo.training.chunked_loss import chunked, cut_time, join_time

TEACHER_ENTRIES = (IDS, LOG_PROBS, REST)


class Taught(CastsAtUse):
    """A student, which is trained, and beside it its teacher, which is not (`student_alone`)."""

    student: PyTree
    teacher: PyTree

    @property
    def casts_at_use(self) -> bool:
        """Whether both cast their parameters themselves."""
        return casts_at_use(self.student) and casts_at_use(self.teacher)

    @property
    def casts_inputs(self) -> bool:
        """Whether both cast their inputs themselves."""
        return casts_inputs(self.student) and casts_inputs(self.teacher)


def student_alone(model: Taught) -> PyTree:
    """The tree of booleans of a `Training`'s `trainable`: the student is trained."""
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda x: x.student, nothing, jax.tree.map(lambda _: True, model.student))


@dataclass(frozen=True)
class Distillation:
    """A temperature, and the weight of the teacher beside the data: a loss for a step of each kind.

    Metrics are `kl`, the divergence at the temperature, and `next_token`, the loss on the data; of
    weight 0 there are none, and the loss is `zoo.losses.next_token`'s, bit for bit.

    Raises:
        ValueError: a temperature that is not positive, or a weight outside of 0 to 1.
    """

    temperature: float = 1.0
    weight: float = 0.9

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"temperature={self.temperature}: must be positive")
        require(0 <= self.weight <= 1, f"weight={self.weight}: must be in 0 to 1")

    @losses.OF_TOKENS
    def beside_teacher(
        self, model: Taught, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """The loss of `model.student` on a token batch, as `make_train_step` takes it.

        The batch is that of `zoo.losses.next_token`. The teacher computes without dropout.
        """
        if self.weight == 0:
            return losses.next_token(model.student, batch, key)
        losses.check_tokens(batch)
        teacher, x_BTE = jax.lax.stop_gradient(_without_dropout(model.teacher, batch))
        return self._mixed(model.student, batch, key, teacher, {"x": x_BTE})

    @losses.OF_TOKENS
    def of_stored(
        self, model: PyTree, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """The loss of a student on a token batch that has the `TEACHER_ENTRIES` as well.

        They are of the same temperature: int32[batch, seq, k], float32[batch, seq, k] and
        float32[batch, seq].
        """
        if self.weight == 0:
            return losses.next_token(model, batch, key)
        losses.check_tokens(batch)
        return self._mixed(model, batch, key, None, {name: batch[name] for name in TEACHER_ENTRIES})

    def _mixed(
        self,
        student: PyTree,
        batch: dict[str, Array],
        key: Array | None,
        teacher: Any,
        targets: dict[str, Array],
    ) -> tuple[Array, Array, dict[str, Array]]:
        readout, x_BTE = _outputs(student, batch, key)
        logits = jax.eval_shape(readout, x_BTE)
        if teacher is not None:
            size = jax.eval_shape(teacher, targets["x"]).shape[-1]
            require(
                size == logits.shape[-1],
                f"the teacher has {size} outputs, and the student {logits.shape[-1]}: give both "
                "one tokenizer and one vocab_size",
            )
        # One chunk too: the gradient is computed forward, and no logits are kept for it.
        count = losses.num_chunks(logits, copies=2)
        given = (_Readouts(readout, teacher), x_BTE, {**targets, "targets": batch["targets"]})
        total, sums = chunked(self._of_chunk, count, *given, batch["weights"])
        return total, batch["weights"].sum(), sums

    def _of_chunk(
        self, readouts: "_Readouts", x_BTE: Array, targets: dict[str, Array], weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        logits = readouts.student(x_BTE).astype(jnp.float32)
        student = logits / self.temperature
        if readouts.teacher is None:
            teacher = _completed(
                jax.lax.stop_gradient(student), *(targets[name] for name in TEACHER_ENTRIES)
            )
        else:
            teacher = readouts.teacher(targets["x"]).astype(jnp.float32) / self.temperature
        kl = jnp.where(weights > 0, divergences(student, teacher), 0.0)
        sums = {
            "kl": (kl * weights).sum(),
            "next_token": losses.cross_entropy(logits, targets["targets"], weights)[0],
        }
        of_teacher = self.weight * self.temperature**2 * sums["kl"]
        return of_teacher + (1 - self.weight) * sums["next_token"], sums


class _Readouts(eqx.Module):
    """The output heads of a student and, unless its outputs are stored, of its teacher."""

    student: Any
    teacher: Any


def _outputs(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Callable[[Array], Array], Array]:
    """A model's output head, and its input; the identity, for a model that has no `readout`."""
    inputs = {name: batch.get(name) for name in ("segment_ids", "positions")}
    if isinstance(model, HasReadout):
        return model.readout(), model.hidden(batch["tokens"], **inputs, key=key)
    return eqx.nn.Identity(), model(batch["tokens"], **inputs, key=key)


def _without_dropout(model: PyTree, batch: dict[str, Array]) -> Any:
    with dropping_out(None):
        return _outputs(model, batch, None)


@custom_vjp
def divergences(
    student: Float[Array, "*batch vocab"], teacher: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch"]:
    """KL(teacher ‖ student) of each row of fp32 logits, in nats; the teacher's get no gradient."""
    return _divergences_forward(student, teacher)[0]


def _divergences_forward(student: Array, teacher: Array) -> tuple[Array, tuple]:
    teacher = jax.lax.stop_gradient(teacher)
    sums = [jax.nn.logsumexp(x, axis=-1) for x in (student, teacher)]
    log_q, log_p = student - sums[0][..., None], teacher - sums[1][..., None]
    p = jnp.exp(log_p)
    each = jnp.where(p > 0, p * (log_p - log_q), 0.0)  # of no mass, logits may be infinite
    return each.sum(-1), (student, teacher, *sums)


def _divergences_backward(residuals: tuple, g: Array) -> tuple[Array, None]:
    student, teacher, sum_q, sum_p = residuals
    q, p = jnp.exp(student - sum_q[..., None]), jnp.exp(teacher - sum_p[..., None])
    return jnp.where(g[..., None] == 0, 0.0, (q - p) * g[..., None]), None


divergences.defvjp(_divergences_forward, _divergences_backward)


def _completed(
    student: Float[Array, "*batch vocab"],
    ids: Int[Array, "*batch k"],
    log_probs: Float[Array, "*batch k"],
    rest: Float[Array, "*batch"],
) -> Float[Array, "*batch vocab"]:
    """The log-probabilities of a teacher that spreads the rest's mass as the student does.

    The divergence from it, and its gradient, are those of the k tokens and the rest as one.
    """
    # A comparison, not a scatter: with the vocabulary sharded it stays local, and it fuses.
    index = jax.lax.broadcasted_iota(jnp.int32, student.shape, student.ndim - 1)
    is_token = index[..., None] == ids[..., None, :]
    known = is_token.any(-1)
    log_p = jnp.where(is_token, log_probs[..., None, :], 0.0).sum(-1)
    others = jnp.where(known, -jnp.inf, student)
    of_rest = jnp.log(rest) - jax.nn.logsumexp(others, axis=-1)
    return jnp.where(known, log_p, student + of_rest[..., None])


def top_k(model: PyTree, batch: dict[str, Array], k: int, temperature: float) -> dict[str, Array]:
    """The `TEACHER_ENTRIES` of a token batch, by a teacher in the precision of the step around."""
    readout, x_BTE = _without_dropout(model, batch)
    logits = jax.eval_shape(readout, x_BTE)
    count = losses.num_chunks(logits, copies=2)
    vocab = logits.shape[-1]

    def of_chunk(x: Array) -> tuple[Array, Array, Array]:
        log_probs = jax.nn.log_softmax(readout(x).astype(jnp.float32) / temperature)
        best, ids = jax.lax.top_k(log_probs, k)
        rest = jnp.maximum(1.0 - jnp.exp(best).sum(-1), 0.0)
        rest = rest if k < vocab else jnp.zeros_like(rest)
        return ids, best, rest

    found = jax.lax.map(of_chunk, cut_time(x_BTE, count))
    return dict(zip(TEACHER_ENTRIES, map(join_time, found), strict=True))
