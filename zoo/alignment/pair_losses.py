"""Losses of preferences: DPO, IPO and APO, ORPO and SimPO without a reference model, and KTO.

A batch is a `zoo.alignment.pairs.PairDataset`'s: a pair per row, the chosen example as segment 1
and the rejected one as segment 2, with weights on the tokens of the answers. A loss is a sum over
pairs, with their number as its weight.

Legend of suffixes: B batch, T time, E embed, S sides (chosen, rejected).
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from zoo import sharding
from zoo.alignment import scoring
from zoo.alignment.scoring import Metrics
from zoo.common.configuration import require
from zoo.training import losses
from zoo.training.loss_values import LossFunction

Reference = Literal["batch", "base"]
Batch = dict[str, Array]
# From the log-probabilities of both sides, less the reference's where there is one, float32[batch,
# 2], and the batch, to the losses of pairs, and metrics of pairs, the margin of rewards among them.
OfPairs = Callable[[Array, Batch], tuple[Array, Metrics]]


def dpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference: Reference = "batch",
) -> LossFunction:
    """Direct preference optimisation (Rafailov et al. 2023), as `make_train_step` takes it.

    The loss of a pair is -log σ(m), of the margin m = beta · (log π(chosen)/π₀(chosen) -
    log π(rejected)/π₀(rejected)) of its rewards; smoothed, (1 - s) · -log σ(m) + s · -log σ(-m),
    where a share s of the labels is wrong. The log-probabilities under the reference π₀ are the
    batch's `reference`, float32[batch, 2], chosen and rejected; or, with reference "base", those
    of the frozen model under the trained adapters, of which there is no copy.

    The metrics are means over pairs: `accuracy`, the share whose margin is positive, `margin`,
    `chosen_log_prob` and `rejected_log_prob`, in nats per answer.

    Raises:
        ValueError: `beta` is not positive, `label_smoothing` not in [0, 0.5); at a call, a batch
            without `reference`, or a model without adapters.
    """
    check(beta, label_smoothing)

    def of(ratios_BS: Array, batch: Batch) -> tuple[Array, Metrics]:
        margins_B = beta * (ratios_BS[:, 0] - ratios_BS[:, 1])
        right, wrong = jax.nn.log_sigmoid(margins_B), jax.nn.log_sigmoid(-margins_B)
        return -(1 - label_smoothing) * right - label_smoothing * wrong, {"margin": margins_B}

    return _loss(of, reference)


def ipo(*, beta: float = 0.1, reference: Reference = "batch") -> LossFunction:
    """Identity preference optimisation (Azar et al. 2024), with the options and metrics of `dpo`.

    The loss of a pair is (m - 1 / (2 · beta))², of the margin m = log π(chosen)/π₀(chosen) -
    log π(rejected)/π₀(rejected), each per token of its answer, as in TRL: it is not driven beyond
    a margin.

    Raises:
        ValueError: as for `dpo`.
    """
    check(beta)

    def of(ratios_BS: Array, batch: Batch) -> tuple[Array, Metrics]:
        mean_BS = ratios_BS / _counts(batch)
        margins_B = mean_BS[:, 0] - mean_BS[:, 1]
        return (margins_B - 1 / (2 * beta)) ** 2, {"margin": margins_B}

    return _loss(of, reference)


def apo(
    kind: Literal["zero", "down"], *, beta: float = 0.1, reference: Reference = "batch"
) -> LossFunction:
    """Anchored preference optimisation (D'Oosterlinck et al. 2024), as `dpo`.

    With the rewards r = beta · log π/π₀ of both answers the loss of a pair is, of kind "zero",
    σ(-r(chosen)) + σ(r(rejected)), for answers of which the chosen one is better than the model's;
    and of kind "down" σ(r(chosen)) + σ(r(rejected) - r(chosen)), for answers that are both worse.

    Raises:
        ValueError: an unknown kind, or as for `dpo`.
    """
    check(beta)
    require(kind in ("zero", "down"), f"kind={kind!r}: choose 'zero' or 'down'")

    def of(ratios_BS: Array, batch: Batch) -> tuple[Array, Metrics]:
        chosen_B, rejected_B = beta * ratios_BS[:, 0], beta * ratios_BS[:, 1]
        margins_B = chosen_B - rejected_B
        if kind == "zero":
            return jax.nn.sigmoid(-chosen_B) + jax.nn.sigmoid(rejected_B), {"margin": margins_B}
        return jax.nn.sigmoid(chosen_B) + jax.nn.sigmoid(-margins_B), {"margin": margins_B}

    return _loss(of, reference)


def simpo(*, beta: float = 2.0, gamma: float = 0.5) -> LossFunction:
    """Simple preference optimisation (Meng et al. 2024), as `make_train_step` takes it.

    The loss of a pair is -log σ(m), where the margin m = beta · (log p(chosen) - log p(rejected)) -
    gamma has the probabilities p per token. There is no reference model. The metrics are `dpo`'s.

    Raises:
        ValueError: `beta` is not positive, or `gamma` negative.
    """
    check(beta)
    require(gamma >= 0, f"gamma={gamma}: must not be negative; it is how far apart answers are")

    def of(log_probs_BS: Array, batch: Batch) -> tuple[Array, Metrics]:
        mean_BS = log_probs_BS / _counts(batch)
        margins_B = beta * (mean_BS[:, 0] - mean_BS[:, 1]) - gamma
        return -jax.nn.log_sigmoid(margins_B), {"margin": margins_B}

    return _loss(of)


def orpo(*, beta: float = 0.1) -> LossFunction:
    """Odds-ratio preference optimisation (Hong et al. 2024), as `make_train_step` takes it.

    With p an answer's probability per token, its geometric mean, the loss of a pair is
    -log p(chosen) - beta · log σ(m), where the margin m is the logarithm of the ratio of the odds
    p/(1 - p) of both answers. There is no reference model. The metrics are `dpo`'s.

    Raises:
        ValueError: `beta` is not positive.
    """
    check(beta)

    def of(log_probs_BS: Array, batch: Batch) -> tuple[Array, Metrics]:
        mean_BS = jnp.minimum(log_probs_BS / _counts(batch), -1e-6)  # p < 1
        odds_BS = mean_BS - _log_one_minus_exp(mean_BS)
        margins_B = odds_BS[:, 0] - odds_BS[:, 1]
        return -mean_BS[:, 0] - beta * jax.nn.log_sigmoid(margins_B), {"margin": margins_B}

    return _loss(of)


def kto(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference: Reference = "batch",
) -> LossFunction:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024), of single answers that are labelled.

    A row has an example as segment 1, its prompt with the answer to another one as segment 2, and
    in `labels`, int32[batch], 1 where the answer is desirable, or 0. With z, the mean of log π/π₀
    over the second segments of the whole batch, 0 if that is negative, and no gradient, the loss of
    an example is weight · σ(-m), with the margin m = beta · (log π/π₀ - z) for a desirable answer,
    and its opposite for another one. Options and metrics are `dpo`'s, with `kl`, which is z, and
    `log_prob` and `mismatched_log_prob` of the segments.

    As the batch has one z, a step takes it whole: it refuses `accumulate`.

    Raises:
        ValueError: as for `dpo`; a weight is negative; at a call, a batch without `labels`.
    """
    check(beta)
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    for name, x in weights.items():
        require(x >= 0, f"{name}={x}: must not be negative; 1 is the loss as it is")

    def of(ratios_BS: Array, batch: Batch) -> tuple[Array, Metrics]:
        losses.check_names(batch, "labels")
        count = jnp.maximum(is_pair(batch).sum().astype(jnp.float32), 1)
        kl = jax.lax.stop_gradient(jnp.maximum(ratios_BS[:, 1].sum() / count, 0.0))
        is_good_B, above_B = batch["labels"] == 1, beta * (ratios_BS[:, 0] - kl)
        margins_B = jnp.where(is_good_B, above_B, -above_B)
        weights_B = jnp.where(is_good_B, desirable_weight, undesirable_weight)
        metrics = {"margin": margins_B, "kl": jnp.broadcast_to(kl, margins_B.shape)}
        return weights_B * jax.nn.sigmoid(-margins_B), metrics

    return losses.of_whole_batch(_loss(of, reference, ("log_prob", "mismatched_log_prob")))


def check(beta: float, label_smoothing: float = 0.0) -> None:
    """Raise a ValueError for numbers out of their range."""
    require(beta > 0, f"beta={beta}: must be positive, as 0.1")
    require(
        0 <= label_smoothing < 0.5,
        f"label_smoothing={label_smoothing}: must be in [0, 0.5), the share of wrong labels",
    )


def _loss(
    of: OfPairs,
    reference: Reference | None = None,
    sides: tuple[str, str] = ("chosen_log_prob", "rejected_log_prob"),
) -> LossFunction:
    require(reference in ("batch", "base", None), f"reference={reference!r}: choose batch or base")

    @losses.OF_TOKENS
    def loss(model: PyTree, batch: Batch, key: Array | None) -> tuple[Array, Array, Metrics]:
        losses.check_names(batch, "tokens", "targets", "weights", "segment_ids", "positions")
        if reference == "batch" and "reference" not in batch:
            raise ValueError(
                f"the batch has {sorted(batch)}, and no 'reference': make the log-probabilities of "
                "the reference model ahead (PairDataset.with_reference), or train adapters with "
                "reference='base'"
            )
        is_pair_B = is_pair(batch)
        readout, x_BTE = losses.readout_and_input(model, batch, key)
        reference_BS = jnp.float32(0)
        if reference == "base":
            reference_BS = _of_answers(scoring.of_base(model, batch, "reference='base'"), batch)
        elif reference == "batch":
            reference_BS = jax.lax.stop_gradient(batch["reference"].astype(jnp.float32))

        def sums(log_probs_BT: Array) -> tuple[Array, Metrics]:
            log_probs_BS = _of_answers(log_probs_BT, batch)
            losses_B, metrics = of(log_probs_BS - reference_BS, batch)
            metrics["accuracy"] = (metrics["margin"] > 0).astype(jnp.float32)
            metrics |= dict(zip(sides, log_probs_BS.T, strict=True))
            summed = lambda x_B: jnp.where(is_pair_B, x_B, 0.0).sum()  # noqa: E731
            return summed(losses_B), {name: summed(x_B) for name, x_B in metrics.items()}

        total, metrics = scoring.differentiable(sums, readout, x_BTE, batch["targets"])
        return total, is_pair_B.sum().astype(jnp.float32), metrics

    return losses.keeps_dtype("reference")(loss) if reference == "batch" else loss


def log_probabilities(model: PyTree, batch: Batch) -> Float[Array, "batch 2"]:
    """The log-probability of each answer of a batch in nats, without dropout or a gradient."""
    return _of_answers(scoring.of_tokens(model, batch), batch)


@losses.OF_TOKENS
def reference_values(
    model: PyTree, batch: Batch, key: Array | None
) -> tuple[Array, Array, Metrics]:
    """No loss, and `log_probabilities` as a metric `reference`, for `make_eval_step`."""
    weight = is_pair(batch).sum().astype(jnp.float32)
    # On every device, as every process reads it.
    of_pairs = sharding.constrain(log_probabilities(model, batch), None, None)
    return jnp.float32(0), weight, {"reference": of_pairs}


def is_pair(batch: Batch) -> Bool[Array, "batch"]:
    """Whether a row has a pair."""
    return (batch["segment_ids"] == 2).any(1)


def _of_answers(log_probs_BT: Array, batch: Batch) -> Float[Array, "batch 2"]:
    answers_BST = _answers(batch)
    return jnp.where(answers_BST > 0, answers_BST * log_probs_BT[:, None], 0.0).sum(-1)


def _counts(batch: Batch) -> Float[Array, "batch 2"]:
    """The numbers of the answers' tokens; 1 for no answer."""
    return jnp.maximum(_answers(batch).sum(-1), 1)


def _answers(batch: Batch) -> Float[Array, "batch 2 seq"]:
    """The weights of the answers' tokens: of the chosen ones, and of the rejected ones."""
    segments = jnp.asarray([[1], [2]], batch["segment_ids"].dtype)[None]
    is_side_BST = batch["segment_ids"][:, None] == segments
    return jnp.where(is_side_BST, batch["weights"][:, None], 0.0)


def _log_one_minus_exp(x: Array) -> Array:
    """log(1 - eˣ) for x < 0, accurate near 0 and far from it (Mächler 2012)."""
    near = x > -math.log(2)
    of_near = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
    return jnp.where(near, of_near, jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
