"""zoo.optimizers: what decays, what muon turns, schedules, and state sharded as its parameters."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, assert_trees_close, make_transformer, state_and_step
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import zoo
from zoo import mlp, optimizers
from zoo.planning import collectives, hlo
from zoo.sharding.axes import is_parameter
from zoo.training.optimizers import Config, make_optimizer, make_schedule
from zoo.training.state import TrainState

NAMES = ["adam", "adamw", "lion", "adafactor", "muon"]
KEY = jax.random.key(0)


class Net(eqx.Module):
    """A parameter of every kind, in two layers, small enough to compile in no time."""

    embedding: Float[Array, "vocab embed"]
    wq: Float[Array, "embed heads head_dim"]
    wo: Float[Array, "heads head_dim embed"]
    w_up: Float[Array, "embed mlp"]
    bq: Float[Array, "heads head_dim"]
    scale: Float[Array, "embed"]

    def __init__(self) -> None:
        self.embedding = wave(8, 4)
        self.wq = wave(2, 4, 2, 3)
        self.wo = wave(2, 2, 3, 4)
        self.w_up = wave(2, 4, 6)
        self.bq = wave(2, 2, 3)
        self.scale = wave(2, 4)


def wave(*shape: int, shift: float = 0.0) -> Array:
    """Numbers that look random, of rank as full as the shape's."""
    count = np.arange(np.prod(shape), dtype=np.float32)
    return jnp.asarray(np.sin(count * count + np.float32(shift)).reshape(shape))


class Nets(eqx.Module):
    """A net for each optimizer, so that one program tests them all."""

    nets: dict[str, Net]


def nets_loss(model: Nets, batch: Any, key: Any) -> tuple[Array, Array, dict]:
    """The distance of each parameter from numbers of its own."""
    misses = [
        jnp.square(x - wave(*x.shape, shift=1.0 + index)).sum()
        for index, x in enumerate(jax.tree.leaves(model))
    ]
    weight = batch["weights"].sum()
    return sum(misses[1:], misses[0]) * weight, weight, {}


def chained() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_decayed_weights(0.1), optimizers.matrices),
        optax.adamw(1e-2),
    )


def partitioned() -> optax.GradientTransformation:
    def labels(tree: Any) -> Any:
        return jax.tree.map(lambda x: "matrix" if x else "vector", optimizers.matrices(tree))

    return optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.lion(1e-3)}, labels)


def factored() -> optax.GradientTransformation:
    """Adafactor on matrices as small as these."""
    return optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.scale(-0.01))


OPTIMIZERS = {name: lambda name=name: make_optimizer(Config(name=name), 100) for name in NAMES}
OPTIMIZERS["muon"] = lambda: make_optimizer(Config(name="muon", moment_dtype="bf16"), 100)
OPTIMIZERS |= {"chain": chained, "partition": partitioned, "factored": factored}
del OPTIMIZERS["adam"]  # a chain has it


