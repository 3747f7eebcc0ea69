"""Losses of preferences: DPO, and ORPO, which has no reference model.

A batch is that of `zoo.data.preferences.PairPlan`: a pair per row, the chosen example as segment 1
and the rejected one as segment 2, with weights on the tokens of the answers. A loss is a sum over
pairs, with their number as its weight.

Legend of suffixes: B batch, T time, E embed, S sides (chosen, rejected).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.nn.products import in_forward_mode
from zoo.nn.protocols import HasBalance, HasReadout
from zoo.nn.stateful import Balance
from zoo.training import losses
from zoo.training.chunked_loss import chunked_values
from zoo.training.loss_values import LossFunction
from zoo.wrappers import lora

Metrics = dict[str, Array]
# From the log-probabilities of the sides, float32[batch, 2], to the losses, margins of rewards.
PairLoss = Callable[[Array], tuple[Array, Array]]


def dpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference: Literal["batch", "base"] = "batch",
    balance: float = 0.0,
) -> LossFunction:
    """Direct preference optimisation (Rafailov et al. 2023), as `make_train_step` takes it.

    The loss of a pair is -log σ(m), of the margin m = beta · (log π(chosen)/π₀(chosen) -
    log π(rejected)/π₀(rejected)) of its rewards; smoothed, (1 - s) · -log σ(m) + s · -log σ(-m),
    where a share s of the labels is wrong. The log-probabilities under the reference π₀ are the
    batch's `reference`, float32[batch, 2], chosen and rejected; or, with reference "base", those
    of the frozen model under the trained adapters, of which there is no copy.

    The metrics are means over pairs: `accuracy`, the share whose margin is positive, `margin`,
    `chosen_log_prob` and `rejected_log_prob`, in nats per answer. Of a mixture of experts,
    `balance` times its load-balancing loss is added, as a mean over tokens per pair.

    Raises:
        ValueError: `beta` is not positive, `label_smoothing` not in [0, 0.5); at a call, a batch
            without `reference`, or a model without adapters.
    """
    check(beta, label_smoothing)
    require(reference in ("batch", "base"), f"reference={reference!r}: choose 'batch' or 'base'")

    def pair_loss(model: PyTree, batch: dict[str, Array], counts_BS: Array) -> PairLoss:
        reference_BS = _reference(model, batch) if reference == "base" else _stored(batch)

        def of(log_probs_BS: Array) -> tuple[Array, Array]:
            rewards_BS = beta * (log_probs_BS - reference_BS)
            margins_B = rewards_BS[:, 0] - rewards_BS[:, 1]
            right, wrong = jax.nn.log_sigmoid(margins_B), jax.nn.log_sigmoid(-margins_B)
            return -(1 - label_smoothing) * right - label_smoothing * wrong, margins_B

        return of

    loss = functools.partial(_loss, pair_loss, balance)
    return losses.keeps_dtype("reference")(loss) if reference == "batch" else loss


def orpo(*, beta: float = 0.1, balance: float = 0.0) -> LossFunction:
    """Odds-ratio preference optimisation (Hong et al. 2024), as `make_train_step` takes it.

    With p an answer's probability per token, its geometric mean, the loss of a pair is
    -log p(chosen) - beta · log σ(m), where the margin m is the logarithm of the ratio of the odds
    p/(1 - p) of both answers. There is no reference model. Metrics and `balance` are `dpo`'s.

    Raises:
        ValueError: `beta` is not positive.
    """
    check(beta)

    def pair_loss(model: PyTree, batch: dict[str, Array], counts_BS: Array) -> PairLoss:
        def of(log_probs_BS: Array) -> tuple[Array, Array]:
            mean_BS = jnp.minimum(log_probs_BS / jnp.maximum(counts_BS, 1), -1e-6)  # p < 1
            odds_BS = mean_BS - _log_one_minus_exp(mean_BS)
            margins_B = odds_BS[:, 0] - odds_BS[:, 1]
            return -mean_BS[:, 0] - beta * jax.nn.log_sigmoid(margins_B), margins_B

        return of

    return functools.partial(_loss, pair_loss, balance)


def check(beta: float, label_smoothing: float = 0.0) -> None:
    """Raise a ValueError for numbers out of their range."""
    require(beta > 0, f"beta={beta}: must be positive, as 0.1")
    require(
        0 <= label_smoothing < 0.5,
        f"label_smoothing={label_smoothing}: must be in [0, 0.5), the share of wrong labels",
    )


def log_probabilities(model: PyTree, batch: dict[str, Array]) -> Float[Array, "batch 2"]:
    """The log-probability of each answer of a batch in nats, without dropout and a gradient."""
    x_BTE, readout, _ = _hidden(model, batch, None, balanced=False)
    return jax.lax.stop_gradient(_whole(readout, x_BTE, batch, chunks=True))


@losses.OF_TOKENS
def reference_values(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, Metrics]:
    """No loss, and `log_probabilities` as a metric `reference`, for `make_eval_step`."""
    weight = _is_pair(batch).sum().astype(jnp.float32)
    # On every device, as every process reads it.
    of_pairs = sharding.constrain(log_probabilities(model, batch), None, None)
    return jnp.float32(0), weight, {"reference": of_pairs}


@losses.OF_TOKENS
def _loss(
    pair_loss: Callable[..., PairLoss],
    coefficient: float,
    model: PyTree,
    batch: dict[str, Array],
    key: Array | None,
) -> tuple[Array, Array, Metrics]:
    _check_batch(batch)
    is_pair_B, answers_BST = _is_pair(batch), _answers(batch)
    x_BTE, readout, experts = _hidden(model, batch, key, balanced=coefficient > 0)
    of = pair_loss(model, batch, answers_BST.sum(-1))

    def sums(log_probs_BS: Array) -> tuple[Array, Metrics]:
        losses_B, margins_B = of(log_probs_BS)
        metrics = {
            "accuracy": (margins_B > 0).astype(jnp.float32),
            "margin": margins_B,
            "chosen_log_prob": log_probs_BS[:, 0],
            "rejected_log_prob": log_probs_BS[:, 1],
        }
        summed = lambda x_B: jnp.where(is_pair_B, x_B, 0.0).sum()  # noqa: E731
        return summed(losses_B), {name: summed(x_B) for name, x_B in metrics.items()}

    total, metrics = _differentiable(sums, readout, x_BTE, batch)
    if experts is not None:
        tokens_B = (batch["segment_ids"] > 0).sum(1, dtype=jnp.float32)
        balance = (experts.load / jnp.maximum(tokens_B, 1)).sum()
        total = total + coefficient * balance + experts.error.sum()
        metrics = {**metrics, "balance": balance}
    return total, is_pair_B.sum().astype(jnp.float32), metrics


def _differentiable(
    sums: Callable[[Array], tuple[Array, Metrics]],
    readout: Callable[[Array], Array] | None,
    x_BTE: Array,
    batch: dict[str, Array],
) -> tuple[Array, Metrics]:
    """`sums` of the log-probabilities; where logits are large, they are never all in memory.

    The total is then no sum over tokens, as a chunked loss is. Its gradient is that of one whose
    weights are the derivatives by the log-probabilities, which a first pass computes.
    """
    if readout is None or in_forward_mode() or _num_chunks(readout, x_BTE) == 1:
        return sums(_whole(readout, x_BTE, batch))
    log_probs_BS = jax.lax.stop_gradient(_whole(readout, x_BTE, batch, chunks=True))
    (total, metrics), slopes_BS = jax.value_and_grad(sums, has_aux=True)(log_probs_BS)
    weights_BT = -(slopes_BS[:, :, None] * _answers(batch)).sum(1)
    linear, _ = losses.readout_cross_entropy(
        readout, x_BTE, batch["targets"], jax.lax.stop_gradient(weights_BT)
    )
    stopped = jax.lax.stop_gradient((total - linear, metrics))
    return linear + stopped[0], stopped[1]


def _num_chunks(readout: Callable[[Array], Array], x_BTE: Array) -> int:
    return losses.num_chunks(jax.eval_shape(readout, x_BTE))


def _whole(
    readout: Callable[[Array], Array] | None,
    x_BTE: Array,
    batch: dict[str, Array],
    *,
    chunks: bool = False,
) -> Float[Array, "batch 2"]:
    """The log-probabilities; in `chunks` without a gradient."""
    if readout is None:
        of_tokens_BT = losses.token_losses(x_BTE, batch["targets"])
    elif chunks and (count := _num_chunks(readout, x_BTE)) > 1:
        of_tokens_BT = chunked_values(losses.token_losses, count, readout, x_BTE, batch["targets"])
    else:
        of_tokens_BT = losses.token_losses(readout(x_BTE), batch["targets"])
    answers_BST = _answers(batch)
    return -jnp.where(answers_BST > 0, answers_BST * of_tokens_BT[:, None], 0.0).sum(-1)


def _hidden(
    model: PyTree, batch: dict[str, Array], key: Array | None, *, balanced: bool
) -> tuple[Array, Callable[[Array], Array] | None, Balance | None]:
    """The head's input and the head, or logits and None, and the experts' balance if asked for."""
    options: Any = {name: batch[name] for name in ("segment_ids", "positions")} | {"key": key}
    if balanced:
        if not isinstance(model, HasBalance):
            raise ValueError(f"balance: a {type(model).__name__} has no experts; leave it at 0")
        x_BTE, balance = model.hidden_and_balance(batch["tokens"], **options)
        if balance is None:
            raise ValueError("balance: the model has no experts; leave it at 0")
        return x_BTE, model.readout(), balance
    if isinstance(model, HasReadout):
        return model.hidden(batch["tokens"], **options), model.readout(), None
    return model(batch["tokens"], **options), None, None


def _reference(model: PyTree, batch: dict[str, Array]) -> Array:
    """The log-probabilities under the model that the trained adapters stand on."""
    if not lora.has_trained_adapters(model):
        raise ValueError(
            "reference='base' is the frozen model under trained adapters, and the model has none: "
            "adapt it with zoo.lora.adapt, or give the batch a 'reference'"
        )
    return log_probabilities(jax.lax.stop_gradient(lora.base(model)), batch)


def _stored(batch: dict[str, Array]) -> Array:
    if "reference" not in batch:
        raise ValueError(
            f"the batch has {sorted(batch)}, and no 'reference': make the log-probabilities of the "
            "reference model ahead (PairPlan.with_reference), or train adapters with "
            "reference='base'"
        )
    return jax.lax.stop_gradient(batch["reference"].astype(jnp.float32))


def _check_batch(batch: dict[str, Array]) -> None:
    names = ("tokens", "targets", "weights", "segment_ids", "positions")
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"the batch has {sorted(batch)}, and no {missing[0]!r}: the loss takes "
            f"{', '.join(names)}, as PairPlan makes them"
        )


def _is_pair(batch: dict[str, Array]) -> Bool[Array, "batch"]:
    return (batch["segment_ids"] == 2).any(1)


def _answers(batch: dict[str, Array]) -> Float[Array, "batch 2 seq"]:
    """The weights of the answers' tokens: of the chosen ones, and of the rejected ones."""
    segments = jnp.asarray([[1], [2]], batch["segment_ids"].dtype)[None]
    is_side_BST = batch["segment_ids"][:, None] == segments
    return jnp.where(is_side_BST, batch["weights"][:, None], 0.0)


def _log_one_minus_exp(x: Array) -> Array:
    """log(1 - eˣ) of x < 0, accurate near 0 and far from it (Mächler 2012)."""
    near = x > -math.log(2)
    of_near = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
    return jnp.where(near, of_near, jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
