"""The state of a training: `TrainState`, born sharded by `init_state`, and the model before it."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int32, Key, PyTree

from zoo import sharding
from zoo.nn.precision import LossScale
from zoo.nn.products import is_quantized
from zoo.nn.stateful import cast, is_load_bias, is_state
from zoo.sharding.axes import check_model, is_parameter, keystr

Trainable = Callable[[PyTree], PyTree]  # from a model to a tree of booleans like it


class TrainState(eqx.Module):
    """The whole state of a run: with it and the data's position, training resumes bit for bit."""

    model: PyTree
    """The model, with fp32 master weights; what is frozen, in the dtype that it came in."""
    opt_state: PyTree
    """The optimizer's state for what is trained."""
    step: Int32[Array, ""]
    """Steps done, skipped ones included."""
    key: Key[Array, ""]
    """Root of dropout's random numbers: folded with the step, then with the microbatch."""
    loss_scale: LossScale
    """The factor of the loss in fp16, which keeps small gradients from rounding to 0."""
    skipped: Int32[Array, ""]
    """Steps whose result was not finite, which changed nothing."""


@dataclass(frozen=True)
class Pretrained:
    """A stored model to begin with, which is loaded as often as a training needs its arrays."""

    skeleton: PyTree
    """The model, with a `jax.ShapeDtypeStruct` in the place of each array."""
    load: Callable[[], PyTree]
    """Its arrays, on the run's mesh. The caller owns what it returns, and may donate it."""
    checksum: str = ""
    """Checksum of the files. With one, a checkpoint holds what is trained, and this checksum."""
    flag: str = "--model"
    """The flag that names it, for messages."""


def skeleton_of(pretrained: PyTree) -> PyTree:
    """The skeleton of a `Pretrained`; a model as it is."""
    return pretrained.skeleton if isinstance(pretrained, Pretrained) else pretrained


def init_state(
    make_model: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    *,
    key: Key[Array, ""],
    mesh: Mesh | sharding.Layout | None = None,
    trainable: Trainable | None = None,
    pretrained: PyTree = None,
) -> TrainState:
    """The state that training starts from, born sharded: no device ever holds a whole parameter.

    `make_model(key)` builds the model; or, given a `pretrained` one, `make_model(key, pretrained)`
    adapts that. `mesh` may be a `zoo.Layout`, which also names what has no annotation.
    Initialisation and dropout take separate streams of `key`. Parameters that are not `trainable`
    (see `make_train_step`) keep their dtype, and have no optimizer state; the others are float32. A
    `pretrained` model stays the caller's, and the state has a copy of it; of a `Pretrained`, which
    is loaded here, the state takes over the arrays themselves.

    Raises:
        ShardingError: a parameter that the rules or the mesh cannot shard, or a pattern of the
            layout's `axes` that names nothing.
        TypeError: a model in place of `make_model`, or `optimizer` is not an optax transformation.
    """
    return Blueprint(
        make_model, optimizer, key=key, mesh=mesh, trainable=trainable, pretrained=pretrained
    ).state()


