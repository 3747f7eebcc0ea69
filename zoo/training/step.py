"""One train step for every family: TrainState, init_state, make_train_step, make_eval_step.

A loss is a function `loss_fn(model, batch, key) -> (total, weight, metrics)` of sums: the summed
loss, the summed weight, and further sums that are reported divided by the weight. So the gradient
is the same whatever the microbatches, the padding and the mesh.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32, Key, PyTree

from zoo import sharding
from zoo.nn.parameters import cast
from zoo.nn.precision import (
    LossScale,
    Precision,
    compute_dtype,
    exact_products,
    in_precision,
    platform,
)
from zoo.training.compiled import CompiledStep, Metrics

LossFunction = Callable[[Any, Any, Any], tuple[Array, Array, Mapping[str, Array]]]
Trainable = Callable[[PyTree], PyTree]  # from a model to a tree of booleans like it

# What a step's sums, a step's metrics and the training loop's lines hold of their own.
EVAL_NAMES = frozenset({"loss", "tokens"})
STEP_NAMES = EVAL_NAMES | {"grad_norm", "param_norm", "skipped", "loss_scale"}
STEP_NAMES |= {"step", "learning_rate", "mfu", "examples"}
STEP_NAMES |= {"tokens_per_second", "examples_per_second"}
SUMS = "(total, weight, metrics): the summed loss, the summed weight, a dict of further sums"


class TrainState(eqx.Module):
    """All that a run is: restore it and the data's position, and training goes on bit for bit."""

    model: PyTree  # fp32 master weights
    opt_state: PyTree
    step: Int32[Array, ""]  # steps done, skipped ones included
    key: Key[Array, ""]  # root of dropout: folded with the step, then with the microbatch
    loss_scale: LossScale  # used in fp16
    skipped: Int32[Array, ""]  # steps that came to what is not finite, and changed nothing


def init_state(
    make_model: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    *,
    key: Key[Array, ""],
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
    trainable: Trainable | None = None,
    pretrained: PyTree = None,
) -> TrainState:
    """The state that training starts from, born sharded: no device ever holds a whole parameter.

    `make_model(key)` builds the model; or, given a `pretrained` one, `make_model(key, pretrained)`
    what training makes of it. Initialisation and dropout take separate streams of `key`. What is
    not `trainable` (see `make_train_step`) has no optimizer state.

    Raises:
        ShardingError: a parameter that the rules or the mesh cannot shard, or a rule for a mesh
            axis that there is not, by name.
        TypeError: a model in place of `make_model`, or an optimizer that is none.
    """
    sharding.check_rules(rules)
    build, given, skeleton, static = _blueprint(make_model, optimizer, key, trainable, pretrained)
    placed = None if mesh is None else state_shardings(skeleton, mesh, rules)
    # `eqx.filter_jit` takes no output shardings.
    arrays = jax.jit(lambda *given: eqx.filter(build(*given), eqx.is_array), out_shardings=placed)(
        *given
    )
    return eqx.combine(arrays, static)


def abstract_state(
    make_model: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    *,
    key: Key[Array, ""],
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
    trainable: Trainable | None = None,
    pretrained: PyTree = None,
) -> TrainState:
    """What `init_state` would make, with a sharded ShapeDtypeStruct for each array: for restore."""
    sharding.check_rules(rules)
    *_, skeleton, static = _blueprint(make_model, optimizer, key, trainable, pretrained)
    if mesh is not None:
        placed = state_shardings(skeleton, mesh, rules)
        skeleton = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            skeleton,
            placed,
        )
    return eqx.combine(skeleton, static)


