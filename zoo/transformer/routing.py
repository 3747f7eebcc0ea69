"""A router's choice of experts for each token, and the balance of their load.

Legend of suffixes: B batch, T time, X experts, C a token's choices.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.nn.balancing import Balance

Scores = Literal["softmax", "sigmoid"]


class Route(NamedTuple):
    """Each token's experts, their scores, and the scores of all as probabilities."""

    weights: Float[Array, "batch seq choices"]
    chosen: Int[Array, "batch seq choices"]
    probabilities: Float[Array, "batch seq experts"]


def route(
    logits_BTX: Float[Array, "batch seq experts"],
    bias_X: Float[Array, "experts"] | None,
    choices: int,
    scores: Scores,
) -> Route:
    """The experts of the highest scores, by a softmax or a sigmoid.

    A bias is added for the choice alone, not to the scores (DeepSeek-V3, 2024, equation 16).
    """
    softmax = scores == "softmax"
    scores_BTX = jax.nn.softmax(logits_BTX) if softmax else jax.nn.sigmoid(logits_BTX)
    if bias_X is None:
        weights_BTC, chosen_BTC = jax.lax.top_k(scores_BTX, choices)
    else:
        _, chosen_BTC = jax.lax.top_k(
            jax.lax.stop_gradient(scores_BTX + bias_X[None, None]), choices
        )
        weights_BTC = jnp.take_along_axis(scores_BTX, chosen_BTC, axis=-1)
    if not softmax:
        scores_BTX = scores_BTX / scores_BTX.sum(-1, keepdims=True)
    return Route(weights_BTC, chosen_BTC, scores_BTX)


def balance(
    logits_BTX: Float[Array, "batch seq experts"],
    bias_X: Float[Array, "experts"] | None,
    route: Route,
    weights_BT: Float[Array, "#batch seq"],
) -> Balance:
    """The weighted sums over each row's tokens that a loss may take."""
    z_BT = jnp.square(jax.nn.logsumexp(logits_BTX, axis=-1))
    z_B = (z_BT * weights_BT).sum(1)
    error_B = jnp.zeros_like(z_B)
    if bias_X is not None:
        num_experts, choices = logits_BTX.shape[-1], route.chosen.shape[-1]
        taken_BTX = jax.nn.one_hot(route.chosen, num_experts).sum(2) - choices / num_experts
        above_BX = (taken_BTX * weights_BT[:, :, None]).sum(1)
        error_B = (above_BX * (bias_X - jax.lax.stop_gradient(bias_X))[None]).sum(-1)
    return Balance(load_balance(route.probabilities, route.chosen, weights_BT), z_B, error_B)


def load_balance(
    probabilities_BTX: Float[Array, "batch seq experts"],
    chosen_BTC: Int[Array, "batch seq choices"],
    weights_BT: Float[Array, "#batch seq"],
) -> Float[Array, "batch"]:
    """The load-balancing loss of each row, times the weight of its tokens: float32[batch].

    For each row, `weight · experts · Σ f·p`, with f the share of its choices that an expert gets
    and p the expert's mean probability (Fedus et al. 2021, equations 4 to 6; per row as
    in DeepSeek-V3, 2024), both weighted: `weight` where it is even. A sum over rows, so that it
    does not depend on how a batch is cut.
    """
    num_experts, choices = probabilities_BTX.shape[-1], chosen_BTC.shape[-1]
    weights_BT1 = weights_BT[:, :, None]
    weight_B1 = jnp.broadcast_to(weights_BT1.sum(1), (probabilities_BTX.shape[0], 1))
    share = 1 / jnp.where(weight_B1 > 0, weight_B1, 1.0)
    taken_BTX = jax.nn.one_hot(chosen_BTC, num_experts).sum(2)
    taken_BX = (taken_BTX * weights_BT1).sum(1) * share / choices
    likely_BX = (probabilities_BTX * weights_BT1).sum(1) * share
    return num_experts * (taken_BX * likely_BX).sum(-1) * weight_B1[:, 0]
