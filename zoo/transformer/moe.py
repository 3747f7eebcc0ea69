"""A mixture of experts in place of one MLP (Shazeer et al. 2017): each token goes to a few of many.

Token choice without a capacity: every token reaches the experts that its router ranks highest, and
none is dropped. How tokens reach experts on other devices is in `zoo.transformer.dispatch`.

Legend of suffixes: B batch, T time, E embed, X experts, C a token's choices, R routed rows.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.grouped_products import grouped_product
from zoo.nn.layers import add_bias, gated, normal
from zoo.nn.products import Operand, matmul
from zoo.nn.stateful import Balance, LoadBias
from zoo.transformer.config import Config
from zoo.transformer.dispatch import Routed, apply_experts
from zoo.transformer.part_configs import ExpertsConfig


class MoE(eqx.Module):
    """Gated MLPs as experts, and the router that chooses among them."""

    router: Float[Array, "embed routes"] | Operand
    w_gate: Float[Array, "experts embed mlp"]
    w_up: Float[Array, "experts embed mlp"]
    w_down: Float[Array, "experts mlp embed"]
    b_router: Float[Array, "routes"] | None
    b_gate: Float[Array, "experts mlp"] | None
    b_up: Float[Array, "experts mlp"] | None
    b_down: Float[Array, "experts embed"] | None
    bias: LoadBias | None
    kind: str = eqx.field(static=True)
    config: ExpertsConfig = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        size, hidden_size = config.d_model, config.hidden_size
        num_experts, rate = config.experts.num_experts, config.experts.bias_rate
        assert num_experts is not None
        router_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        self.router = normal(router_key, (size, num_experts), size)
        self.w_gate = normal(gate_key, (num_experts, size, hidden_size), size)
        self.w_up = normal(up_key, (num_experts, size, hidden_size), size)
        fan_in = hidden_size * config.num_parts
        self.w_down = normal(down_key, (num_experts, hidden_size, size), fan_in)
        zeros = lambda *shape: jnp.zeros(shape) if config.bias or config.mlp_bias else None  # noqa: E731
        self.b_router, self.b_down = zeros(num_experts), zeros(num_experts, size)
        self.b_gate, self.b_up = (zeros(num_experts, hidden_size) for _ in range(2))
        self.bias = None if rate is None else LoadBias(jnp.zeros(num_experts), rate)
        self.kind, self.config = config.mlp, config.experts

    def __call__(
        self, x_BTE: Float[Array, "batch seq embed"], weights_BT: Float[Array, "#batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], Balance]:
        """The weighted sum of each token's experts, and each row's `Balance`.

        `weights_BT` weight the positions in the balance, 0 at padding.
        """
        logits_BTX = add_bias(matmul(x_BTE, self.router, dtype=jnp.float32), self.b_router)
        bias_X = None if self.bias is None else self.bias.value
        config = self.config
        chosen = route(logits_BTX, bias_X, config)
        weights_BTC = chosen.weights
        if config.normalize:
            weights_BTC = weights_BTC / weights_BTC.sum(-1, keepdims=True)
        if config.scale != 1:
            weights_BTC = weights_BTC * config.scale
        biases = () if self.b_gate is None or self.b_up is None else (self.b_gate, self.b_up)
        y_BTE = apply_experts(
            partial(_gated_mlps, self.kind),
            Routed(x_BTE, weights_BTC.astype(x_BTE.dtype), chosen.chosen),
            (self.w_gate, self.w_up, self.w_down, *biases),
            dispatch=config.dispatch,
            buffer=config.buffer,
        )
        if self.b_down is not None:  # not in the products, which devices may have in parts
            taken_BTCX = jax.nn.one_hot(chosen.chosen, len(self.b_down))
            taken_BTX = (taken_BTCX * weights_BTC[..., None]).sum(2).astype(x_BTE.dtype)
            y_BTE = y_BTE + matmul(taken_BTX, self.b_down)
        return y_BTE, balance(logits_BTX, bias_X, chosen, weights_BT)


def _gated_mlps(
    kind: str,
    rows_RE: Float[Array, "rows embed"],
    w_gate: Float[Array, "local_experts embed mlp"],
    w_up: Float[Array, "local_experts embed mlp"],
    w_down: Float[Array, "local_experts mlp embed"],
    *biases_and_sizes: Array,
) -> Float[Array, "rows embed"]:
    """Each row through its expert's MLP: rows in the order of the experts, as many as sizes say."""
    *biases, sizes_X = biases_and_sizes
    gate = grouped_product(rows_RE, w_gate, sizes_X)
    up = grouped_product(rows_RE, w_up, sizes_X)
    if biases:
        gate, up = (_biased(x, b, sizes_X) for x, b in zip((gate, up), biases, strict=True))
    return grouped_product(gated(kind, gate, up), w_down, sizes_X)