def _blueprint(
    make_model: Any, optimizer: Any, key: Key[Array, ""], trainable: Any, pretrained: PyTree
) -> tuple[Any, Any, Any, Any]:
    """How to build a state, from what; the skeleton of its arrays, and what in it is no array."""
    _check_optimizer(optimizer)
    has_arrays = any(map(eqx.is_array, jax.tree.leaves(make_model)))
    if has_arrays or not callable(make_model):
        raise TypeError(
            f"make_model is a {type(make_model).__name__}: give a function from a key to a model; "
            "to train one that there is, lambda key, model: model with pretrained=model"
        )
    weights, rest = eqx.partition(pretrained, eqx.is_array)
    given = (key,) if pretrained is None else (key, weights)

    def build(key: Key[Array, ""], *weights: PyTree) -> TrainState:
        init_key, dropout_key = jax.random.split(key)
        model = make_model(init_key, *(eqx.combine(w, rest) for w in weights))
        model = cast(model, jnp.float32)
        with _standard_promotion():
            opt_state = optimizer.init(eqx.filter(model, _trained(model, trainable)))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(model, opt_state, zero, dropout_key, LossScale.init(), zero)

    skeleton, static = eqx.partition(
        eqx.filter_eval_shape(build, *given), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    return build, given, skeleton, static


def _trained(model: PyTree, trainable: Trainable | None) -> PyTree:
    """A tree of booleans: whether a leaf of a model is trained."""
    chosen = jax.tree.map(lambda _: True, model) if trainable is None else trainable(model)
    trained = jax.tree.map(lambda x, chosen: chosen and eqx.is_inexact_array(x), model, chosen)
    if not any(jax.tree.leaves(trained)):
        fix = "freeze less of it" if trainable else "a model has arrays of floats"
        raise ValueError(f"nothing of the model, a {type(model).__name__}, is trainable: {fix}")
    return trained


def state_shardings(state: TrainState, mesh: Mesh, rules: sharding.Rules | None = None) -> Any:
    """The NamedSharding of each array of a state (or of its skeleton): None for other leaves."""
    arrays = eqx.filter(state, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    counters = jax.tree.map(lambda _: sharding.replicated(mesh), arrays)
    model = sharding.shardings(arrays.model, mesh, rules)
    opt_state = sharding.like_parameters(arrays.opt_state, arrays.model, mesh, rules)
    return eqx.tree_at(lambda s: (s.model, s.opt_state), counters, (model, opt_state))


def make_train_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
    precision: Precision = "bf16",
    accumulate: int = 1,
    clip_norm: float | None = 1.0,
    trainable: Trainable | None = None,
) -> "CompiledStep":
    """The train step: `state, metrics = step(state, batch)`, with the state's buffers donated.

    Computes in `precision` over fp32 master weights; cuts a batch of B rows into `accumulate`
    microbatches of B/accumulate; clips the gradient to the global norm `clip_norm`. A step whose
    loss, gradient or new parameters are not finite leaves parameters and optimizer state as they
    were, and counts as skipped.
    Given `trainable`, a function from a model to a tree of booleans like it, the rest is frozen:
    it has no gradient, and stays as it is bit for bit.

    Metrics are float32 scalars on the device: `loss` (a unit of weight), `tokens` (the summed
    weight), `grad_norm` (before clipping), `param_norm` (of the trained parameters after the
    update, not finite where that was left out), `skipped` (so far), in fp16 `loss_scale`, and
    the loss's own divided by the weight.

    Raises:
        TypeError: a loss function or an optimizer that is none; at the first call, a loss function
            that returns something else.
        ValueError: `accumulate`, `clip_norm` or `precision` out of range; at a call, rows that do
            not divide; at the first call, a metric whose name is taken, or a total that is no sum.
        ShardingError: a rule for a mesh axis that there is not.
    """
    compute_dtype(precision)
    _check_loss(loss_fn)
    _check_optimizer(optimizer)
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate}: must be at least 1")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm}: must be positive, or None for no clipping")

    def gradient(params: PyTree, static: PyTree, batch: PyTree, key: Array, scale: Array) -> tuple:
        """The gradient of the summed loss times `scale`, and the sums."""

        def scaled_loss(params: PyTree) -> tuple[Array, tuple]:
            with in_precision(eqx.combine(params, static), precision) as model:
                total, weight, metrics = _sums(loss_fn, STEP_NAMES, model, batch, key)
            # The mean's gradient is of the order of one, whatever the batch: no overflow in fp16.
            share = _nonzero(weight)
            return total / share * scale, (share, {"loss": total, "tokens": weight, **metrics})

        with exact_products(precision):
            grads, (share, sums) = eqx.filter_grad(scaled_loss, has_aux=True)(params)
        if mesh is not None:  # reduced to the devices that keep them, not to all
            grads = eqx.filter_shard(grads, sharding.shardings(params, mesh, rules))
        return grads, share, sums

    def accumulated(params: PyTree, static: PyTree, batch: PyTree, key: Array, scale: Array):
        """The gradient of the mean loss times `scale`, and the sums, over all microbatches."""

        def one(index: Array, microbatch: PyTree) -> tuple[PyTree, Array, dict[str, Array]]:
            microbatch_key = jax.random.fold_in(key, index)
            return gradient(params, static, microbatch, microbatch_key, scale)

        if accumulate == 1:
            grads, _, sums = one(jnp.int32(0), batch)
            return grads, sums

        def add(carry: PyTree, inputs: tuple[Array, PyTree]) -> tuple[PyTree, None]:
            grads, share, sums = one(*inputs)
            weighted = jax.tree.map(lambda g: g * share, grads)
            return jax.tree.map(jnp.add, carry, (weighted, sums)), None

        microbatches = jax.tree.map(lambda x: _microbatches(x, accumulate), batch)
        inputs = (jnp.arange(accumulate), microbatches)
        grads, _, sums = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], inputs))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, sums))
        (grads, sums), _ = jax.lax.scan(add, zeros, inputs)
        share = _nonzero(sums["tokens"])
        return jax.tree.map(lambda g: g / share, grads), sums

    def train_step(batch: PyTree, state: TrainState) -> tuple[TrainState, Metrics]:
        params, static = eqx.partition(state.model, _trained(state.model, trainable))
        key = jax.random.fold_in(state.key, state.step)
        scale = state.loss_scale.scale if precision == "fp16" else jnp.float32(1)
        grads, sums = accumulated(params, static, batch, key, scale)
        grads = jax.tree.map(lambda g: g / scale, grads)
        grad_norm = optax.tree.norm(grads)

        def optimize(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
            clipped = grads
            if clip_norm is not None:
                factor = jnp.minimum(1.0, clip_norm / jnp.maximum(grad_norm, 1e-12))
                clipped = jax.tree.map(lambda g: g * factor, grads)
            with _standard_promotion():
                return optimizer.update(clipped, opt_state, params)

        updates, _ = optimize(params, state.opt_state)
        param_norm = optax.tree.norm(eqx.apply_updates(params, updates))
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"])

        def update(trained: PyTree) -> PyTree:
            params, opt_state = trained
            # The new optimizer state is computed here, in place: from above it would be a copy.
            return eqx.apply_updates(params, updates), optimize(params, opt_state)[1]

        changes = finite & jnp.isfinite(param_norm)
        new_params, opt_state = _update_if(changes, update, (params, state.opt_state))
        skipped = state.skipped + (~changes).astype(jnp.int32)
        loss_scale = state.loss_scale
        if precision == "fp16":
            loss_scale = loss_scale.update(finite)
        model = eqx.combine(new_params, static)
        new_state = TrainState(model, opt_state, state.step + 1, state.key, loss_scale, skipped)
        weight = _nonzero(sums["tokens"])
        metrics = {name: x / weight for name, x in sums.items() if name != "tokens"}
        metrics |= {"tokens": sums["tokens"], "grad_norm": grad_norm, "param_norm": param_norm}
        metrics["skipped"] = skipped
        if precision == "fp16":
            metrics["loss_scale"] = scale
        if mesh is not None:
            # Pinned, or XLA chooses, and the next call meets a state placed otherwise.
            new_state = eqx.filter_shard(new_state, state_shardings(new_state, mesh, rules))
            metrics = eqx.filter_shard(metrics, sharding.replicated(mesh))
        return new_state, {name: x.astype(jnp.float32) for name, x in metrics.items()}

    return CompiledStep(
        train_step,
        mesh=mesh,
        rules=rules,
        accumulate=accumulate,
        donate=True,
    )


def make_eval_step(
    loss_fn: LossFunction,
    *,
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
    precision: Precision = "bf16",
) -> "CompiledStep":
    """The evaluation step: `_, sums = step(model, batch)`, without dropout and without donation.

    `sums` are float32 scalars: `loss` and `tokens`, the summed loss and weight, and the loss
    function's own; add them over the batches, then divide. Errors are `make_train_step`'s.
    """
    compute_dtype(precision)
    _check_loss(loss_fn)

    def eval_step(batch: PyTree, model: PyTree) -> tuple[None, Metrics]:
        if isinstance(model, TrainState):
            raise TypeError("an evaluation step takes a model, not a state: step(state.model, …)")
        with in_precision(model, precision) as model:
            total, weight, metrics = _sums(loss_fn, EVAL_NAMES, model, batch, None)
        return None, {"loss": total, "tokens": weight, **metrics}

    return CompiledStep(eval_step, mesh=mesh, rules=rules)


def _check_loss(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r}: give a function (model, batch, key) -> {SUMS}")


def _check_optimizer(optimizer: Any) -> None:
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"optimizer={optimizer!r}: give an optax.GradientTransformation, as optax.adam(1e-3) is"
        )


