"""Losses as sums with their weights, so that a gradient does not depend on the microbatches.

Legend of suffixes: B batch, T time, E embed, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from zoo import sharding
from zoo.nn.parameters import left_stored
from zoo.nn.products import custom_vjp
from zoo.nn.protocols import HasBalance, HasReadout
from zoo.training.chunked_loss import chunked, chunked_values
from zoo.training.tiled_loss import num_tiles, tiled_losses

Function = TypeVar("Function", bound=Callable[..., Any])

# Most bytes of a device's logits in fp32 that are in memory at once.
LOGITS_BYTES = 2**29


def keeps_dtype(*names: str | int) -> Callable[[Function], Function]:
    """A decorator of a loss: its step leaves these entries of a batch in the dtype that they have.

    They are keys of a dict, fields, or indices of a tuple. For a model that is not the zoo's, a
    step casts the other floating-point entries to its precision, but for `zoo.nn.precision.KEPT`:
    weights, labels and targets, in the singular too.
    """

    def decorate(loss_fn: Function) -> Function:
        setattr(loss_fn, "keeps_dtype", names)  # noqa: B010
        return loss_fn

    return decorate


def of_whole_batch(loss_fn: Function) -> Function:
    """A decorator of a loss whose rows depend on each other: a step of microbatches refuses it."""
    setattr(loss_fn, "of_whole_batch", True)  # noqa: B010
    return loss_fn


def accepts(**values: range | str | tuple[str, ...] | None) -> Callable[[Function], Function]:
    """A decorator of a loss: the values that entries of its batches may have, which are checked.

    Integers are in a range, as in `labels=range(10)`; or in that of a number which the model or its
    `config` has under one of the names given, as in `tokens="vocab_size"`. None allows any value;
    every other entry may hold neither nan nor infinity. Targets and labels may be anything at a
    weight of 0.
    """

    def decorate(loss_fn: Function) -> Function:
        setattr(loss_fn, "accepts", values)  # noqa: B010
        return loss_fn

    return decorate


OF_TOKENS = accepts(tokens="vocab_size", targets="vocab_size")
OF_LABELS = accepts(inputs="vocab_size", labels=("num_classes", "out_size"))


@custom_vjp
def token_losses(logits: Array, targets: Array) -> Array:
    """The cross-entropy of each target in nats, float32 of their shape; nan beyond the logits."""
    return _token_losses_forward(logits, targets)[0]


def _is_target(logits: Array, targets: Array) -> Array:
    # A comparison, not a gather: with the vocabulary sharded it stays local, and it fuses.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def _token_losses_forward(logits: Array, targets: Array) -> tuple[Array, tuple]:
    logits32 = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(logits32.max(-1, keepdims=True))  # as in attention
    log_sum = jnp.log(jnp.exp(logits32 - top).sum(-1)) + top[..., 0]
    target_logit = jnp.where(_is_target(logits, targets), logits32, 0.0).sum(-1)
    is_class = (targets >= 0) & (targets < logits.shape[-1])
    target_logit = jnp.where(is_class, target_logit, jnp.nan)
    return log_sum - target_logit, (logits, targets, log_sum)


def _token_losses_backward(residuals: tuple, g: Array) -> tuple[Array, None]:
    logits, targets, log_sum = residuals
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    one_hot = _is_target(logits, targets).astype(jnp.float32)
    # Where nothing depends on the loss, logits that are not finite do not matter.
    gradient = jnp.where(g[..., None] == 0, 0.0, (probabilities - one_hot) * g[..., None])
    return gradient.astype(logits.dtype), None


token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted cross-entropy in nats, reduced in fp32: the summed loss and the summed weight.

    With the vocabulary sharded over a mesh axis, only scalars per token cross the network. A
    position of weight 0 counts for nothing, whatever its logits and target are.
    """
    return weighted_losses(logits, targets, weights).sum(), weights.sum()