class Blueprint:
    """A state that is not made yet; the arguments are `init_state`'s."""

    def __init__(
        self,
        make_model: Callable[..., PyTree],
        optimizer: optax.GradientTransformation,
        *,
        key: Key[Array, ""],
        mesh: Mesh | sharding.Layout | None = None,
        trainable: Trainable | None = None,
        pretrained: PyTree = None,
    ):
        check_optimizer(optimizer)
        if any(map(eqx.is_array, jax.tree.leaves(make_model))) or not callable(make_model):
            raise TypeError(
                f"make_model is a {type(make_model).__name__}: give a function from a key to a "
                "model; to train an existing one, lambda key, model: model with pretrained=model"
            )
        layout = sharding.layout_of(mesh)
        weights, rest = eqx.partition(skeleton_of(pretrained), is_parameter)

        def build(key: Key[Array, ""], *weights: PyTree) -> TrainState:
            init_key, dropout_key = jax.random.split(key)
            with sharding.use(layout.without_mesh):  # which says what the axes of parameters are
                model = make_model(init_key, *(eqx.combine(w, rest) for w in weights))
            trained = trained_leaves(model, trainable)
            model = jax.tree.map(  # master weights; the statistics of a State likewise
                lambda x, role: x if role == "frozen" else cast(x, jnp.float32),
                model,
                _roles(model, trainable),
            )
            with standard_promotion(), sharding.use(layout.without_mesh):
                opt_state = optimizer.init(eqx.filter(model, trained))
            zero = jnp.zeros((), jnp.int32)
            return TrainState(model, opt_state, zero, dropout_key, LossScale.init(), zero)

        self._build, self._trainable, self._pretrained = build, trainable, pretrained
        self._given: tuple[Any, ...] = (key,) if pretrained is None else (key, weights)
        self._arrays, self._static = eqx.partition(
            eqx.filter_eval_shape(build, *self._given),
            lambda x: isinstance(x, jax.ShapeDtypeStruct),
        )
        self._placed: Any = None
        with sharding.use(layout.without_mesh):
            check_model(self._arrays.model, layout)
            if layout.mesh is not None:
                self._placed = state_shardings(self._arrays, layout.mesh)
        self._layout = layout

    def state(self) -> TrainState:
        """The state, born sharded."""
        return eqx.combine(self._made(True), self._static)

    @property
    def skeleton(self) -> TrainState:
        """The state with a ShapeDtypeStruct, sharded on a mesh, for each array: for a restore."""
        arrays = self._arrays
        if self._placed is not None:
            arrays = jax.tree.map(
                lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                arrays,
                self._placed,
            )
        return eqx.combine(arrays, self._static)

    def frozen(self) -> TrainState:
        """The frozen parameters of the state, with None in all other places."""
        frozen = frozen_leaves(self.skeleton.model, self._trainable)
        chosen = jax.tree.map(lambda _: False, self._arrays)
        return self._made(_with_model(chosen, frozen))

    def _made(self, chosen: PyTree) -> Any:
        """The chosen arrays of the state; what they do not need is not computed."""
        if not jax.tree.leaves(eqx.filter(self._arrays, chosen)):
            return eqx.filter(self._arrays, chosen)
        given, pretrained, build = self._given, self._pretrained, self._build
        taken = isinstance(pretrained, Pretrained)
        if taken:
            loaded = eqx.filter(pretrained.load(), eqx.is_array)
            if text := difference(described(loaded), described(given[1])):
                raise ValueError(f"`load` of a Pretrained is unlike its skeleton: {text}")
            given = (given[0], loaded)
        self._check_devices(given[1:])
        # `eqx.filter_jit` takes no output shardings.
        make = jax.jit(
            lambda *given: eqx.filter(eqx.filter(build(*given), eqx.is_array), chosen),
            out_shardings=None if self._placed is None else eqx.filter(self._placed, chosen),
            donate_argnums=(1,) if taken else (),
        )
        with warnings.catch_warnings(), sharding.use(self._layout.without_mesh):
            # Buffers of what is trained are not: float32 does not fit into their place.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return make(*given)

    def _check_devices(self, weights: PyTree) -> None:
        """Raise a ValueError for weights on other devices than the mesh's."""
        mesh = self._layout.mesh
        for path, x in jax.tree_util.tree_leaves_with_path(weights) if mesh is not None else ():
            devices = x.devices() if isinstance(x, jax.Array) and x.committed else None
            if devices not in (None, {*mesh.devices.flat}):
                raise ValueError(
                    f"pretrained.{keystr(path[1:])} is on {len(devices)} device(s), and the mesh "
                    f"{dict(mesh.shape)} on {mesh.size}: load the model there, by "
                    "zoo.load(…, mesh=…); a run's mesh is run.mesh"
                )


def without_frozen(state: TrainState, trainable: Trainable | None) -> TrainState:
    """A state, or a skeleton of one, with None in the place of frozen parameters."""
    frozen = frozen_leaves(state.model, trainable)
    return _with_model(state, eqx.filter(state.model, frozen, inverse=True))


def _with_model(state: TrainState, model: PyTree) -> TrainState:
    return eqx.tree_at(lambda s: s.model, state, model)