def _biased(
    x_RM: Float[Array, "rows mlp"],
    b_XM: Float[Array, "local_experts mlp"],
    sizes_X: Int[Array, "local_experts"],
) -> Float[Array, "rows mlp"]:
    """Each row plus the bias of its expert, in fp32; rows behind all groups stay what they are."""
    num_rows, index_X = len(x_RM), jnp.arange(len(b_XM), dtype=jnp.int32)
    expert_R = jnp.repeat(index_X, sizes_X, total_repeat_length=num_rows)
    bias_RM = b_XM.astype(jnp.float32).at[expert_R].get(indices_are_sorted=True)
    is_in_R1 = (jnp.arange(num_rows) < sizes_X.sum())[:, None]
    return (x_RM.astype(jnp.float32) + jnp.where(is_in_R1, bias_RM, 0.0)).astype(x_RM.dtype)


class Route(NamedTuple):
    """Each token's experts, their scores, and the scores of all as probabilities."""

    weights: Float[Array, "batch seq choices"]
    chosen: Int[Array, "batch seq choices"]
    probabilities: Float[Array, "batch seq experts"]


def route(
    logits_BTX: Float[Array, "batch seq experts"],
    bias_X: Float[Array, "experts"] | None,
    config: ExpertsConfig,
) -> Route:
    """The experts of the highest scores, by a softmax or a sigmoid, and of the best groups.

    A bias is added for the choice only, not to the scores (DeepSeek-V3, 2024, equation 16).
    """
    softmax = config.router == "softmax"
    scores_BTX = jax.nn.softmax(logits_BTX) if softmax else jax.nn.sigmoid(logits_BTX)
    if bias_X is None and config.num_groups == 1:
        weights_BTC, chosen_BTC = jax.lax.top_k(scores_BTX, config.per_token)
    else:
        rank_BTX = scores_BTX if bias_X is None else scores_BTX + bias_X[None, None]
        if config.num_groups > 1:
            rank_BTX = _in_groups(rank_BTX, config)
        _, chosen_BTC = jax.lax.top_k(jax.lax.stop_gradient(rank_BTX), config.per_token)
        weights_BTC = jnp.take_along_axis(scores_BTX, chosen_BTC, axis=-1)
    if not softmax:
        scores_BTX = scores_BTX / scores_BTX.sum(-1, keepdims=True)
    return Route(weights_BTC, chosen_BTC, scores_BTX)


def _in_groups(
    rank_BTX: Float[Array, "batch seq experts"], config: ExpertsConfig
) -> Float[Array, "batch seq experts"]:
    """The scores, lowest outside of the groups whose best experts have the highest sums."""
    rank_BTGX = rank_BTX.reshape(*rank_BTX.shape[:2], config.num_groups, -1)
    of_groups_BTG = jax.lax.top_k(rank_BTGX, config.group_score)[0].sum(-1)
    _, chosen = jax.lax.top_k(of_groups_BTG, config.groups_per_token)
    is_chosen_BTG = jax.nn.one_hot(chosen, config.num_groups).sum(2) > 0
    return jnp.where(is_chosen_BTG[..., None], rank_BTGX, -jnp.inf).reshape(rank_BTX.shape)


def balance(
    logits_BTX: Float[Array, "batch seq experts"],
    bias_X: Float[Array, "experts"] | None,
    route: Route,
    weights_BT: Float[Array, "#batch seq"],
) -> Balance:
    """The weighted sums over each row's tokens that a loss may take.

    The load of a row is `weight · experts · Σ f·p`, with f the share of its choices that an expert
    gets and p the expert's mean probability (Fedus et al. 2021, equations 4 to 6; per row as in
    DeepSeek-V3, 2024), both weighted: `weight` where the load is even. As a sum over rows it does
    not depend on how a batch is cut.
    """
    num_experts, choices = logits_BTX.shape[-1], route.chosen.shape[-1]
    z_BT = jnp.square(jax.nn.logsumexp(logits_BTX, axis=-1))
    z_B = (z_BT * weights_BT).sum(1)
    weights_BT1 = weights_BT[:, :, None]
    taken_BTX = jax.nn.one_hot(route.chosen, num_experts).sum(2)
    error_B = jnp.zeros_like(z_B)
    if bias_X is not None:
        above_BX = ((taken_BTX - choices / num_experts) * weights_BT1).sum(1)
        error_B = (above_BX * (bias_X - jax.lax.stop_gradient(bias_X))[None]).sum(-1)
    weight_B1 = jnp.broadcast_to(weights_BT1.sum(1), (len(logits_BTX), 1))
    share = 1 / jnp.where(weight_B1 > 0, weight_B1, 1.0)
    taken_BX = (taken_BTX * weights_BT1).sum(1) * share / choices
    likely_BX = (route.probabilities * weights_BT1).sum(1) * share
    load_B = num_experts * (taken_BX * likely_BX).sum(-1) * weight_B1[:, 0]
    return Balance(load_B, z_B, error_B)