@pytest.fixture(scope="module")
def stepped() -> tuple[TrainState, TrainState]:
    """The state after two steps of every optimizer on a mesh, and that on one device."""
    optimizer = optax.multi_transform(
        {name: make() for name, make in OPTIMIZERS.items()},
        lambda tree: Nets({name: name for name in OPTIMIZERS}),
    )
    states = []
    for spec in ("fsdp=2,tensor=2", ""):
        make_model = lambda key: Nets({name: Net() for name in OPTIMIZERS})
        options = {"mesh": zoo.make_mesh(spec), "clip_norm": 1.0}
        state, step = state_and_step(make_model, nets_loss, optimizer, **options)
        for _ in range(2):
            state, _ = step(state, {"weights": np.ones(4, np.float32)})
        states.append(state)
    return states[0], states[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mesh_steps_match_one_device(name: str, stepped: Any):
    """And the optimizer's state is sharded as the parameters are."""
    state, expected = stepped
    assert_trees_close(state.model.nets[name], expected.model.nets[name], rtol=1e-5)
    for path, start in arrays(Net()).items():
        assert (arrays(expected.model.nets[name])[path] != start).any()
    parameters = arrays(state.model.nets[name])
    moments = {k: x for k, x in arrays(state.opt_state.inner_states[name]).items() if x.ndim}
    alike = set()
    for path, x in moments.items():
        field = path.rpartition(".")[2]
        if field in parameters and x.shape == parameters[field].shape:
            assert x.sharding.is_equivalent_to(parameters[field].sharding, x.ndim), path
            alike.add(field)
    if name == "factored":
        placed = {(p.split(".")[-1], *x.shape): x.sharding.spec for p, x in moments.items()}
        assert placed["embedding", 8] == P("tensor")
        assert placed["embedding", 4] == P("fsdp")
    else:
        assert alike == parameters.keys()


def later_update(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, model: Any
) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(optimizer.update)(grads, state, model)


def first_update(optimizer: optax.GradientTransformation, grads: Any, model: Any) -> Any:
    return later_update(optimizer, grads, optimizer.init(model), model)[0]


@pytest.mark.parametrize("name", sorted({*NAMES} - {"adafactor"}))
def test_first_moments_are_kept_in_bf16(name: str):
    """Half of their memory, and updates as those of fp32 to the rounding of a moment."""
    model, updates = Net(), []
    for dtype in ("fp32", "bf16"):
        optimizer = make_optimizer(Config(name=name, moment_dtype=dtype, schedule="constant"), 5)
        state = optimizer.init(model)
        for shift in range(2):  # the first update has no moment from before
            gradients = jax.tree.map(lambda x, shift=shift: x + shift, model)
            update, state = later_update(optimizer, gradients, state, model)
        kept = {path: x.dtype for path, x in arrays(state).items() if x.ndim}
        firsts = [kept[path] for path in kept if ".mu." in path and "ns_coeffs" not in path]
        assert firsts == [jnp.dtype({"fp32": "float32", "bf16": "bfloat16"}[dtype])] * 6
        assert all(kept[path] == jnp.float32 for path in kept if ".nu." in path)
        updates.append(update)
    assert_trees_close(updates[1], updates[0], rtol=0.02)


# Weight decay


@pytest.mark.parametrize(
    ("name", "decays"),
    [
        ("adamw", {"embedding", "wq", "wo", "w_up"}),
        ("lion", {"embedding", "wq", "wo", "w_up"}),
        ("adafactor", {"embedding", "wq", "wo", "w_up"}),
        ("muon", {"wq", "wo", "w_up"}),  # which leaves the rest to adamw without decay
        ("adam", set()),
    ],
)
def test_only_matrices_are_decayed(name: str, decays: set[str]):
    config = Config(name=name, learning_rate=0.5, weight_decay=0.2, schedule="constant")
    optimizer, model = make_optimizer(config, 5), Net()
    nothing = jax.tree.map(jnp.zeros_like, model)
    updates = first_update(optimizer, nothing, model)
    assert decays < arrays(updates).keys()
    for path, update in arrays(updates).items():
        expected = -0.5 * 0.2 * np.asarray(getattr(model, path)) if path in decays else 0.0
        np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-7, err_msg=path)


def test_matrices_are_found_by_logical_axes():
    make_model = make_transformer(
        bias=True,
        **{"residual.norm": "layer", "attention.qk_norm": "per_head", "positions.kind": "learned"},
    )
    found: dict[bool, set[str]] = {True: set(), False: set()}
    skeleton = eqx.filter(eqx.filter_eval_shape(make_model, KEY), is_parameter)
    for path, matrix in jax.tree_util.tree_leaves_with_path(optimizers.matrices(skeleton)):
        found[matrix].add(path[-1].name)
    assert found[False] == {"scale", "bias", "bq", "bk", "bv", "bo", "b_up", "b_down"}
    assert found[True] == {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "weight"}


# Muon


def test_muon_orthogonalises_each_layers_matrix():
    dimensions = optimizers.muon_dimensions(Net())
    numbers = lambda *axes: optax.contrib.MuonDimensionNumbers(*axes)
    assert dimensions.wq == numbers((1,), (2, 3))  # [layers, embed, heads, head_dim]
    assert dimensions.wo == numbers((1, 2), (3,))  # [layers, heads, head_dim, embed]
    assert dimensions.w_up == numbers((1,), (2,))
    assert [dimensions.embedding, dimensions.bq, dimensions.scale] == [None] * 3


