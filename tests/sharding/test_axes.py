"""Modules that are not the zoo's: the names of their axes, their kinds, training on any mesh."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from equinox import nn
from helpers import arrays, state_and_step
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

import zoo
from zoo import optimizers, sharding
from zoo.planning import targets
from zoo.planning.job import Job, make_estimate
from zoo.runs.config import Config as RunConfig
from zoo.sharding import ShardingError, logical_axes, make_mesh
from zoo.sharding.axes import BUILT_IN, keystr, map_parameters
from zoo.sharding.rules import in_force
from zoo.training.state import Blueprint
from zoo.wrappers import lora

if TYPE_CHECKING:
    from nowhere import Missing

KEY = jax.random.key(0)
SPLIT = "fsdp=2,tensor=2"


# Annotations


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        ("embed mlp", (8, 4), ("embed", "mlp")),
        ("4 embed", (4, 8), (None, "embed")),
        ("_ embed", (4, 8), (None, "embed")),
        ("_rows embed", (4, 8), (None, "embed")),
        ("... embed", (2, 4, 8), (None, None, "embed")),
        ("... embed", (8,), ("embed",)),
        ("embed ...", (8, 2, 4), ("embed", None, None)),
        ("mlp *rest embed", (4, 2, 2, 8), ("mlp", None, None, "embed")),
        ("*batch embed", (2, 4, 8), (None, None, "embed")),
        ("*#batch embed", (2, 8), (None, "embed")),
        ("#mlp embed", (4, 8), ("mlp", "embed")),
        ("#mlp embed", (1, 8), (None, "embed")),
        ("embed=8 mlp", (8, 4), ("embed", "mlp")),
        ("?mlp embed", (4, 8), ("mlp", "embed")),
        ("dim+1 embed", (5, 8), (None, "embed")),
        ("min(a,b) embed", (5, 8), (None, "embed")),
        ("", (), ()),
        ("", (3,), (None,)),  # stacked scalars
        ("embed", (3, 8), (None, "embed")),  # stacked vectors
    ],
)
def test_all_of_jaxtyping_is_read(dims: str, shape: tuple, expected: tuple):
    cls = type("Made", (eqx.Module,), {"__annotations__": {"x": Float[Array, dims]}})
    assert logical_axes(cls(jnp.zeros(shape))).x == expected


class Containers(eqx.Module):
    pair: tuple[Float[Array, "embed"], dict[str, Float[Array, "mlp"]]]
    tree: PyTree[Float[Array, "vocab"]]
    either: Float[Array, "mlp"] | list[Float[Array, "embed"]] | None
    by_rank: Float[Array, "embed"] | Float[Array, "embed mlp"]
    bare: Array
    shapeless: Float[Array, "..."]


def test_annotations_inside_containers_are_found():
    x = jnp.zeros(8)
    found = logical_axes(
        Containers((x, {"a": x}), [x, (x,)], [x], jnp.zeros((8, 4)), x, jnp.zeros((8, 4)))
    )
    assert found.pair == (("embed",), {"a": ("mlp",)})
    assert found.tree == [("vocab",), (("vocab",),)]
    assert found.by_rank == ("embed", "mlp")
    # These say nothing of their axes.
    assert (found.bare, found.shapeless) == (("element",), ("unnamed", "unnamed"))


class Unresolved(eqx.Module):
    known: Float[Array, "embed"]
    lost: "dict[str, Missing]"


def test_unresolved_annotations_are_named():
    x = jnp.zeros(8)
    assert logical_axes(Unresolved(x, {})).known == ("embed",)
    model = Unresolved(x, {"a": x})
    with pytest.raises(ShardingError, match=r"Unresolved\.lost .*'Missing'"):
        logical_axes(model)
    with sharding.use(zoo.Layout(axes={"lost.*": "mlp"})):
        assert logical_axes(model).lost == {"a": ("mlp",)}


class Documented(eqx.Module):
    """Annotated for its reader alone."""

    weight: Float[Array, "out in"]
    axes: tuple = (0, 1)  # not the zoo's field of this name


def test_unknown_names_want_rules_or_axes():
    model = Documented(jnp.zeros((8, 4)))
    with pytest.raises(ShardingError, match=r"weight: .* 'out' .* rules"):
        sharding.shardings(model, make_mesh(SPLIT))
    rules = {**sharding.RULES, "out": "tensor", "in": None}
    assert sharding.shardings(model, zoo.Layout(SPLIT, rules)).weight.spec == P("tensor", None)
    named = sharding.shardings(model, zoo.Layout(SPLIT, axes={"weight": "mlp embed"}))
    assert named.weight.spec == P("tensor", "fsdp")


# Equinox's layers

# Sizes that differ, so that each name can be told by the size of its axis.
OUT, IN, HIDDEN, WINDOW = 3, 5, 7, 2
SIZES = {"fan_out": OUT, "fan_in": IN, "vocab": IN, "embed": OUT, "heads": WINDOW * OUT}
HEADS = {"qk_size": OUT, "vo_size": OUT, "use_query_bias": True, "use_output_bias": True}


def gates(count: int) -> dict[str, Any]:
    outputs = {"unnamed": count * HIDDEN}
    weights = {"weight_ih": outputs | {"fan_in": IN}, "weight_hh": outputs | {"fan_in": HIDDEN}}
    return {**weights, "bias": {"element": count * HIDDEN}}


# Layers, and of each of their arrays the names, or the sizes that they have here.
LAYERS: list[tuple[Callable[[], Any], dict[str, str | dict[str, int]]]] = [
    (lambda: nn.Linear(IN, OUT, key=KEY), {"weight": "fan_out fan_in", "bias": "fan_out"}),
    (
        lambda: nn.Conv2d(2 * IN, 2 * OUT, WINDOW, groups=2, key=KEY),
        {
            "weight": {"fan_out": 2 * OUT, "fan_in": IN, "element": WINDOW},
            "bias": {"fan_out": 2 * OUT, "element": 1},
        },
    ),
    (
        lambda: nn.ConvTranspose1d(IN, OUT, WINDOW, key=KEY),
        {
            "weight": {"fan_out": OUT, "fan_in": IN, "element": WINDOW},
            "bias": {"fan_out": OUT, "element": 1},
        },
    ),
    (lambda: nn.Embedding(IN, OUT, key=KEY), {"weight": "vocab embed"}),
    (
        lambda: nn.MultiheadAttention(WINDOW, OUT, **HEADS, key=KEY),
        {
            **{f"{name}_proj.weight": "heads embed" for name in ("query", "key", "value")},
            **{"query_proj.bias": "heads", "output_proj.weight": "embed heads"},
            "output_proj.bias": "embed",
        },
    ),
    (lambda: nn.GRUCell(IN, HIDDEN, key=KEY), {**gates(3), "bias_n": {"element": HIDDEN}}),
    (lambda: nn.LSTMCell(IN, HIDDEN, key=KEY), gates(4)),
    (
        lambda: nn.WeightNorm(nn.Linear(IN, OUT, key=KEY)),
        {"layer.weight": "fan_out fan_in", "layer.bias": "fan_out", "g": {"element": 1}},
    ),
    *(
        (make, {"weight": {"element": OUT}, "bias": {"element": OUT}})
        for make in (
            lambda: nn.LayerNorm((OUT, OUT)),
            lambda: nn.RMSNorm(OUT),
            lambda: nn.GroupNorm(1, OUT),
            lambda: nn.make_with_state(nn.BatchNorm)(OUT, "batch", mode="ema")[0],
        )
    ),
]


def test_built_in_names_fit_the_real_layout():
    tested = set()
    for make, expected in LAYERS:
        layer = make()
        tested |= set(type(layer).__mro__)
        names = arrays_named(layer)
        assert names.keys() == expected.keys() == arrays(layer).keys()
        for path, x in arrays(layer).items():
            sizes: dict = {}
            for axis, size in zip(names[path], x.shape, strict=True):
                sizes.setdefault(axis, size if path != "g" else 1)
            want = expected[path]
            want = {n: SIZES[n] for n in want.split()} if isinstance(want, str) else want
            assert sizes == want, path
        # A stack of them has an axis more, which has no name.
        stacked = jax.tree.map(lambda x: x[None] if eqx.is_array(x) else x, layer)
        assert arrays_named(stacked) == {path: (None, *axes) for path, axes in names.items()}
    assert BUILT_IN.keys() <= tested


def arrays_named(model: Any) -> dict[str, tuple]:
    found: dict[str, tuple] = {}
    map_parameters(lambda path, names, leaf: found.update({keystr(path): names}), model)
    return found


class Buffer(eqx.Module):
    """A matrix as state, which would be sharded by default."""

    index: nn.StateIndex

    def __init__(self):
        self.index = nn.StateIndex(jnp.ones((16, 8)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.make_with_state(nn.BatchNorm)(8, "batch", mode="ema"),
        nn.make_with_state(Buffer),
        lambda: (Buffer(), Buffer().index),  # before its state is taken out
    ],
    ids=["batch norm", "matrix", "inside"],
)
def test_state_is_replicated(make: Callable[[], Any]):
    model, state = make()
    placed = jax.tree.leaves(sharding.shardings((model, state), make_mesh("fsdp=8")))
    found = [x for x in placed if isinstance(x, NamedSharding)]
    assert found
    assert all(sharding.canonical(x) == () for x in found)
    assert not any(jax.tree.leaves(optimizers.matrices(state)))


# Names from outside


def net(key: Any = KEY) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    return {
        "linear": nn.Linear(8, 16, key=keys[0]),
        "table": jax.random.normal(keys[1], (6, 4)),
        "vector": jnp.ones(8),
        "annotated": Annotated(jnp.ones((8, 4))),
    }


class Annotated(eqx.Module):
    weight: Float[Array, "embed mlp"]


def test_given_names_come_before_built_in_ones():
    axes = {"*.weight": "mlp embed", "linear.*": "embed", "table": "_ mlp"}
    placed = sharding.shardings(net(), zoo.Layout(SPLIT, axes=axes))
    assert placed["linear"].weight.spec == P("tensor", "fsdp")  # the first that matches
    assert placed["linear"].bias.spec == P("fsdp")
    assert placed["table"].spec == P(None, "tensor")
    assert placed["annotated"].weight.spec == P("fsdp", "tensor")  # as its annotation says


def test_names_may_be_given_by_a_function():
    def axes(path: str, leaf: Any) -> str | None:
        return "embed" if path == "vector" and leaf.shape == (8,) else None

    placed = sharding.shardings(net(), zoo.Layout(SPLIT, axes=axes))
    assert placed["vector"].spec == P("fsdp")
    assert placed["linear"].weight.spec == P("tensor", "fsdp")


def test_names_that_do_not_fit_are_refused():
    sgd = optax.sgd(1.0)
    for axes, message in (
        ({"lienar.*": "mlp"}, r"axes=\{'lienar\.\*': 'mlp'\} names nothing.*linear.weight"),
        ({"annotated.*": "mlp embed"}, r"'annotated\.\*'.* names nothing.* are annotated.weight$"),
        ({"*": "mlp", "table": "mlp"}, "'table': 'mlp'} names nothing.* are table$"),
        ({"table": "a b"}, "table: the logical axis 'a' is not in the sharding rules"),
        ({"table": "_ _ embed"}, r"table has the shape \(6, 4\), of lower rank than its axes"),
        ({"table": "mlp embed", "linear.bias": "experts heads"}, "linear.bias has the shape"),
    ):
        layout = zoo.Layout(SPLIT, axes=axes)
        for place in (sharding.shardings, sharding.placement_table):
            with pytest.raises(ShardingError, match=message):
                place(net(), layout)
        with pytest.raises(ShardingError, match=message):
            Blueprint(net, sgd, key=KEY, mesh=layout)
    with pytest.raises(ShardingError, match=r"table .* \(6, 4\): the size 6 .* tensor=4 of"):
        sharding.shardings(net(), zoo.Layout("tensor=4", axes={"table": "mlp embed"}))


def test_names_in_another_form_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    for axes, message in (
        ({"table": ("mlp",)}, r"axes=\{'table': \('mlp',\)\}: give a mapping"),
        (["table"], r"axes=\['table'\]: give a mapping .* or a function"),
    ):
        with pytest.raises(ShardingError, match=message):
            zoo.Layout(axes=axes)


def test_patterns_are_checked_without_a_mesh():
    with pytest.raises(ShardingError, match=r"'lienar': 'mlp'\} names nothing"):
        zoo.init_state(net, optax.sgd(1.0), key=KEY, mesh=zoo.Layout(axes={"lienar": "mlp"}))
    with pytest.raises(ShardingError, match=r"table .* \(6, 4\): .* axes, and"):
        zoo.init_state(net, optax.sgd(1.0), key=KEY, mesh=zoo.Layout(strict=True))


# Defaults, and what the mesh does not divide


def test_the_largest_dimension_that_divides_is_sharded():
    x = {"a": jnp.zeros((8, 16)), "b": jnp.zeros((8, 17)), "c": jnp.zeros((3, 5)), "d": jnp.ones(8)}
    placed = sharding.shardings(x, make_mesh("fsdp=8"))
    assert [placed[name].spec for name in "abcd"] == [
        P(None, "fsdp"),
        P("fsdp", None),
        P(None, None),
        P(None),
    ]


def rows_of(table: str) -> dict[str, str]:
    """The text after the first column of each row, with single spaces."""
    rows = [line.split() for line in table.splitlines()]
    return {row[0]: " ".join(row[1:]) for row in rows}


def test_the_placement_table_says_who_named_the_axes():
    mesh = make_mesh("fsdp=8")
    odd = {**net(), "odd": nn.Linear(3, 16, key=KEY)}
    table = sharding.placement_table(odd, zoo.Layout(mesh, axes={"vector": "embed"}))
    rows = rows_of(table)
    whole = "default, fsdp=8 does not divide 6 or 4"
    assert rows["table"] == f"6×4 float32 unnamed unnamed · · {whole} 96"
    assert rows["vector"] == "8 float32 embed fsdp given 4"
    assert rows["linear.weight"] == "16×8 float32 fan_out fan_in · fsdp eqx.nn.Linear 64"
    assert rows["odd.weight"].endswith("· · eqx.nn.Linear, fsdp=8 does not divide 3 192")
    assert rows["annotated.weight"] == "8×4 float32 embed mlp fsdp · annotation 16"
    *lines, advice = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "axes={'table': 'embed mlp'}" in advice
    named = sharding.placement_table(
        net(), zoo.Layout(mesh, axes={"table": "_ _", "vector": "embed"})
    )
    assert "default" not in named
    annotated = sharding.placement_table(net()["annotated"], mesh)
    assert "axes by" not in annotated
    assert "annotation" not in annotated


def test_the_placement_table_leaves_out_axes_of_one_device():
    assert "fsdp" not in sharding.placement_table(net()["annotated"], make_mesh("tensor=2"))
    assert "fsdp" in sharding.placement_table(net()["annotated"], make_mesh("fsdp=2"))
    vector = sharding.placement_table({"a": {"b": jnp.ones(8)}}, make_mesh("tensor=2"))
    assert "axes={'a.b': 'embed'}" in vector
    arrays = {"a": jnp.ones(8), "b": jnp.ones((8, 8)), "c": jnp.ones(8)}
    largest = sharding.placement_table(arrays, make_mesh("tensor=2"))
    assert "axes={'b': 'embed mlp'}" in largest


def test_strict_refuses_what_nobody_asked_for():
    mesh, named = make_mesh("fsdp=8"), {"vector": "embed", "table": "_ _"}
    for place in (sharding.shardings, sharding.placement_table):
        with pytest.raises(ShardingError, match=r"table .* \(6, 4\): .* axes"):
            place(net(), zoo.Layout(mesh, strict=True))
        place(net(), zoo.Layout(mesh, axes=named, strict=True))
        odd = {**net(), "odd": nn.Linear(3, 16, key=KEY)}
        with pytest.raises(ShardingError, match=r"odd.weight of .* fsdp=8 .* 3 of th"):
            place(odd, zoo.Layout(mesh, axes=named, strict=True))


def test_rules_move_the_built_in_axes():
    rules = {**sharding.RULES, "fan_out": ("tensor", "fsdp"), "fan_in": None, "unnamed": "tensor"}
    placed = sharding.shardings(net(), zoo.Layout(SPLIT, rules))
    assert placed["linear"].weight.spec == P(("fsdp", "tensor"), None)
    assert placed["table"].spec == P("tensor", None)


# Kinds


class Kinds(eqx.Module):
    conv: nn.Conv2d
    embedding: nn.Embedding
    cell: nn.GRUCell
    norm: nn.LayerNorm
    plain: jax.Array
    vector: jax.Array

    def __init__(self, key: Any = KEY):
        keys = jax.random.split(key, 3)
        self.conv = nn.Conv2d(2, 4, 3, key=keys[0])
        self.embedding = nn.Embedding(6, 4, key=keys[1])
        self.cell = nn.GRUCell(2, 4, key=keys[2])
        self.norm = nn.LayerNorm((2, 4))
        self.plain, self.vector = jnp.ones((4, 6)), jnp.ones(4)


def test_matrices_of_foreign_modules_are_found():
    found = arrays(jax.tree.map(np.bool_, optimizers.matrices(Kinds())))
    matrices = {"conv.weight", "embedding.weight", "cell.weight_ih", "cell.weight_hh", "plain"}
    assert {path for path, matrix in found.items() if matrix} == matrices
    assert len(found) > len(matrices) + 4
    dimensions = optimizers.muon_dimensions(Kinds())
    numbers = optax.contrib.MuonDimensionNumbers
    assert dimensions.conv.weight == numbers((0,), (1, 2, 3))
    assert dimensions.plain == numbers((0,), (1,))
    assert dimensions.embedding.weight is None
    assert dimensions.conv.bias is None
    with sharding.use(zoo.Layout(axes={"plain": "embed classes"})):
        assert optimizers.muon_dimensions(Kinds()).plain is None


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_foreign_matrices_are_decayed(name: str):
    config = optimizers.Config(name=name, learning_rate=0.5, weight_decay=0.2, schedule="constant")
    optimizer, model = optimizers.make_optimizer(config, 5), Kinds()
    params = eqx.filter(model, eqx.is_inexact_array)
    nothing = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(
            nothing, params
        )
    decayed = {path for path, x in arrays(updates).items() if np.abs(x).max() > 1e-6}
    matrices = {"conv.weight", "embedding.weight", "cell.weight_ih", "cell.weight_hh", "plain"}
    assert decayed == matrices - ({"embedding.weight"} if name == "muon" else set())


def test_foreign_matrices_have_adapters():
    adapted = lora.adapt(Kinds(), lora.Config(rank=2, targets=("plain", "conv.weight")), key=KEY)
    table = sharding.placement_table(
        adapted, make_mesh("fsdp=4")
    )  # which does not divide rows of 2
    assert rows_of(table)["plain.down"] == "4×2 float32 unnamed rank fsdp · default 8"
    merged = lora.merge(adapted)
    np.testing.assert_array_equal(merged.conv.weight, Kinds().conv.weight)


# Training


class Convolutions(eqx.Module):
    first: nn.Conv2d
    grouped: nn.Conv2d
    head: nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.first = nn.Conv2d(3, 8, 3, key=keys[0])
        self.grouped = nn.Conv2d(8, 8, 3, groups=2, key=keys[1])
        self.head = nn.Linear(8, 10, key=keys[2])

    def __call__(self, image: Array) -> Array:
        return self.head(self.grouped(jax.nn.relu(self.first(image))).mean((1, 2)))


class Block(eqx.Module):
    embedding: nn.Embedding
    norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    head: nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.embedding = nn.Embedding(24, 16, key=keys[0])
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(4, 16, key=keys[1])
        self.head = nn.Linear(16, 10, key=keys[2])

    def __call__(self, tokens: Array) -> Array:
        x = jax.vmap(self.embedding)(tokens)
        y = jax.vmap(self.norm)(x)
        return self.head((x + self.attention(y, y, y)).mean(0))


class Recurrent(eqx.Module):
    cell: nn.GRUCell
    head: nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.cell = nn.GRUCell(8, 16, key=keys[0])
        self.head = nn.Linear(16, 10, key=keys[1])

    def __call__(self, x: Array) -> Array:
        step = lambda hidden, x: (self.cell(x, hidden), None)
        return self.head(jax.lax.scan(step, jnp.zeros(16), x)[0])


def nets(key: Any) -> dict[str, Any]:
    """A net of each kind, so that one program trains them all."""
    keys = jax.random.split(key, 5)
    draw = lambda *shape: jax.random.normal(keys[4], shape) * 0.3
    return {
        "mlp": nn.MLP(8, 10, 32, 1, key=keys[0]),
        "convolutions": Convolutions(keys[1]),
        "block": Block(keys[2]),
        "recurrent": Recurrent(keys[3]),
        "plain": {"w": draw(8, 16), "b": jnp.zeros(16), "out": draw(16, 10)},
    }


def nets_batch(rows: int = 8) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=(rows, *shape)).astype(np.float32)
    return {
        "mlp": normal(8),
        "convolutions": normal(3, 6, 6),
        "block": draw.integers(0, 24, (rows, 5)).astype(np.int32),
        "recurrent": normal(4, 8),
        "labels": draw.integers(0, 10, rows).astype(np.int32),
    }


def nets_loss(model: Any, batch: Any, key: Any) -> tuple[Array, Array, dict]:
    plain = model["plain"]
    logits = {n: jax.vmap(net)(batch[n]) for n, net in model.items() if n != "plain"}
    logits["plain"] = jnp.tanh(batch["mlp"] @ plain["w"] + plain["b"][None]) @ plain["out"]
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = {name: cross_entropy(x, batch["labels"]).sum() for name, x in logits.items()}
    return sum(losses.values(), jnp.float32(0)), jnp.float32(batch["labels"].size), losses


def trained(optimizer: Any, mesh: Any, names: set[str]) -> tuple[list, dict[str, Any]]:
    """The metrics of three steps, and the parameters after them."""
    make_model = lambda key: {name: net for name, net in nets(key).items() if name in names}
    state, step = state_and_step(make_model, nets_loss, optimizer, mesh=mesh, clip_norm=1.0)
    metrics = []
    for _ in range(3):
        state, found = step(state, nets_batch())
        metrics.append({name: float(x) for name, x in found.items()})
    return metrics, {path: np.asarray(x) for path, x in arrays(state.model).items()}


def check_mesh(name: str, spec: str, names: set[str]) -> None:
    options: dict = {"learning_rate": 1e-2, "warmup_steps": 0}
    optimizer = optax.sgd(0.3)
    if name != "sgd":
        optimizer = optimizers.make_optimizer(optimizers.Config(name=name, **options), 10)
    expected, parameters = trained(optimizer, None, names)
    found, of_mesh = trained(optimizer, make_mesh(spec), names)
    for got, want in zip(found, expected, strict=True):
        assert names < want.keys()
        assert got == pytest.approx(want, rel=1e-5)
    start = arrays(eqx.filter_jit(nets)(KEY))
    for path, x in parameters.items():
        if name == "sgd":  # signs of what is near zero may differ
            np.testing.assert_allclose(of_mesh[path], x, rtol=1e-4, atol=1e-5, err_msg=path)
        assert np.abs(x - start[path]).max() > 1e-5, path


def test_foreign_modules_train_alike_on_a_mesh():
    check_mesh("sgd", SPLIT, {"block", "plain"})


@pytest.mark.slow
def test_foreign_modules_of_all_kinds_train_alike_on_a_mesh():
    names = {"mlp", "convolutions", "block", "recurrent", "plain"}
    check_mesh("muon", "data=2,fsdp=2,tensor=2", names)


class Regression(eqx.Module):
    linear: nn.Linear
    table: jax.Array

    def __init__(self, key: Any):
        self.linear, self.table = nn.Linear(8, 16, key=key), jnp.ones((16, 4))


def regression_loss(model: Regression, batch: Any, key: Any) -> tuple[Array, Array, dict]:
    y = jax.vmap(model.linear)(batch["inputs"]) @ model.table
    return jnp.square(y).sum(), jnp.float32(len(y)), {}


AXES = {"*table": "mlp embed"}


def regression(**changes: Any) -> zoo.Training:
    inputs = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    options = {"evaluate": lambda model, whole: {}, "axes": AXES, "strict": True, **changes}
    return zoo.Training(
        make_model=Regression,
        loss_fn=regression_loss,
        optimizer=optax.adam(1e-2),
        data=zoo.ArrayDataset({"inputs": inputs}, batch_size=8, seed=0),
        **options,
    )


def test_a_training_with_given_names_is_planned():
    job = Job(training=regression(), mesh="fsdp=4,tensor=2", precision="fp32")
    estimate = make_estimate(job, targets.parse("cpu:8"))
    assert estimate.memory.parameters == 4 * (8 * 16 / 8 + 16 / 2 + 16 * 4 / 8)
    refused = Job(training=regression(axes={"*bias": "mlp"}), mesh="fsdp=4", precision="fp32")
    with pytest.raises(ShardingError, match=r"table of .*: .* strict=True"):
        make_estimate(refused, targets.parse("cpu:8"))


def test_fit_shows_and_uses_the_given_names(tmp_path: Any, capsys: Any):
    seen = []

    def evaluate(model: Regression, whole: bool) -> dict[str, float]:
        seen.append((in_force.get().axes, model.table.sharding.spec))
        return {}

    options: dict = {"mesh": "fsdp=2,tensor=2", "precision": "fp32", "compilation_cache": None}
    with zoo.Run(RunConfig(run_dir=tmp_path / "run", steps=2, **options)) as run:
        state, _ = zoo.fit(run, regression(evaluate=evaluate))
    rows = rows_of(capsys.readouterr().out)
    assert rows["table"] == "16×4 float32 mlp embed tensor fsdp given 64"
    assert rows["linear.bias"] == "16 float32 fan_out tensor eqx.nn.Linear 32"
    assert sharding.canonical(state.model.table.sharding) == (("tensor",), ("fsdp",))
    assert seen
    assert all(axes == AXES for axes, _ in seen)
