"""A mixture of experts in place of one MLP (Shazeer et al. 2017): each token goes to a few of many.

Token choice without a capacity: every token reaches the experts that its router ranks highest, and
none is dropped. Rows are sorted by expert and multiplied by `jax.lax.ragged_dot`. Experts lie on
the mesh axis of the logical axis "experts"; a device computes its tokens' share of its experts.
An axis that splits the batch too only stores them.

Legend of suffixes: B batch, T time, E embed, X experts, C a token's choices, R routed rows.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.nn.layers import normal
from zoo.nn.parameters import Operand
from zoo.nn.precision import matmul
from zoo.sharding import mesh_axes, partition_spec, spec_in_use


class MoE(eqx.Module):
    """Gated MLPs as experts, and the router that chooses among them."""

    router: Float[Array, "embed routes"] | Operand
    w_gate: Float[Array, "experts embed mlp"]
    w_up: Float[Array, "experts embed mlp"]
    w_down: Float[Array, "experts mlp embed"]
    experts_per_token: int = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        hidden_size: int,
        *,
        num_experts: int,
        experts_per_token: int,
        normalize: bool,
        activation: Callable[[Array], Array],
        num_layers: int,
        key: Key[Array, ""],
    ):
        router_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        self.router = normal(router_key, (size, num_experts), size)
        self.w_gate = normal(gate_key, (num_experts, size, hidden_size), size)
        self.w_up = normal(up_key, (num_experts, size, hidden_size), size)
        fan_in = hidden_size * 2 * num_layers
        self.w_down = normal(down_key, (num_experts, hidden_size, size), fan_in)
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.activation = activation

    def __call__(
        self, x_BTE: Float[Array, "batch seq embed"], counted_BT: Bool[Array, "#batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], Float[Array, "batch"]]:
        """The weighted sum of each token's experts, and each row's `load_balance`.

        `counted_BT` is False at padding, which counts for no balance.
        """
        logits_BTX = matmul(x_BTE, self.router, dtype=jnp.float32)
        probabilities_BTX = jax.nn.softmax(logits_BTX, axis=-1)
        weights_BTC, chosen_BTC = jax.lax.top_k(probabilities_BTX, self.experts_per_token)
        if self.normalize:
            weights_BTC = weights_BTC / weights_BTC.sum(-1, keepdims=True)
        y_BTE = _on_each_device(
            partial(_apply_experts, self.activation),
            (x_BTE, weights_BTC.astype(x_BTE.dtype), chosen_BTC),
            (self.w_gate, self.w_up, self.w_down),
        )
        return y_BTE, load_balance(probabilities_BTX, chosen_BTC, counted_BT)


def load_balance(
    probabilities_BTX: Float[Array, "batch seq experts"],
    chosen_BTC: Int[Array, "batch seq choices"],
    counted_BT: Bool[Array, "#batch seq"],
) -> Float[Array, "batch"]:
    """The load-balancing loss of each row, times its tokens: float32[batch].

    For each row, `tokens · experts · Σ f·p`, with f the share of its choices that an expert gets
    and p the expert's mean probability (Fedus et al. 2021, equations 4 to 6; per row as
    in DeepSeek-V3, 2024): `tokens` where it is even. A sum over rows, so that it does not depend
    on how a batch is cut.
    """
    num_experts, choices = probabilities_BTX.shape[-1], chosen_BTC.shape[-1]
    counted_BT1 = counted_BT.astype(jnp.float32)[:, :, None]
    tokens_B1 = jnp.broadcast_to(counted_BT1.sum(1), (probabilities_BTX.shape[0], 1))
    share = 1 / jnp.maximum(tokens_B1, 1.0)
    taken_BTX = jax.nn.one_hot(chosen_BTC, num_experts).sum(2)
    taken_BX = (taken_BTX * counted_BT1).sum(1) * share / choices
    likely_BX = (probabilities_BTX * counted_BT1).sum(1) * share
    return num_experts * (taken_BX * likely_BX).sum(-1) * tokens_B1[:, 0]


def _on_each_device(
    function: Callable[..., Array], activations: tuple[Array, ...], weights: tuple[Array, ...]
) -> Array:
    """Sum `function(first, *activations, *weights)` over each device's experts, from `first` on.

    XLA does not split a ragged product by itself. Each device has its rows of the activations.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(0, *activations, *weights)
    [rows] = partition_spec(["batch"], mesh)
    # As `gather` leaves them: "embed" is whole, and so is "mlp" where the experts are split.
    experts, hidden = spec_in_use(["experts", "mlp"], mesh)
    split = mesh_axes([experts, hidden])

    def local(activations: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
        # Typed as differing between devices from the start. JAX types what `argsort` gives as alike
        # on all of them; with arguments typed so too, the backward pass would sum gradients over
        # devices while the rows are still in the order of each.
        activations = jax.lax.pcast(activations, split, to="varying")
        weights = jax.lax.pcast(weights, mesh_axes([rows]), to="varying")
        index = jax.lax.axis_index(mesh_axes([experts])) if experts else 0
        result = function(index * weights[-1].shape[0], *activations, *weights)
        return jax.lax.psum(result, split) if split else result

    up, down = PartitionSpec(experts, None, hidden), PartitionSpec(experts, hidden, None)
    specs = ((PartitionSpec(rows),) * len(activations), (up, up, down))
    return jax.shard_map(local, in_specs=specs, out_specs=PartitionSpec(rows))(activations, weights)


def _apply_experts(
    activation: Callable[[Array], Array],
    first_expert: Int[Array, ""] | int,
    x_BTE: Float[Array, "batch seq embed"],
    weights_BTC: Float[Array, "batch seq choices"],
    chosen_BTC: Int[Array, "batch seq choices"],
    w_gate: Float[Array, "local_experts embed mlp"],
    w_up: Float[Array, "local_experts embed mlp"],
    w_down: Float[Array, "local_experts mlp embed"],
) -> Float[Array, "batch seq embed"]:
    """The weighted outputs of the experts from `first_expert` on, summed per token."""
    num_local, choices = w_gate.shape[0], chosen_BTC.shape[-1]
    expert_R = chosen_BTC.reshape(-1) - first_expert
    # Rows for the experts of other devices go behind all groups, and are computed by nobody here.
    expert_R = jnp.where((expert_R >= 0) & (expert_R < num_local), expert_R, num_local)
    order_R = jnp.argsort(expert_R)
    group_sizes = jnp.bincount(expert_R, length=num_local + 1)[:num_local].astype(jnp.int32)
    mine_R1 = (expert_R[order_R] < num_local)[:, None]
    rows_RE = x_BTE.reshape(-1, x_BTE.shape[-1])[order_R // choices]
    rows_RE = jnp.where(mine_R1, rows_RE, jnp.zeros_like(rows_RE))
    gate = jax.lax.ragged_dot(rows_RE, w_gate, group_sizes)
    hidden = activation(gate) * jax.lax.ragged_dot(rows_RE, w_up, group_sizes)
    y_RE = jax.lax.ragged_dot(hidden, w_down, group_sizes)
    y_RE = jnp.where(mine_R1, y_RE, jnp.zeros_like(y_RE))
    y_RE = y_RE * weights_BTC.reshape(-1)[order_R][:, None]
    # Back in the order of the tokens by a gather, which adds up in the same order every time.
    y_BTCE = y_RE[jnp.argsort(order_R)].reshape(*chosen_BTC.shape, x_BTE.shape[-1])
    return y_BTCE.astype(jnp.float32).sum(2).astype(x_BTE.dtype)
