"""The state of a training: `TrainState`, born sharded by `init_state`, and how it is placed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int32, Key, PyTree

from zoo import sharding
from zoo.nn.parameters import cast
from zoo.nn.precision import LossScale
from zoo.nn.stateful import is_state
from zoo.sharding.axes import check_model, is_parameter

Trainable = Callable[[PyTree], PyTree]  # from a model to a tree of booleans like it


class TrainState(eqx.Module):
    """The whole state of a run: with it and the data's position, training resumes bit for bit."""

    model: PyTree  # fp32 master weights
    opt_state: PyTree
    step: Int32[Array, ""]  # steps done, skipped ones included
    key: Key[Array, ""]  # root of dropout: folded with the step, then with the microbatch
    loss_scale: LossScale  # used in fp16
    skipped: Int32[Array, ""]  # steps whose result was not finite, which changed nothing


def init_state(
    make_model: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    *,
    key: Key[Array, ""],
    mesh: Mesh | None = None,
    rules: sharding.Rules | None = None,
    axes: sharding.Axes | None = None,
    strict: bool = False,
    trainable: Trainable | None = None,
    pretrained: PyTree = None,
) -> TrainState:
    """The state that training starts from, born sharded: no device ever holds a whole parameter.

    `make_model(key)` builds the model; or, given a `pretrained` one, `make_model(key, pretrained)`
    adapts that. Initialisation and dropout take separate streams of `key`. Parameters that are not
    `trainable` (see `make_train_step`) have no optimizer state. `axes` names what has no
    annotation, and `strict` refuses what nothing names (see `sharding.shardings`).

    Raises:
        ShardingError: a parameter that the rules or the mesh cannot shard, a rule for a mesh axis
            that there is not, or a pattern of `axes` that names nothing.
        TypeError: a model in place of `make_model`, or an optimizer that is none.
    """
    names = (rules, axes, strict)
    build, given, skeleton, static = _blueprint(
        make_model, optimizer, key, trainable, pretrained, *names
    )
    with sharding.use(None, rules, axes, strict=strict):
        placed = None if mesh is None else state_shardings(skeleton, mesh)
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
    axes: sharding.Axes | None = None,
    strict: bool = False,
    trainable: Trainable | None = None,
    pretrained: PyTree = None,
) -> TrainState:
    """The result of `init_state` with a sharded ShapeDtypeStruct for each array, for a restore."""
    names = (rules, axes, strict)
    *_, skeleton, static = _blueprint(make_model, optimizer, key, trainable, pretrained, *names)
    if mesh is not None:
        with sharding.use(None, rules, axes, strict=strict):
            placed = state_shardings(skeleton, mesh)
        skeleton = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            skeleton,
            placed,
        )
    return eqx.combine(skeleton, static)


def _blueprint(
    make_model: Any,
    optimizer: Any,
    key: Key[Array, ""],
    trainable: Any,
    pretrained: PyTree,
    rules: sharding.Rules | None,
    axes: sharding.Axes | None,
    strict: bool,
) -> tuple[Any, Any, Any, Any]:
    """The function that builds a state, its arguments, the skeleton of its arrays, and the rest."""
    sharding.check_rules(rules)
    sharding.check_axes(axes)
    check_optimizer(optimizer)
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
        with sharding.use(None, rules, axes):  # which say what the axes of its parameters are
            model = make_model(init_key, *(eqx.combine(w, rest) for w in weights))
        model = cast(model, jnp.float32)
        with standard_promotion(), sharding.use(None, rules, axes):
            opt_state = optimizer.init(eqx.filter(model, trained_leaves(model, trainable)))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(model, opt_state, zero, dropout_key, LossScale.init(), zero)

    skeleton, static = eqx.partition(
        eqx.filter_eval_shape(build, *given), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    with sharding.use(None, rules):
        check_model(skeleton.model, axes, strict=strict)
    return build, given, skeleton, static


def trained_leaves(model: PyTree, trainable: Trainable | None) -> PyTree:
    """A tree of booleans: whether a leaf of a model is trained, which an `eqx.nn.State` is not."""
    chosen = jax.tree.map(lambda _: True, model) if trainable is None else trainable(model)
    chosen = jax.tree.map(lambda x, chosen: chosen and eqx.is_inexact_array(x), model, chosen)
    trained = jax.tree.map(
        lambda x: jax.tree.map(lambda _: False, x) if is_state(x) else x, chosen, is_leaf=is_state
    )
    if not any(jax.tree.leaves(trained)):
        fix = "freeze less of it" if trainable else "a model has arrays of floats"
        raise ValueError(f"nothing of the model, a {type(model).__name__}, is trainable: {fix}")
    return trained


def state_shardings(state: TrainState, mesh: Mesh, rules: sharding.Rules | None = None) -> Any:
    """The NamedSharding of each array of a state (or of its skeleton): None for other leaves."""
    arrays = eqx.filter(state, is_parameter)
    counters = jax.tree.map(lambda _: sharding.replicated(mesh), arrays)
    model = sharding.shardings(arrays.model, mesh, rules)
    opt_state = sharding.like_parameters(arrays.opt_state, arrays.model, mesh, rules)
    return eqx.tree_at(lambda s: (s.model, s.opt_state), counters, (model, opt_state))


def check_optimizer(optimizer: Any) -> None:
    """Raise a TypeError for something other than an optimizer."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"optimizer={optimizer!r}: give an optax.GradientTransformation, as optax.adam(1e-3) is"
        )


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Optimizers are not ours, and need not be as strict about dtypes and ranks as the zoo."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
