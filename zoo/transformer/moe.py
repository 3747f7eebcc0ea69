"""A mixture of experts in place of one MLP (Shazeer et al. 2017): each token goes to a few of many.

Token choice without a capacity: every token reaches the experts that its router ranks highest, and
none is dropped. How tokens reach experts on other devices is in `zoo.transformer.dispatch`.

Legend of suffixes: B batch, T time, E embed, X experts, C a token's choices, R routed rows.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.balancing import Balance, LoadBias
from zoo.nn.grouped_products import grouped_product
from zoo.nn.layers import normal
from zoo.nn.products import Operand, matmul
from zoo.transformer import routing
from zoo.transformer.config import ExpertsConfig
from zoo.transformer.dispatch import Routed, apply_experts
from zoo.transformer.routing import load_balance as load_balance


class MoE(eqx.Module):
    """Gated MLPs as experts, and the router that chooses among them."""

    router: Float[Array, "embed routes"] | Operand
    w_gate: Float[Array, "experts embed mlp"]
    w_up: Float[Array, "experts embed mlp"]
    w_down: Float[Array, "experts mlp embed"]
    bias: LoadBias | None
    activation: Callable[[Array], Array] = eqx.field(static=True)
    config: ExpertsConfig = eqx.field(static=True)

    def __init__(
        self,
        config: ExpertsConfig,
        size: int,
        hidden_size: int,
        *,
        activation: Callable[[Array], Array],
        num_layers: int,
        key: Key[Array, ""],
    ):
        num_experts, rate = config.num_experts, config.bias_rate
        assert num_experts is not None
        router_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        self.router = normal(router_key, (size, num_experts), size)
        self.w_gate = normal(gate_key, (num_experts, size, hidden_size), size)
        self.w_up = normal(up_key, (num_experts, size, hidden_size), size)
        fan_in = hidden_size * 2 * num_layers
        self.w_down = normal(down_key, (num_experts, hidden_size, size), fan_in)
        self.bias = None if rate is None else LoadBias(jnp.zeros(num_experts), rate)
        self.activation, self.config = activation, config

    def __call__(
        self, x_BTE: Float[Array, "batch seq embed"], weights_BT: Float[Array, "#batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], Balance]:
        """The weighted sum of each token's experts, and each row's `Balance`.

        `weights_BT` are those of positions in the balance, 0 at padding.
        """
        logits_BTX = matmul(x_BTE, self.router, dtype=jnp.float32)
        bias_X = None if self.bias is None else self.bias.value
        config = self.config
        route = routing.route(logits_BTX, bias_X, config.per_token, config.router)
        weights_BTC = route.weights
        if config.normalize:
            weights_BTC = weights_BTC / weights_BTC.sum(-1, keepdims=True)
        if config.scale != 1:
            weights_BTC = weights_BTC * config.scale
        y_BTE = apply_experts(
            partial(_gated_mlps, self.activation),
            Routed(x_BTE, weights_BTC.astype(x_BTE.dtype), route.chosen),
            (self.w_gate, self.w_up, self.w_down),
            dispatch=config.dispatch,
            buffer=config.buffer,
        )
        return y_BTE, routing.balance(logits_BTX, bias_X, route, weights_BT)


def _gated_mlps(
    activation: Callable[[Array], Array],
    rows_RE: Float[Array, "rows embed"],
    w_gate: Float[Array, "local_experts embed mlp"],
    w_up: Float[Array, "local_experts embed mlp"],
    w_down: Float[Array, "local_experts mlp embed"],
    sizes_X: Int[Array, "local_experts"],
) -> Float[Array, "rows embed"]:
    """Each row by the expert that it is for, in whose order they are."""
    gate = grouped_product(rows_RE, w_gate, sizes_X)
    hidden = activation(gate) * grouped_product(rows_RE, w_up, sizes_X)
    return grouped_product(hidden, w_down, sizes_X)