def described(tree: PyTree) -> dict[str, str]:
    """The dtype and shape of each array of a tree or a skeleton, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves if is_parameter(x)}


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """The first entry that is not as expected, in words; "" where all are."""
    for name in {**expected, **found}:
        if (now := found.get(name, "absent")) != (was := expected.get(name, "absent")):
            return f"{name} is {now}, and has to be {was}"
    return ""


def _roles(model: PyTree, trainable: Trainable | None) -> PyTree:
    """Each leaf as "trained"; "moved" by a step, as a `LoadBias`; "kept", in a State; "frozen"."""
    chosen = jax.tree.map(lambda _: True, model) if trainable is None else trainable(model)

    def visit(node: Any, chosen: PyTree) -> PyTree:
        if is_load_bias(node):
            return jax.tree.map(lambda chosen: "moved" if chosen else "kept", chosen)
        if is_state(node) or is_quantized(node):
            return jax.tree.map(lambda _: "kept" if is_state(node) else "frozen", node)
        return "trained" if chosen and eqx.is_inexact_array(node) else "frozen"

    is_one = lambda x: is_load_bias(x) or is_state(x) or is_quantized(x)  # noqa: E731
    return jax.tree.map(visit, model, chosen, is_leaf=is_one)


def frozen_leaves(model: PyTree, trainable: Trainable | None) -> PyTree:
    """A tree of booleans: whether a leaf of a model or a skeleton is an array that never changes.

    An `eqx.nn.State` or a `LoadBias` is not trained, and changes.
    """
    found: list[PyTree] = []
    # For a skeleton as for a model: `trainable` may look for arrays.
    eqx.filter_eval_shape(lambda model: found.append(_roles(model, trainable)), model)
    return jax.tree.map(lambda x, role: is_parameter(x) and role == "frozen", model, found[0])


def trained_leaves(model: PyTree, trainable: Trainable | None) -> PyTree:
    """A tree of booleans: whether a leaf of a model is trained.

    What an `eqx.nn.State`, a `LoadBias` and a quantised matrix hold is not.
    """
    trained = jax.tree.map(lambda role: role == "trained", _roles(model, trainable))
    if not any(jax.tree.leaves(trained)):
        fix = "freeze less of it" if trainable else "a model has arrays of floats"
        raise ValueError(f"nothing of the model, a {type(model).__name__}, is trainable: {fix}")
    return trained


def balanced_leaves(model: PyTree, trainable: Trainable | None) -> PyTree:
    """A tree of booleans: whether a leaf of a model is a `LoadBias` that a step moves."""
    return jax.tree.map(lambda role: role == "moved", _roles(model, trainable))


def state_shardings(state: TrainState, mesh: Mesh) -> Any:
    """The NamedSharding of each array of a state (or of its skeleton): None for other leaves."""
    arrays = eqx.filter(state, is_parameter)
    counters = jax.tree.map(lambda _: sharding.replicated(mesh), arrays)
    model = sharding.shardings(arrays.model, mesh)
    opt_state = sharding.like_parameters(arrays.opt_state, arrays.model, mesh)
    return eqx.tree_at(lambda s: (s.model, s.opt_state), counters, (model, opt_state))


def check_optimizer(optimizer: Any) -> None:
    """Raise a TypeError for something other than an optimizer."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"optimizer={optimizer!r}: give an optax.GradientTransformation, as optax.adam(1e-3) is"
        )


def check_opt_state(optimizer: optax.GradientTransformation, params: PyTree, found: PyTree) -> None:
    """Raise a ValueError for the state of another optimizer, or of other parameters."""
    is_kind = lambda x: isinstance(x, tuple) and hasattr(x, "_fields")  # noqa: E731

    def kinds(tree: PyTree) -> dict[str, str]:
        nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kind)
        found = {keystr(path): type(x).__name__ for path, x in nodes if is_kind(x)}
        return {**found, **described(tree)}

    with standard_promotion():
        expected = eqx.filter_eval_shape(optimizer.init, params)
    if text := difference(kinds(found), kinds(expected)):
        raise ValueError(
            f"optimizer: the step's is not the one that the state was made with: {text}; give "
            "init_state and make_train_step the same optimizer, and the same trainable"
        )


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Optimizers are not ours, and need not be as strict about dtypes and ranks as the zoo."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
