"""Programs over a stacked leading axis: ensembles, dropout samples, gradients of each example."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.nn.parameters import CastsInputs, casts_inputs

Losses = Float[Array, "batch"]


class Ensemble(CastsInputs):
    """Members of one family, stacked along the first axis of each of their arrays.

    They run as one program. A mesh axis shards them by the rule of the logical axis "member".
    """

    members: PyTree
    stacked_axis: str = eqx.field(static=True)

    def __init__(
        self, make_model: Callable[[Key[Array, ""]], PyTree], num_members: int, *, key: Array
    ):
        """Member i is `make_model(jax.random.split(key, num_members)[i])`."""
        require(num_members > 0, f"num_members={num_members}: must be positive")
        self.members = eqx.filter_vmap(make_model)(jax.random.split(key, num_members))
        self.stacked_axis = "member"

    @property
    def num_members(self) -> int:
        """Number of members."""
        return jax.tree.leaves(eqx.filter(self.members, eqx.is_array))[0].shape[0]

    @property
    def casts_inputs(self) -> bool:
        """Whether the members cast their inputs themselves."""
        return casts_inputs(self.members)

    def __getitem__(self, index: int) -> PyTree:
        """One member, as a model of its family."""
        return jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, self.members)

    def __call__(self, *args: Any, key: Key[Array, ""] | None = None, **kwargs: Any) -> Any:
        """The outputs of all members for one input, [member, …]; a `key` turns dropout on."""

        def call(member: Any, index: Array) -> Any:
            member_key = None if key is None else jax.random.fold_in(key, index)
            return member(*args, key=member_key, **kwargs)

        return self.map(call)

    def map(self, function: Callable[[Any, Array], Any]) -> Any:
        """`function(member, index)` of every member, stacked."""
        arrays, static = eqx.partition(self.members, eqx.is_array)
        with sharding.mapped(self.stacked_axis) as axes:
            return jax.vmap(
                lambda arrays, index: function(eqx.combine(arrays, static), index),
                spmd_axis_name=axes,
            )(arrays, jnp.arange(self.num_members))


def member_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of an ensemble, as `zoo.make_train_step` takes it, from a member's loss.

    Its value is the mean over members, and its gradient the gradient of their sum: each member is
    trained as it would be alone, with `per_member(optimizer)` and no clipping by the norm of all.
    """

    @functools.wraps(loss_fn)
    def loss(model: Ensemble, batch: PyTree, key: Array | None) -> tuple[Any, ...]:
        def one(member: Any, index: Array) -> Any:
            return loss_fn(member, batch, None if key is None else jax.random.fold_in(key, index))

        totals, weights, metrics, *state = model.map(one)
        total, mean = totals.sum(), totals.mean()
        total = total - jax.lax.stop_gradient(total - mean)
        return total, weights.mean(), jax.tree.map(jnp.mean, metrics), *state

    return loss


def per_member(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer with a state, and a clipping, of its own for each member of an ensemble."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.vmap(optimizer.update)(updates, state, params)

    return optax.GradientTransformation(jax.vmap(optimizer.init), update)


def sample_dropout(
    model: PyTree, *args: Any, num_samples: int, key: Key[Array, ""], **kwargs: Any
) -> Any:
    """The outputs under `num_samples` dropout masks, [sample, …] (Gal & Ghahramani 2016)."""
    keys = jax.random.split(key, num_samples)
    return jax.vmap(lambda key: model(*args, key=key, **kwargs))(keys)


def per_example(
    loss_fn: Callable[..., Any],
) -> Callable[[PyTree, PyTree, Array | None], tuple[Losses, PyTree]]:
    """The loss and gradient of each example: `losses, gradients = f(model, batch, key)`.

    `losses` is float32[batch], the summed loss of each row; each leaf of `gradients` is [batch, …],
    and their sum over the batch is the gradient of the batch's summed loss. That takes the memory
    of the parameters once per row.
    """

    def losses_and_gradients(
        model: PyTree, batch: PyTree, key: Array | None
    ) -> tuple[Losses, PyTree]:
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def one(example: PyTree, index: Array) -> tuple[Array, PyTree]:
            row = jax.tree.map(lambda x: x[None], example)
            row_key = None if key is None else jax.random.fold_in(key, index)

            def loss(params: PyTree) -> Array:
                return loss_fn(eqx.combine(params, static), row, row_key)[0].astype(jnp.float32)

            return jax.value_and_grad(loss)(params)

        num_rows = jax.tree.leaves(batch)[0].shape[0]
        with sharding.mapped("batch") as axes:
            return jax.vmap(one, spmd_axis_name=axes)(batch, jnp.arange(num_rows))

    return losses_and_gradients
