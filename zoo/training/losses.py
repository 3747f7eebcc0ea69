"""Losses as sums with their weights, so that a gradient does not depend on the microbatches.

Legend of suffixes: B batch, T time, E embed, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from zoo import sharding
from zoo.nn.derivatives import custom_vjp
from zoo.nn.protocols import HasBalance, HasReadout
from zoo.training.chunked_loss import chunked

Function = TypeVar("Function", bound=Callable[..., Any])

# Most bytes of a device's logits in fp32 that are in memory at once.
LOGITS_BYTES = 2**29


def keeps_dtype(*names: str | int) -> Callable[[Function], Function]:
    """A decorator of a loss: its step leaves these entries of a batch in the dtype that they have.

    They are keys of a dict, fields, or indices of a tuple. For a model that is none of the zoo's, a
    step casts the other floating-point entries to its precision, but for `zoo.nn.precision.KEPT`:
    weights, labels and targets, in the singular too.
    """

    def decorate(loss_fn: Function) -> Function:
        setattr(loss_fn, "keeps_dtype", names)  # noqa: B010
        return loss_fn

    return decorate


@custom_vjp
def _token_losses(logits: Array, targets: Array) -> Array:
    return _token_losses_forward(logits, targets)[0]


def _is_target(logits: Array, targets: Array) -> Array:
    # A comparison, not a gather: with the vocabulary sharded it stays local, and it fuses.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def _token_losses_forward(logits: Array, targets: Array) -> tuple[Array, tuple]:
    logits32 = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(logits32.max(-1, keepdims=True))  # as in attention
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
    weights: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Weighted cross-entropy in nats, reduced in fp32: the summed loss and the summed weight.

    With the vocabulary sharded over a mesh axis, only scalars per token cross the network.
    A position of weight 0 counts nothing, whatever its logits and target are. With weights
    [*batch, sources] the sums are those of each source, [sources].
    """
    if weights.ndim > targets.ndim:
        losses = jnp.where(weights.any(-1), _token_losses(logits, targets), 0.0)
        axes = tuple(range(targets.ndim))
        return (losses[..., None] * weights).sum(axes), weights.sum(axes)
    losses = jnp.where(weights > 0, _token_losses(logits, targets), 0.0)
    return (losses * weights).sum(), weights.sum()


def readout_cross_entropy(
    readout: Callable[[Array], Array],
    x_BTE: Float[Array, "batch seq embed"],
    targets_BT: Int[Array, "batch seq"],
    weights_BT: Float[Array, "batch seq *sources"],
) -> tuple[Float[Array, "*sources"], Float[Array, "*sources"]]:
    """`cross_entropy` of the logits `readout(x_BTE)`, one stretch of time after another.

    Where a device's logits in fp32 would take more than `LOGITS_BYTES`, no more of them than that
    is ever in memory, forward or backward. For that the gradient is computed in the forward pass,
    at no additional product; in fp16 in the backward pass, at one more. `readout` is a
    `zoo.nn.readout.Readout`, or a module like it.
    """
    batch, seq, _ = x_BTE.shape
    vocab = jax.eval_shape(readout, x_BTE).shape[-1]
    held = 4 * batch * seq * vocab // sharding.num_parts("batch", "inner_seq", "vocab")
    count = next(
        n for n in range(1, seq + 1) if seq % n == 0 and (held <= LOGITS_BYTES * n or n == seq)
    )
    if count == 1:
        return cross_entropy(readout(x_BTE), targets_BT, weights_BT)
    total = chunked(cross_entropy, count, readout, x_BTE, targets_BT, weights_BT)
    return total, weights_BT.sum((0, 1))


def per_source(
    loss_fn: Callable[..., tuple[Any, ...]], names: Sequence[str]
) -> Callable[..., tuple[Any, ...]]:
    """`next_token`, or `balanced_next_token`, with the mean loss of each source of a mixture.

    The batch has `source`, int32[batch], the index of each row's source in `names`. The metrics
    have `name/loss` of each, nan where the batch has no target of it; without an auxiliary loss.
    """

    @functools.wraps(loss_fn)
    def loss(model: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Any, ...]:
        shares_BS = jax.nn.one_hot(batch["source"], len(names), dtype=jnp.float32)
        total, weight, metrics, *states = loss_fn(model, {**batch, "source": shares_BS}, key)
        totals, weights = metrics["source"]
        of_sources = {f"{name}/loss": (totals[i], weights[i]) for i, name in enumerate(names)}
        others = {name: value for name, value in metrics.items() if name != "source"}
        return total, weight, {**others, **of_sources}, *states

    return loss


