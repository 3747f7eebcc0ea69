"""Losses as sums with their weights, so that a gradient does not depend on how a batch is cut.

Legend of suffixes: B batch, T time, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree


@jax.custom_vjp
def _token_losses(logits: Array, targets: Array) -> Array:
    return _token_losses_forward(logits, targets)[0]


def _is_target(logits: Array, targets: Array) -> Array:
    # A comparison, not a gather: with the vocabulary sharded it stays local, and it fuses.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def _token_losses_forward(logits: Array, targets: Array) -> tuple[Array, tuple]:
    logits32 = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(logits32.max(-1, keepdims=True))
    log_sum = jnp.log(jnp.exp(logits32 - top).sum(-1)) + top[..., 0]
    target_logit = jnp.where(_is_target(logits, targets), logits32, 0.0).sum(-1)
    return log_sum - target_logit, (logits, targets, log_sum)


def _token_losses_backward(residuals: tuple, g: Array) -> tuple[Array, None]:
    logits, targets, log_sum = residuals
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    one_hot = _is_target(logits, targets).astype(jnp.float32)
    # Where nothing depends on the loss, logits that are not finite are no matter.
    gradient = jnp.where(g[..., None] == 0, 0.0, (probabilities - one_hot) * g[..., None])
    return gradient.astype(logits.dtype), None


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted cross-entropy in nats, reduced in fp32: the summed loss and the summed weight.

    With the vocabulary sharded over a mesh axis, only scalars a token cross the network.
    A position of weight 0 counts nothing, whatever its logits and target are.
    """
    losses = jnp.where(weights > 0, _token_losses(logits, targets), 0.0)
    return (losses * weights).sum(), weights.sum()


def next_token(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, dict[str, Array]]:
    """The loss of a language model on a token batch, as `make_train_step` takes it.

    The batch holds `tokens` and `targets`, int32[batch, seq], and `weights`, float32[batch, seq];
    for packed rows also `segment_ids` and `positions`, int32[batch, seq].
    """
    logits = model(
        batch["tokens"],
        segment_ids=batch.get("segment_ids"),
        positions=batch.get("positions"),
        key=key,
    )
    total, weight = cross_entropy(logits, batch["targets"], batch["weights"])
    return total, weight, {}


def balanced_next_token(coefficient: float) -> Callable[..., tuple[Array, Array, dict[str, Array]]]:
    """`next_token` for a mixture of experts: plus `coefficient` times its uneven load.

    `balance` among the metrics is the mean `moe.load_balance` a token: 1 where experts share alike.
    """

    def loss(
        model: PyTree, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        x_BTE, balance_B = model.hidden_and_balance(
            batch["tokens"],
            segment_ids=batch.get("segment_ids"),
            positions=batch.get("positions"),
            key=key,
        )
        logits = model.logits(x_BTE)
        total, weight = cross_entropy(logits, batch["targets"], batch["weights"])
        if balance_B is None:
            raise ValueError("balanced_next_token: the model has no experts; set num_experts")
        balance = balance_B.sum()
        return total + coefficient * balance, weight, {"balance": balance}

    return loss


def classification(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, dict[str, Array]]:
    """The loss and the accuracy of a classifier, as `make_train_step` takes it.

    The batch holds `inputs`, [batch, …], as the model takes them, `labels`, int32[batch], and
    `weights`, float32[batch]; for rows of tokens also their `mask`, bool[batch, seq].
    """
    logits = class_logits(model, batch, key)
    total, weight = cross_entropy(logits, batch["labels"], batch["weights"])
    right = logits.argmax(-1) == batch["labels"]
    return total, weight, {"accuracy": jnp.where(right, batch["weights"], 0.0).sum()}


def class_logits(model: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
    """A classifier's logits, float32[…, batch, classes], for a batch with or without a mask."""
    masks = {"mask": batch["mask"]} if "mask" in batch else {}
    return model(batch["inputs"], key=key, **masks)