def weighted_losses(
    logits: Float[Array, "*batch classes"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
) -> Float[Array, "*batch"]:
    """Each position's loss in nats times its weight, whose sum is that of `cross_entropy`."""
    return _weighted(token_losses(logits, targets), weights)


def _weighted(losses: Array, weights: Array) -> Array:
    return jnp.where(weights != 0, losses, 0.0) * weights


def readout_cross_entropy(
    readout: Callable[[Array], Array],
    x_BTE: Float[Array, "batch seq embed"],
    targets_BT: Int[Array, "batch seq"],
    weights_BT: Float[Array, "batch seq"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`cross_entropy` of the logits `readout(x_BTE)`, one stretch of time after another.

    Where a device's logits in fp32 would take more than `LOGITS_BYTES`, no more of them than that
    is ever in memory, forward or backward. For that the gradient is computed in the forward pass,
    at no additional product; in fp16 in the backward pass, at one more. `readout` is a
    `zoo.nn.layers.Readout`, or a module like it.
    """
    total, _ = _over_time(readout, x_BTE, (targets_BT, None), weights_BT)
    return total, weights_BT.sum()


def _over_time(
    readout: Callable[[Array], Array],
    x_BTE: Array,
    targets: tuple[Array, Array | None],
    weights_BT: Array,
) -> tuple[Array, Array | None]:
    """`_of_tokens`, one stretch of time after another if need be."""
    count = num_chunks(jax.eval_shape(readout, x_BTE))
    if count == 1:
        return _of_tokens(readout, x_BTE, targets, weights_BT)
    return chunked(_of_tokens, count, readout, x_BTE, targets, weights_BT)


def token_values(
    function: Callable[[Array, Array], PyTree[Array]],
    readout: Callable[[Array], Array],
    x_BTE: Float[Array, "batch seq embed"],
    targets_BT: Int[Array, "batch seq"],
) -> PyTree[Array]:
    """`function(logits, targets)` of each token, [batch, seq], without a gradient.

    As for `readout_cross_entropy`, large logits are never all in memory.
    """
    readout, x_BTE = jax.lax.stop_gradient((readout, x_BTE))
    count = num_chunks(jax.eval_shape(readout, x_BTE))
    if count == 1:
        return function(readout(x_BTE), targets_BT)
    return chunked_values(function, count, readout, x_BTE, targets_BT)


def _of_tokens(
    readout: Callable[[Array], Array],
    x: Array,
    targets: tuple[Array, Array | None],
    weights: Array,
) -> tuple[Array, Array | None]:
    """The sum of all losses, and those of each source; `targets` are ids and shares [B, T, S]."""
    return _with_sources(weighted_losses(readout(x), targets[0], weights), targets[1])


def _with_sources(losses: Array, shares: Array | None) -> tuple[Array, Array | None]:
    if shares is None:
        return losses.sum(), None
    of_sources = jax.lax.stop_gradient(losses)[..., None] * shares
    return losses.sum(), of_sources.sum((0, 1))


def per_source(
    loss_fn: Callable[..., tuple[Any, ...]], names: Sequence[str]
) -> Callable[..., tuple[Any, ...]]:
    """`next_token`, or `balanced_next_token`, with the mean loss of each source of a mixture.

    The batch has `source`, int32[batch], the index of each row's source in `names`. The metrics
    have `name/loss` for each, without an auxiliary loss, and nan where the batch has no target of
    it. Any other loss is as it was, without such metrics.
    """

    @functools.wraps(loss_fn)
    def loss(model: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Any, ...]:
        shares_BS = jax.nn.one_hot(batch["source"], len(names), dtype=jnp.float32)
        total, weight, metrics, *states = loss_fn(model, {**batch, "source": shares_BS}, key)
        if "source" not in metrics:
            return total, weight, metrics, *states
        totals, weights = metrics["source"]
        of_sources = {f"{name}/loss": (totals[i], weights[i]) for i, name in enumerate(names)}
        others = {name: value for name, value in metrics.items() if name != "source"}
        return total, weight, {**others, **of_sources}, *states

    return loss


def _token_sums(
    model: PyTree, readout: Callable[[Array], Array], x_BTE: Array, batch: dict[str, Array]
) -> tuple[Array, Array, dict[str, Any]]:
    """The loss of all tokens and their weight, and those of each source if rows have one."""
    targets_BT, weights_BT = batch["targets"], batch["weights"]
    shares_BS, shares_BTS = batch.get("source"), None
    if shares_BS is not None:
        shares_BTS = jnp.broadcast_to(shares_BS[:, None], (*weights_BT.shape, shares_BS.shape[-1]))
    held = _bytes(jax.eval_shape(readout, x_BTE))
    tiles = num_tiles(readout, -(-held // LOGITS_BYTES)) if held > LOGITS_BYTES else None
    if tiles is None:
        total, totals_S = _over_time(readout, x_BTE, (targets_BT, shares_BTS), weights_BT)
    else:
        with left_stored():  # the one that is gathered is not used then, and not made
            stored = model.readout()
        losses_BT = tiled_losses(tiles, stored, x_BTE, targets_BT)
        total, totals_S = _with_sources(_weighted(losses_BT, weights_BT), shares_BTS)
    if shares_BTS is None:
        return total, weights_BT.sum(), {}
    weights_S = (weights_BT[..., None] * shares_BTS).sum((0, 1))
    return total, weights_BT.sum(), {"source": (totals_S, weights_S)}


def _bytes(logits: jax.ShapeDtypeStruct) -> int:
    """The bytes of a device's logits, [batch, seq, vocab], in fp32."""
    return 4 * logits.size // sharding.num_parts("batch", "inner_seq", "vocab")


def num_chunks(logits: jax.ShapeDtypeStruct, copies: int = 1) -> int:
    """How many chunks of time keep `copies` of logits [batch, seq, vocab] in `LOGITS_BYTES`."""
    held, time = copies * _bytes(logits), logits.shape[1] // sharding.num_parts("inner_seq")
    return next(
        n for n in range(1, time + 1) if time % n == 0 and (held <= LOGITS_BYTES * n or n == time)
    )


@OF_TOKENS
def next_token(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, dict[str, Any]]:
    """The loss of a language model on a token batch, as `make_train_step` takes it.

    The batch holds `tokens` and `targets`, int32[batch, seq], and `weights`, float32[batch, seq];
    for packed rows also `segment_ids` and `positions`, int32[batch, seq]. A model with `hidden` and
    `readout` never has all its logits in memory where they are large; any other is called for them.
    """
    check_tokens(batch)
    return _token_sums(model, *readout_and_input(model, batch, key), batch)


def readout_and_input(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Callable[[Array], Array], Array]:
    """A language model's output head, and its input for a token batch.

    For a model without `hidden` and `readout` they are the identity and the logits.
    """
    inputs = {name: batch.get(name) for name in ("segment_ids", "positions")}
    if not isinstance(model, HasReadout):
        return eqx.nn.Identity(), model(batch["tokens"], **inputs, key=key)
    x_BTE = model.hidden(batch["tokens"], **inputs, key=key)
    return model.readout(), x_BTE


def check_names(batch: Mapping[str, Array], *names: str) -> None:
    """Raise a ValueError for a batch without one of these entries."""
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"the batch has {sorted(batch)}, and no {missing[0]!r}: the loss takes "
            f"{', '.join(names)}"
        )


def check_tokens(batch: Mapping[str, Array]) -> None:
    """Raise a ValueError for a batch without tokens, targets and weights."""
    names = ("tokens", "targets", "weights")
    check_names(batch, *names)
    shapes = {name: batch[name].shape for name in names}
    if len(shapes["tokens"]) != 2 or len(set(shapes.values())) > 1:
        raise ValueError(f"the batch's shapes are {shapes}: make each of them [batch, seq]")


def balanced_next_token(
    coefficient: float, z_coefficient: float = 0.0
) -> Callable[..., tuple[Array, Array, dict[str, Any]]]:
    """`next_token` for a mixture of experts, plus `coefficient` times its load-balancing loss.

    It adds `z_coefficient` times the routers' z-loss too, the squared logarithm of each one's
    partition function (ST-MoE, Zoph et al. 2022). `balance` among the metrics is the load of
    `zoo.transformer.moe.balance` per token, 1 for an even load, of the positions that count:
    prompts have a weight of 0 in all of it, as in `next_token`. Where routers have a `LoadBias`,
    the step moves it.
    """

    @OF_TOKENS
    def loss(
        model: PyTree, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, dict[str, Any]]:
        check_tokens(batch)
        if not isinstance(model, HasBalance):
            raise ValueError(f"balanced_next_token: a {type(model).__name__} has no experts")
        x_BTE, experts = model.hidden_and_balance(
            batch["tokens"],
            segment_ids=batch.get("segment_ids"),
            positions=batch.get("positions"),
            key=key,
            weights=batch["weights"],
        )
        if experts is None:
            raise ValueError(
                "balanced_next_token: the model has no experts; set experts.num_experts"
            )
        total, weight, metrics = _token_sums(model, model.readout(), x_BTE, batch)
        balance = experts.load.sum()
        total, metrics = total + coefficient * balance, {**metrics, "balance": balance}
        if z_coefficient:
            metrics["router_z"] = experts.z.sum()
            total = total + z_coefficient * metrics["router_z"]
        return total + experts.error.sum(), weight, metrics

    return loss


@OF_LABELS
def classification(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, dict[str, Array]]:
    """The loss and the accuracy of a classifier, as `make_train_step` takes it.

    The batch holds `inputs`, [batch, …], as the model takes them, `labels`, int32[batch], and
    `weights`, float32[batch]; for rows of tokens also their `mask`, bool[batch, seq].
    """
    check_names(batch, "inputs", "labels", "weights")
    logits = class_logits(model, batch, key)
    total, weight = cross_entropy(logits, batch["labels"], batch["weights"])
    right = logits.argmax(-1) == batch["labels"]
    return total, weight, {"accuracy": jnp.where(right, batch["weights"], 0.0).sum()}


def class_logits(model: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
    """A classifier's logits, float32[…, batch, classes], for a batch with or without a mask."""
    masks = {"mask": batch["mask"]} if "mask" in batch else {}
    return model(batch["inputs"], key=key, **masks)