def test_muon_excludes_input_and_output_layers():
    config = mlp.Config(in_size=4, out_size=3, hidden_size=8, num_layers=3)
    model = eqx.filter_eval_shape(lambda key: mlp.MLP(config, key=key), jax.random.key(0))
    dimensions = optimizers.muon_dimensions(eqx.filter(model, lambda x: hasattr(x, "shape")))
    assert dimensions.blocks.up.linear.weight is not None
    assert dimensions.first.linear.weight is None
    assert dimensions.head.weight is None


def test_muon_updates_are_those_of_optax():
    """The second ones, which have moments from before."""
    theirs = optax.contrib.muon(
        1e-3,
        weight_decay=0.1,
        adam_b2=0.95,
        adam_learning_rate=1e-3,
        muon_weight_dimension_numbers=optimizers.muon_dimensions,
        consistent_rms=0.2,
    )
    model, updates = Net(), []
    for optimizer in (make_optimizer(Config(name="muon", schedule="constant"), 5), theirs):
        state = optimizer.init(model)
        for shift in (0.5, 1.5):
            gradients = jax.tree.map(lambda x, shift=shift: wave(*x.shape, shift=shift), model)
            update, state = later_update(optimizer, gradients, state, model)
        updates.append(update)
    assert_trees_close(updates[0], updates[1], rtol=1e-3)


class Stacks(eqx.Module):
    """Matrices in a stack of layers, in one of experts in layers, and by themselves."""

    layers: Float[Array, "embed mlp"]
    experts: Float[Array, "experts embed mlp"] | None
    alone: Float[Array, "embed mlp"] | None


def compiled_update(model: Stacks, spec: str) -> tuple[Any, jax.stages.Compiled]:
    """Muon's first update on a mesh, and its program."""
    optimizer, mesh = (
        make_optimizer(Config(name="muon", schedule="constant"), 5),
        zoo.make_mesh(spec),
    )
    placed = zoo.sharding.shardings(model, mesh)

    def update(model: Stacks) -> Stacks:
        return optimizer.update(model, optimizer.init(model), model)[0]

    with zoo.sharding.use(mesh), jax.numpy_dtype_promotion("standard"):
        step = jax.jit(update, in_shardings=(placed,), out_shardings=placed)
        program = step.lower(model).compile()
        return program(jax.device_put(model, placed)), program


@pytest.mark.parametrize("spec", ["fsdp=8", "fsdp=2,expert=2,tensor=2"])
def test_muon_on_a_mesh_matches_one_device_for_every_stack(spec: str):
    rng, shapes = np.random.default_rng(0), [(3, 8, 16), (3, 4, 16, 8), (8, 16)]
    model = Stacks(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))
    updates, expected = (compiled_update(model, mesh)[0] for mesh in (spec, ""))
    # Of `alone` each device has sums over a part, in another order.
    assert_trees_close(updates, expected, rtol=5e-5)