def _sums(
    summed: Callable[[Array], tuple[Array, Array]], batch: dict[str, Array]
) -> tuple[Array, Array, dict[str, Any]]:
    """The sums of a function of the weights, with those of each source if rows have one."""
    weights_BT, shares_BS = batch["weights"], batch.get("source")
    if shares_BS is None:
        return *summed(weights_BT), {}
    totals_S, weights_S = summed(weights_BT[:, :, None] * shares_BS[:, None, :])
    return totals_S.sum(), weights_S.sum(), {"source": (totals_S, weights_S)}


def next_token(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, dict[str, Any]]:
    """The loss of a language model on a token batch, as `make_train_step` takes it.

    The batch holds `tokens` and `targets`, int32[batch, seq], and `weights`, float32[batch, seq];
    for packed rows also `segment_ids` and `positions`, int32[batch, seq]. A model with `hidden` and
    `readout` never has all its logits in memory where they are large; any other is called for them.
    """
    _check_tokens(batch)
    inputs = {name: batch.get(name) for name in ("segment_ids", "positions")}
    if isinstance(model, HasReadout):
        x_BTE = model.hidden(batch["tokens"], **inputs, key=key)
        summed = partial(readout_cross_entropy, model.readout(), x_BTE, batch["targets"])
    else:
        logits = model(batch["tokens"], **inputs, key=key)
        summed = partial(cross_entropy, logits, batch["targets"])
    return _sums(summed, batch)


def _check_names(batch: Mapping[str, Array], *names: str) -> None:
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"the batch has {sorted(batch)}, and no {missing[0]!r}: the loss takes "
            f"{', '.join(names)}"
        )


def _check_tokens(batch: Mapping[str, Array]) -> None:
    names = ("tokens", "targets", "weights")
    _check_names(batch, *names)
    shapes = {name: batch[name].shape for name in names}
    if len(shapes["tokens"]) != 2 or len(set(shapes.values())) > 1:
        raise ValueError(f"the batch's shapes are {shapes}: make each of them [batch, seq]")


def balanced_next_token(coefficient: float) -> Callable[..., tuple[Array, Array, dict[str, Any]]]:
    """`next_token` for a mixture of experts, plus `coefficient` times its load-balancing loss.

    `balance` among the metrics is the mean `moe.load_balance` per token: 1 for an even load.
    """

    def loss(
        model: PyTree, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, dict[str, Any]]:
        _check_tokens(batch)
        if not isinstance(model, HasBalance):
            raise ValueError(f"balanced_next_token: a {type(model).__name__} has no experts")
        x_BTE, balance_B = model.hidden_and_balance(
            batch["tokens"],
            segment_ids=batch.get("segment_ids"),
            positions=batch.get("positions"),
            key=key,
        )
        if balance_B is None:
            raise ValueError("balanced_next_token: the model has no experts; set num_experts")
        summed = partial(readout_cross_entropy, model.readout(), x_BTE, batch["targets"])
        total, weight, metrics = _sums(summed, batch)
        balance = balance_B.sum()
        return total + coefficient * balance, weight, {**metrics, "balance": balance}

    return loss


def classification(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, dict[str, Array]]:
    """The loss and the accuracy of a classifier, as `make_train_step` takes it.

    The batch holds `inputs`, [batch, …], as the model takes them, `labels`, int32[batch], and
    `weights`, float32[batch]; for rows of tokens also their `mask`, bool[batch, seq].
    """
    _check_names(batch, "inputs", "labels", "weights")
    logits = class_logits(model, batch, key)
    total, weight = cross_entropy(logits, batch["labels"], batch["weights"])
    right = logits.argmax(-1) == batch["labels"]
    return total, weight, {"accuracy": jnp.where(right, batch["weights"], 0.0).sum()}


def class_logits(model: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
    """A classifier's logits, float32[…, batch, classes], for a batch with or without a mask."""
    masks = {"mask": batch["mask"]} if "mask" in batch else {}
    return model(batch["inputs"], key=key, **masks)