def _sums(loss_fn: LossFunction, taken: frozenset[str], *arguments: Any) -> tuple:
    """A loss function's total, weight and metrics in float32, if it returns such."""
    result, name = loss_fn(*arguments), getattr(loss_fn, "__name__", repr(loss_fn))
    is_triple = isinstance(result, tuple | list) and len(result) == 3
    if not is_triple or not isinstance(result[2], Mapping):
        raise TypeError(f"loss_fn {name} returned {_described(result)}, and not {SUMS}")
    total, weight, metrics = result
    for what, x in (("total", total), ("weight", weight)):
        if jnp.ndim(x) != 0:
            raise ValueError(
                f"loss_fn {name} returned a {what} {_described(x)}: sum it over the batch"
            )
    if both := sorted(taken & metrics.keys()):
        raise ValueError(
            f"loss_fn {name} has a metric {both[0]!r}, which the step has itself: rename it"
        )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (total, weight, dict(metrics)))


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_described, x))})"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__


@contextlib.contextmanager
def _standard_promotion() -> Iterator[None]:
    """Optimizers are not ours, and need not be as strict about dtypes and ranks as the zoo."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _nonzero(weight: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(weight > 0, weight, 1.0)


def _microbatches(x: Array, count: int) -> Array:
    # Rows m, m + count, …: cutting out whole blocks would move rows between the devices.
    return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)


def _update_if(condition: Array, update: Callable[[PyTree], PyTree], old: PyTree) -> PyTree:
    """`update(old)` if the condition holds, else `old`."""
    arrays, static = eqx.partition(old, eqx.is_array)

    def updated(arrays: PyTree) -> PyTree:
        return eqx.filter(update(eqx.combine(arrays, static)), eqx.is_array)

    if platform() == "cpu":
        # A branch updates in place: for a select XLA for CPU copies the optimizer's state first.
        # On a GPU a branch makes the host wait for its condition.
        new = jax.lax.cond(condition, updated, lambda arrays: arrays, arrays)
    else:
        new = jax.tree.map(partial(jnp.where, condition), updated(arrays), arrays)
    return eqx.combine(new, static)