@pytest.mark.parametrize(("spec", "layers"), [("fsdp=8", 5), ("fsdp=4,tensor=2", 20)])
def test_muon_turns_each_matrix_on_one_device(spec: str, layers: int):
    """Devices exchange the parts of matrices, some of zeros, and multiply as many whole ones."""
    _, program = compiled_update(Stacks(wave(layers, 16, 24), None, None), spec)
    found = collectives.bytes_by_kind(collectives.collectives(hlo.read(program.as_text())))
    shares = [7 / 8] if spec == "fsdp=8" else [3 / 4, 1 / 2]  # of its own part, once per mesh axis
    assert {kind for kind, size in found.items() if size} == {"all-to-all"}
    each = -(-layers // 8)
    assert found["all-to-all"] == 2 * sum(shares) * each * 16 * 24 * 4  # there and back, in fp32
    products = each * 5 * (2 * 16 * 24 * 16 + 2 * 16**3 + 2 * 16 * 16 * 24)  # Newton-Schulz
    assert products <= program.cost_analysis()["flops"] < 1.5 * products


# Adafactor


def test_adafactor_update_is_clipped_to_rate():
    options: dict = {"learning_rate": 0.5, "weight_decay": 0.0, "schedule": "constant"}
    optimizer, model = make_optimizer(Config(name="adafactor", **options), 5), Net()
    grads = jax.tree.map(lambda x: wave(*x.shape, shift=0.5), model)

    @jax.jit
    def second_update(grads: Any, model: Any) -> Any:
        # After a gradient as small as this a number would change by 1.3 times the rate.
        small = jax.tree.map(lambda g: g * 1e-3, grads)
        _, state = optimizer.update(small, optimizer.init(model), model)
        return optimizer.update(grads, state, model)[0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates = arrays(second_update(grads, model))
    assert updates.keys() == arrays(model).keys()
    for path, update in updates.items():
        assert np.sqrt(np.mean(np.square(update))) == pytest.approx(0.5, rel=1e-3), path


# Schedules


def rates(steps: int, **options: Any) -> np.ndarray:
    schedule = make_schedule(Config(learning_rate=2.0, **options), steps)
    with jax.numpy_dtype_promotion("standard"):  # as optimizers run in the step
        return np.asarray(jax.vmap(schedule)(jnp.arange(steps + 1)))


def test_warm_up_is_linear_from_above_zero():
    for name in ("cosine", "wsd", "constant"):
        got = rates(200, schedule=name, warmup_steps=9)
        np.testing.assert_allclose(got[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-5)
    np.testing.assert_allclose(got[9:], 2.0)  # constant
    assert np.argmax(rates(50, warmup_steps=100)) == 5  # a tenth at most
    np.testing.assert_allclose(rates(1, warmup_steps=100, final_fraction=0.25), [2.0, 0.5])


def test_cosine_ends_at_the_final_fraction():
    got = rates(110, warmup_steps=10, final_fraction=0.25)
    np.testing.assert_allclose(got[[10, 60, 110]], [2.0, (2.0 + 0.5) / 2, 0.5], rtol=1e-5)
    assert (np.diff(got[10:]) < 0).all()


@pytest.mark.parametrize(("fraction", "first"), [(0.3, 70), (0.0, 99), (1.0, 10)])
def test_wsd_is_stable_then_decays_linearly(fraction: float, first: int):
    got = rates(100, warmup_steps=10, schedule="wsd", decay_fraction=fraction, final_fraction=0.1)
    np.testing.assert_allclose(got[10 : first + 1], 2.0, rtol=1e-6)
    np.testing.assert_allclose(np.diff(got[first:]), -1.8 / (100 - first), rtol=1e-3)
    assert got[-1] == pytest.approx(0.2, rel=1e-4)


def test_default_hyperparameters_are_frozen():
    """Another would change every run that does not name its own."""
    rates = {"learning_rate": 1e-3, "warmup_steps": 100, "weight_decay": 0.1}
    shares = {"decay_fraction": 0.2, "final_fraction": 0.1, "beta1": 0.9, "beta2": 0.95}
    expected = {"name": "adamw", "schedule": "cosine", **rates, **shares}
    assert dataclasses.asdict(Config()).items() >= expected.items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate=-1.0"),
        ({"decay_fraction": 1.5}, r"optimizer.decay_fraction=1.5: .* \[0, 1\]"),
        ({"parametrization": "mup"}, r"optimizer.base_width=None: 'mup'"),
        ({"base_width": 64}, "'standard' and optimizer.base_width=64: .* 'standard' takes none"),
        ({"parametrization": "mup", "base_width": 0}, r"optimizer.base_width=0:"),
        ({"learning_rate": np.nan}, r"optimizer.learning_rate=nan:"),
        ({"name": "adafactor", "moment_dtype": "bf16"}, "optimizer.moment_dtype='bf16': adafactor"),
        ({"beta1": 1.0}, r"optimizer.beta1=1.0: .* \[0, 1\)"),
    ],
)
def test_out_of_range_fields_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Config(**options)
