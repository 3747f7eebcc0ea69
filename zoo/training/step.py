"""One train step for every family, and one evaluation step.

A loss is a function `loss_fn(model, batch, key) -> (total, weight, metrics)` of sums: the summed
loss, the summed weight, and further sums that are reported divided by the weight, or by their own
where they are pairs of a sum and a weight. So the gradient is the same whatever the microbatches,
the padding and the mesh. For a model with an `eqx.nn.State` it returns the new State as a fourth
value.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.nn.precision import Precision, check_precision, exact_products
from zoo.nn.products import platform
from zoo.nn.stateful import moved, states, with_states
from zoo.sharding.axes import check_model
from zoo.training.compiled import CompiledStep, Flags, Metrics, flag_options
from zoo.training.loss_checks import Checks
from zoo.training.loss_values import (
    EVAL_NAMES,
    LossFunction,
    loss_values,
    unwrapped,
)
from zoo.training.state import (
    Trainable,
    TrainState,
    balanced_leaves,
    check_opt_state,
    check_optimizer,
    standard_promotion,
    state_shardings,
    trained_leaves,
)

States = list[eqx.nn.State]

# Names of metrics that a loss's own may not have: the step's, and what the training loop adds.
STEP_NAMES = EVAL_NAMES | {"grad_norm", "param_norm", "skipped", "loss_scale"}
STEP_NAMES |= {"step", "learning_rate", "mfu", "examples"}
STEP_NAMES |= {"tokens_per_second", "examples_per_second"}


def make_train_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | sharding.Layout | None = None,
    precision: Precision | str = "bf16",
    accumulate: int = 1,
    clip_norm: float | None = 1.0,
    trainable: Trainable | None = None,
    xla: Flags = "default",
) -> CompiledStep:
    """The train step: `state, metrics = step(state, batch)`, with the state's buffers donated.

    Computes in `precision` over fp32 master weights; cuts a batch of B rows into `accumulate`
    microbatches of B/accumulate; clips the gradient to the global norm `clip_norm`. A step whose
    loss, gradient or new parameters are not finite leaves parameters and optimizer state as they
    were, and counts as skipped. Given `trainable`, a function from a model to a tree of booleans
    like it, the rest is frozen: it has no gradient, and stays as it is bit for bit. `mesh` is
    `init_state`'s. In "int8" it computes in bf16, and multiplies the matrices of blocks in int8.
    `xla` names a set of the compiler's flags, `zoo.training.compiled.FLAG_SETS`.

    For a model that is not the zoo's, the floating-point entries of the batch are cast to
    `precision` with the parameters. Labels, targets and weights stay in fp32, and so does what the
    loss names by `zoo.losses.keeps_dtype`. A PrecisionWarning, once per step, names the lines of
    the loss and the model that compute a product of two dtypes in fp32, and a LossWarning says that
    a loss of one's own is no sum over rows.

    An `eqx.nn.State` anywhere in the model is not trained, and keeps its own dtypes: the loss gets
    it (`model, state = pair` where `make_model` returned the pair of `eqx.nn.make_with_state`), and
    returns the new one as a fourth value, or a list of several in the model's order. Microbatches
    pass it on in their order, and a skipped step leaves it as it was.

    A batch of numpy arrays is checked before it is used: for nan and infinity, integers that int32
    does not hold, and ids that the model does not have (see `zoo.losses.accepts`).

    Metrics are float32 scalars on the device: `loss` (per unit of weight), `tokens` (the summed
    weight), `grad_norm` (before clipping), `param_norm` (of the trained parameters after the
    update, not finite where that was left out), `skipped` (so far), in fp16 `loss_scale`, and
    the loss's own divided by the weight.

    Raises:
        TypeError: `optimizer` is not an optax transformation; at the first call, a loss function
            that returns something else, or no new State.
        ValueError: `accumulate`, `clip_norm` or `precision` out of range, a precision or flags that
            the devices lack, or microbatches of a loss that needs the whole batch; at a call, rows
            that do not divide; at the first call, the state of another optimizer, a metric whose
            name is taken or that is no number, a total that is no sum, a State of other shapes or
            dtypes, a batch without an entry that the loss names, or "int8" for a model that
            multiplies nothing in it.
        ShardingError: at the first call, a pattern of a layout's `axes` that names nothing.
    """
    layout = sharding.layout_of(mesh)
    check_precision(precision, layout.mesh)
    check_optimizer(optimizer)
    require(accumulate >= 1, f"accumulate={accumulate}: must be at least 1")
    require(
        clip_norm is None or clip_norm > 0,
        f"clip_norm={clip_norm}: must be positive, or None for no clipping",
    )
    require(
        accumulate == 1 or not any(hasattr(x, "of_whole_batch") for x in unwrapped(loss_fn)),
        f"accumulate={accumulate}: the loss has a mean over the whole batch in each row's, and "
        "microbatches would each have their own; take accumulate=1",
    )
    maths = _Maths(loss_fn, optimizer, layout.mesh, precision, accumulate, clip_norm, trainable)
    checks = Checks(loss_fn, precision, clip_norm)

    def train_step(batch: PyTree, state: TrainState) -> tuple[TrainState, Metrics]:
        check_model(state.model, layout)
        outputs = maths.step(batch, state)
        checks.dtypes(state.model, batch, state.key)
        return outputs

    return CompiledStep(
        train_step,
        mesh=layout,
        accumulate=accumulate,
        donate=True,
        options=flag_options(xla, layout.mesh),
        checks=checks,
    )


@dataclasses.dataclass(frozen=True)
class _Maths:
    """A step, given the arguments of `make_train_step`."""

    loss_fn: LossFunction
    optimizer: optax.GradientTransformation
    mesh: Mesh | None
    precision: Precision | str
    accumulate: int
    clip_norm: float | None
    trainable: Trainable | None

    def step(self, batch: PyTree, state: TrainState) -> tuple[TrainState, Metrics]:
        """The new state and the metrics: gradient, clipping, update, and nothing if not finite."""
        mesh, is_fp16 = self.mesh, self.precision == "fp16"
        chosen = trained_leaves(state.model, self.trainable)
        check_opt_state(self.optimizer, eqx.filter(state.model, chosen), state.opt_state)
        biases = eqx.filter(state.model, balanced_leaves(state.model, self.trainable))
        params, static = eqx.partition(state.model, chosen)
        key = jax.random.fold_in(state.key, state.step)
        old_states = states(state.model)
        scale = state.loss_scale.scale if is_fp16 else jnp.float32(1)
        grads, sums, new_states = self._gradient(
            eqx.combine(params, biases), static, old_states, batch, key, scale
        )
        grads, errors = eqx.partition(grads, chosen)
        grads = jax.tree.map(lambda g: g / scale, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
        trained = (params, state.opt_state)
        changes, param_norm, (params, opt_state) = self._updated(grads, norm, finite, trained)
        skipped = state.skipped + (~changes).astype(jnp.int32)
        loss_scale = state.loss_scale.update(finite) if is_fp16 else state.loss_scale
        # Few and small: unlike the optimizer's state they are not worth a branch.
        kept_states = jax.tree.map(partial(jnp.where, changes), new_states, old_states)
        biases = jax.tree.map(partial(jnp.where, changes), moved(biases, errors), biases)
        model = with_states(eqx.combine(params, biases, static), kept_states)
        state = TrainState(model, opt_state, state.step + 1, state.key, loss_scale, skipped)
        metrics = _means(sums) | {"grad_norm": norm, "param_norm": param_norm, "skipped": skipped}
        metrics |= {"loss_scale": scale} if is_fp16 else {}
        if mesh is not None:
            # Pinned, or XLA chooses, and the next call meets a state placed otherwise.
            state = eqx.filter_shard(state, state_shardings(state, mesh))
            metrics = eqx.filter_shard(metrics, sharding.replicated(mesh))
        return state, {name: x.astype(jnp.float32) for name, x in metrics.items()}

    def _gradient(
        self,
        params: PyTree,
        static: PyTree,
        old_states: States,
        batch: PyTree,
        key: Array,
        scale: Array,
    ) -> tuple[PyTree, dict[str, Any], States]:
        """The gradient of the mean loss times `scale`, the sums, and the new States.

        A microbatch has the States that the one before it returned.
        """

        def one(old_states: States, index: Array, microbatch: PyTree) -> tuple:
            microbatch_key = jax.random.fold_in(key, index)

            def scaled_loss(params: PyTree) -> tuple[Array, tuple]:
                model = with_states(eqx.combine(params, static), old_states)
                given = (STEP_NAMES, model, microbatch, microbatch_key)
                sums, new_states = loss_values(self.loss_fn, self.precision, *given)
                # The mean's gradient is of the order of one, whatever the batch: it does not
                # overflow in fp16.
                share = _nonzero(sums["tokens"])
                return sums["loss"] / share * scale, (share, sums, new_states)

            with exact_products(self.precision):
                grads, rest = eqx.filter_grad(scaled_loss, has_aux=True)(params)
            if self.mesh is not None:  # reduced to the devices that keep them, not to all
                grads = eqx.filter_shard(grads, sharding.shardings(params, self.mesh))
            return grads, *rest

        if self.accumulate == 1:
            grads, _, sums, new_states = one(old_states, jnp.int32(0), batch)
            return grads, sums, new_states

        def add(carry: tuple[PyTree, States], inputs: tuple[Array, PyTree]) -> tuple[PyTree, None]:
            so_far, old_states = carry
            grads, share, sums, new_states = one(old_states, *inputs)
            weighted = jax.tree.map(lambda g: g * share, grads)
            return (jax.tree.map(jnp.add, so_far, (weighted, sums)), new_states), None

        # Rows m, m + accumulate, …: cutting out whole blocks would move rows between the devices.
        microbatches = jax.tree.map(
            lambda x: x.reshape(-1, self.accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        inputs = (jnp.arange(self.accumulate), microbatches)
        grads, _, sums, _ = jax.eval_shape(one, old_states, *jax.tree.map(lambda x: x[0], inputs))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, sums))
        ((grads, sums), new_states), _ = jax.lax.scan(add, (zeros, old_states), inputs)
        share = _nonzero(sums["tokens"])
        return jax.tree.map(lambda g: g / share, grads), sums, new_states

    def _updated(
        self, grads: PyTree, grad_norm: Array, finite: Array, trained: tuple[PyTree, PyTree]
    ) -> tuple[Array, Array, tuple[PyTree, PyTree]]:
        """Whether there is an update, the new parameters' norm, and both trees, or the old ones."""

        def optimize(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
            clipped = grads
            if self.clip_norm is not None:
                factor = jnp.minimum(1.0, self.clip_norm / jnp.maximum(grad_norm, 1e-12))
                clipped = jax.tree.map(lambda g: g * factor, grads)
            with standard_promotion():
                return self.optimizer.update(clipped, opt_state, params)

        updates, _ = optimize(*trained)
        param_norm = optax.tree.norm(eqx.apply_updates(trained[0], updates))
        changes = finite & jnp.isfinite(param_norm)
        arrays, static = eqx.partition(trained, eqx.is_array)

        def update(arrays: PyTree) -> PyTree:
            params, opt_state = eqx.combine(arrays, static)
            # The new optimizer state is computed here, in place: from above it would be a copy.
            new = eqx.apply_updates(params, updates), optimize(params, opt_state)[1]
            return eqx.filter(new, eqx.is_array)

        if platform() == "cpu":
            # A branch updates in place: for a select XLA for CPU copies the optimizer's state
            # first. On a GPU a branch makes the host wait for its condition.
            new = jax.lax.cond(changes, update, lambda arrays: arrays, arrays)
        else:
            new = jax.tree.map(partial(jnp.where, changes), update(arrays), arrays)
        return changes, param_norm, eqx.combine(new, static)


def _means(sums: Mapping[str, Any]) -> dict[str, Array]:
    """The sums divided by the weight or by their own, and the weight as `tokens`."""
    weight = _nonzero(sums["tokens"])

    def mean(name: str, x: Any) -> Array:
        if isinstance(x, tuple):  # with a weight of its own; nan if that is 0
            return x[0] / x[1]
        return x if name == "tokens" else x / weight

    return {name: mean(name, x) for name, x in sums.items()}


def make_eval_step(
    loss_fn: LossFunction,
    *,
    mesh: Mesh | sharding.Layout | None = None,
    precision: Precision | str = "bf16",
) -> CompiledStep:
    """The evaluation step: `_, sums = step(model, batch)`, without dropout and without donation.

    `sums` are float32 scalars: `loss` and `tokens`, the summed loss and weight, and the loss
    function's own, or pairs; add them over the batches, then divide. The loss gets no key, by which
    it tells an evaluation, for instance for `eqx.nn.inference_mode`; it may return a new State,
    which is ignored. Errors and warnings are `make_train_step`'s.
    """
    check_precision(precision, sharding.layout_of(mesh).mesh)
    checks = Checks(loss_fn, precision)

    def eval_step(batch: PyTree, model: PyTree) -> tuple[None, Metrics]:
        if isinstance(model, TrainState):
            raise TypeError("an evaluation step takes a model, not a state: step(state.model, …)")
        sums, _ = loss_values(loss_fn, precision, EVAL_NAMES, model, batch, None)
        checks.dtypes(model, batch, None)
        return None, sums

    return CompiledStep(eval_step, mesh=mesh, checks=checks)


def _nonzero(weight: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(weight > 0, weight, 1.0)
