"""zoo.sharding: annotations place parameters, and what does not fit is an error by name."""

import ast
import dataclasses
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from helpers import small_config
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import zoo
from zoo import optimizers, sharding, transformer
from zoo.nn.parameters import left_stored, unshard, unshard_foreign
from zoo.sharding import make_mesh
from zoo.sharding.axes import ShardingError, is_parameter, logical_axes
from zoo.sharding.rules import is_matrix, matrix_axes
from zoo.sharding.specs import between

CUBE = "data=2,fsdp=2,tensor=2"


class Part(eqx.Module):
    weight: Float[Array, "embed mlp"]
    bias: Float[Array, "mlp"] | None
    name: str = eqx.field(static=True, default="part")


class Renamed(eqx.Module):
    weight: Float[Array, "in out"]
    axes: tuple = eqx.field(static=True, default=(("in", "mlp"), ("out", "embed")))


class Stacked(eqx.Module):
    part: Part
    stacked_axis: str = eqx.field(static=True, default="member")


class Model(eqx.Module):
    parts: list[Part]
    by_name: dict[str, Renamed]
    scales: tuple[Float[Array, "embed"], ...]
    rate: float = 0.1


def part(shape: tuple[int, ...] = (8, 4)) -> Part:
    return Part(jnp.zeros(shape), jnp.zeros(shape[-1]))


def model() -> Model:
    return Model([part(), part((3, 8, 4))], {"down": Renamed(jnp.zeros((4, 8)))}, (jnp.zeros(8),))


# Meshes


def test_make_mesh():
    for spec, sizes in (
        ("", {}),
        ("data=8", {"data": 8}),
        (" fsdp = 4 , tensor=2", {"fsdp": 4, "tensor": 2}),
        ("data=-1", {"data": 8}),
        ("tensor=2,data=-1", {"data": 4, "tensor": 2}),
        ("fsdp=3", {"fsdp": 3}),
        ({"fsdp": -1, "tensor": 4}, {"fsdp": 2, "tensor": 4}),
        ("fsdp=2,context=-1", {"fsdp": 2, "context": 4}),
    ):
        mesh = make_mesh(spec)
        assert mesh.axis_names == sharding.MESH_AXES
        assert mesh.shape == dict.fromkeys(sharding.MESH_AXES, 1) | sizes
        assert set(mesh.axis_types) == {AxisType.Auto}


def test_make_mesh_of_given_devices():
    assert list(make_mesh("data=-1", jax.devices()[2:5]).devices.flat) == jax.devices()[2:5]
    with pytest.raises(ShardingError, match=r"'data=4' needs 4 .* 3"):
        make_mesh("data=4", jax.devices()[:3])


def test_a_bad_mesh_is_an_error(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    for spec, message in (
        ("foo=2", "no axis 'foo'.*data.*fsdp.*tensor"),
        ({"model": 2}, "no axis 'model'"),
        ("data=x", "'data=x': the size of data is no integer"),
        ("data", "'data': the size of data is no integer"),
        ({"fsdp": 2.5}, "the size of fsdp is no integer"),
        (8, "mesh 8: name the axes"),
        ("data=4,data=1", "'data=4,data=1': each axis is named once"),
        ("data=-1,fsdp=-1", "one at most is -1"),
        ("data=0", "sizes are positive"),
        ("data=-2", "sizes are positive"),
        ("data=16", "needs 16 devices, and there are 8.*device_count=16"),
        ("fsdp=3,data=-1", "3 does not divide the 8 devices"),
        ("fsdp=16,data=-1", "16 does not divide the 8 devices"),
    ):
        with pytest.raises(ShardingError, match=message):
            make_mesh(spec)


# Annotations


def test_annotations_name_logical_axes():
    axes = logical_axes(model())
    assert axes.parts[0].weight == ("embed", "mlp")
    assert axes.parts[0].bias == ("mlp",)  # inside a union
    assert axes.parts[1].weight == (None, "embed", "mlp")  # stacked
    assert axes.by_name["down"].weight == ("mlp", "embed")  # renamed, an instance at a time
    assert axes.scales == (("embed",),)  # inside a container
    assert axes.rate == 0.1
    twice = part((2, 3, 8, 4))
    assert logical_axes(twice).weight == (None, None, "embed", "mlp")
    assert logical_axes(Stacked(twice)).part.weight == ("member", None, "embed", "mlp")

    weight = jnp.zeros((8, 4))
    assert logical_axes(Renamed(weight, (("in", ""), ("out", "mlp")))).weight == (None, "mlp")
    assert logical_axes(Renamed(weight, (("in", "mlp"), ("out", "")))).weight == ("mlp", None)


def test_shardings_follow_the_rules():
    mesh = make_mesh(CUBE)
    placed = sharding.shardings(model(), mesh)
    assert sharding.shardings(eqx.filter_eval_shape(model), mesh) == placed
    assert placed.parts[0].weight == NamedSharding(mesh, P("fsdp", "tensor"))
    assert placed.parts[1].weight == NamedSharding(mesh, P(None, "fsdp", "tensor"))
    assert placed.by_name["down"].weight == NamedSharding(mesh, P("tensor", "fsdp"))
    rules = {**sharding.RULES, "embed": None, "mlp": ("tensor", "fsdp")}
    placed = sharding.shardings(model(), zoo.Layout(mesh, rules))
    assert placed.parts[0].weight == NamedSharding(mesh, P(None, ("tensor", "fsdp")))


def test_a_mesh_axis_shards_one_dimension_only():
    mesh = make_mesh(CUBE)
    spec = sharding.partition_spec(("batch", "embed", "mlp", "heads"), mesh)
    assert spec == P(("data", "fsdp"), None, "tensor", None)
    assert sharding.partition_spec((("batch", "seq", "mlp"),), mesh) == P(
        ("data", "fsdp", "tensor")
    )
    assert sharding.partition_spec(("mlp", None), mesh, without=frozenset({"tensor"})) == P(
        None, None
    )


class Unknown(eqx.Module):
    table: Float[Array, "embed colour"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Unknown(jnp.zeros((8, 8))), r"table: .* 'colour' .* rules"),
        ({"a": part((8, 3))}, r"a\.weight of shape \(8, 3\): the size 3 .* tensor=2"),
        (
            eqx.tree_at(lambda p: p.weight, part(), jnp.zeros(8)),
            r"weight .* \(8,\), .* \('embed', 'mlp'\)",
        ),
    ],
    ids=["unknown axis", "does not divide", "lower rank"],
)
def test_unplaceable_parameters_are_named(tree: Any, message: str):
    mesh = make_mesh(CUBE)
    for place in (sharding.shardings, sharding.placement_table):
        with pytest.raises(ShardingError, match=message):
            place(tree, mesh)


def test_is_matrix():
    matrices = [("embed", "mlp"), (None, "embed", "heads", "head_dim"), ("vocab", "embed")]
    matrices += [("embed", "gates", "hidden"), ("experts", "embed", "mlp")]
    others = [(None, "heads", "head_dim"), (None, "embed"), (), ("gates", "hidden")]
    others += [("member", "experts", "embed")]
    for names in (*matrices, *others):
        assert is_matrix(names) is (names in matrices), names


def test_matrix_axes_split_inputs_and_outputs():
    for names, inputs, outputs in (
        ((None, "embed", "heads", "head_dim"), (1,), (2, 3)),
        ((None, "heads", "head_dim", "embed"), (1, 2), (3,)),
        (("member", None, "experts", "embed", "mlp"), (3,), (4,)),
        (("embed", "gates", "hidden"), (0,), (1, 2)),
        (("gates", "hidden", "embed"), (0, 1), (2,)),
    ):
        assert matrix_axes(names) == (inputs, outputs), names


class Grouped(eqx.Module):
    scale: Float[Array, "group embed"]
    weight: Float[Array, "group embed mlp"]


def grouped(key: Any = None) -> Grouped:
    return Grouped(jnp.ones((2, 8)), jnp.ones((2, 8, 4)))


def test_unknown_axes_are_not_matrix_dimensions():
    with pytest.raises(ShardingError, match=r"scale: .* axis 'group'"):
        optimizers.matrices(grouped())
    with pytest.raises(ShardingError, match=r"scale: 'batch' .* activations"):
        is_matrix(("batch", "embed"), field="scale")


def test_unknown_axis_kinds_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    with pytest.raises(ShardingError, match=r"kind='stck': .*'stack'"):
        sharding.Axis(None, "stck")


@pytest.mark.parametrize(
    ("rule", "of_scale"), [(sharding.Axis("tensor", "stack"), False), ("tensor", True)]
)
def test_rules_set_the_axis_kind(rule: Any, of_scale: bool):
    rules = {**sharding.RULES, "group": rule}
    mesh = make_mesh("fsdp=2,tensor=2")
    with sharding.use(zoo.Layout(mesh, rules)):
        assert optimizers.matrices(grouped()) == Grouped(of_scale, True)
        assert (optimizers.muon_dimensions(grouped()).scale is None) is not of_scale
        with sharding.mapped("group"):
            assert is_matrix(("group", "embed")) is of_scale
    spec = sharding.shardings(grouped(), zoo.Layout(mesh, rules)).weight.spec
    assert spec == P("tensor", "fsdp", None)  # the group has taken what would be for "mlp"


def test_weight_decay_uses_the_step_rules():
    """A stack of vectors is not decayed; the gradient is zero, and so decay alone changes them."""
    rules = {**sharding.RULES, "group": sharding.Axis("tensor", "stack")}
    mesh, key = make_mesh("tensor=2"), jax.random.key(0)
    config = optimizers.Config(learning_rate=0.1, warmup_steps=0, schedule="constant")
    optimizer = optimizers.make_optimizer(config, 10)
    state = zoo.init_state(grouped, optimizer, key=key, mesh=zoo.Layout(mesh, rules))

    def loss(model: Any, batch: Any, key: Any) -> tuple:
        return 0.0 * (model.scale.sum() + model.weight.sum()), jnp.float32(1), {}

    step = zoo.make_train_step(loss, optimizer, mesh=zoo.Layout(mesh, rules), precision="fp32")
    state, _ = step(state, {"x": jnp.zeros((2, 1))})
    assert (state.model.scale == 1).all()
    assert (state.model.weight < 1).all()


def test_stacked_axis_must_be_a_stack():
    with pytest.raises(ShardingError, match=r"part.weight: stacked_axis='embed' .* 'd"):
        logical_axes(Stacked(part((2, 8, 4)), "embed"))


def test_the_placement_table_adds_up():
    mesh = make_mesh(CUBE)
    config = small_config(**{"attention.num_kv_heads": 2})
    skeleton = eqx.filter_eval_shape(transformer.Transformer, config, key=jax.random.key(0))
    lines = sharding.placement_table(skeleton, mesh).splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    # float32[2, 32, 2, 4], of which a device holds [2, 16, 1, 4]
    path = "blocks.attention.wk"
    axes, placed = ["·", "embed", "kv_heads", "head_dim"], ["·", "fsdp", "tensor", "·"]
    assert rows[path] == [path, "2×32×2×4", "float32", *axes, *placed, "512"]
    sizes = [int(row[-1].replace(",", "")) for name, row in rows.items() if "." in name]
    assert rows["all"] == ["all", f"{sum(sizes):,}"]
    assert len(sizes) == len(jax.tree.leaves(eqx.filter(skeleton, is_parameter)))
    assert len({len(line) for line in lines}) == 1


def test_rules_for_unknown_mesh_axes_are_refused():
    for axes in ("tensro", ("fsdp", "tensro")):
        with pytest.raises(ShardingError, match=r"rule 'experts': .* 'tensro'"):
            zoo.Layout(rules={**sharding.RULES, "experts": axes})


# Optimizer state and batches


def test_optimizer_state_is_placed_like_parameters():
    mesh, parameters = make_mesh(CUBE), model()
    weight = jnp.zeros((3, 8, 4))
    state = {
        "mu": parameters,
        "factored": eqx.tree_at(
            lambda m: (m.parts[0].weight, m.parts[1].weight), parameters, (jnp.zeros(8), weight[0])
        ),
        "columns": eqx.tree_at(lambda m: m.parts[1].weight, parameters, weight[:, 0]),
        "placeholder": eqx.tree_at(lambda m: m.parts[0].weight, parameters, jnp.zeros(1)),
        "count": jnp.zeros((), jnp.int32),
        "other": jnp.zeros((8, 4)),
    }
    placed = sharding.like_parameters(state, parameters, mesh)
    assert jax.tree.leaves(placed["mu"]) == jax.tree.leaves(sharding.shardings(model(), mesh))
    assert placed["factored"].parts[0].weight.spec == P("fsdp")
    assert placed["factored"].parts[1].weight.spec == P("fsdp", "tensor")
    assert placed["columns"].parts[1].weight.spec == P(None, "tensor")
    for whole in (placed["placeholder"].parts[0].weight, placed["count"], placed["other"]):
        assert whole.spec == P()


def test_batches_shard_over_both_data_axes():
    mesh = make_mesh(CUBE)
    assert sharding.batch_sharding(mesh, 2).spec == P(("data", "fsdp"), None)
    assert sharding.batch_sharding(mesh, 0).spec == P()
    assert sharding.num_batch_parts(mesh) == 4
    assert sharding.num_batch_parts(zoo.Layout(CUBE, {"batch": "tensor"})) == 2
    assert sharding.num_batch_parts(make_mesh()) == 1


def test_equal_placements_have_equal_canonical_forms():
    mesh = make_mesh("data=2,tensor=2")
    same = [P("tensor"), P("tensor", None), P(("tensor",), "fsdp"), P(("fsdp", "tensor"))]
    assert len({sharding.canonical(NamedSharding(mesh, spec)) for spec in same}) == 1
    apart = [*same[:1], P(None, "tensor"), P("data"), P(("data", "tensor")), P()]
    assert len({sharding.canonical(NamedSharding(mesh, spec)) for spec in apart}) == 5


# Activations and parameters in a program


def inside(mesh: Any, function: Any, x: Any, rules: Any = None) -> Any:
    """The sharding that a value has in a compiled program."""
    found = []

    def program(x: Any) -> Any:
        jax.debug.inspect_array_sharding(function(x), callback=found.append)
        return 0

    # A program from the cache of an earlier run calls nobody back.
    program.__name__ = f"program_{uuid.uuid4().hex}"
    with sharding.use(zoo.Layout(mesh, rules)):
        jax.jit(program).lower(x).compile()
    return found[0]


# Dimensions that no rule may shard: everything else that is constrained has a name.
UNNAMED = {
    ("rnn", ("batch", None)): "the state, whole for the product with the recurrent weight",
    ("rnn", ("batch", None, "hidden")): "the terms of a cell",
    ("rnn", ("batch", "inner_seq", None, "hidden")): "the gates of a cell",
    ("decoding", ("batch", "kv_heads", None, "head_dim")): "the slots of a cache",
    ("decoding", ("batch", None, None, "head_dim")): "the slots of one that all heads share",
    ("wrappers", ("batch", None)): "the classes",
    ("wrappers", ("batch", "inner_seq", None)): "the classes of each token",
    ("transformer", ("batch", None)): "the classes of images",
    ("transformer", ("batch", None, None, None)): "images, whose patches are split",
}


def constrained() -> list[tuple[str, tuple[Any, ...]]]:
    """The room and the literal names of each call in zoo that names an activation's axes."""
    folder = Path(zoo.__file__).parent
    return [
        (
            path.relative_to(folder).parts[0],
            tuple(arg.value for arg in call.args if isinstance(arg, ast.Constant)),
        )
        for path in folder.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).split(".")[-1] in ("constrain", "num_parts")
    ]


def test_constrained_activations_name_their_axes():
    calls = constrained()
    assert ("nn", ("batch", "inner_seq")) in calls
    assert {x for x in calls if "batch" in x[1] and None in x[1]} == UNNAMED.keys()


def test_without_a_mesh_nothing_changes():
    x, tree = jnp.zeros((2, 3)), part()
    assert unshard(tree) is tree
    assert unshard_foreign(tree) is tree
    assert sharding.constrain(x, "batch") is x  # nor is it checked
    with sharding.use(make_mesh("")):
        assert sharding.constrain(x, "batch", "embed") is x


def test_constrain_shards_an_activation():
    mesh, x = make_mesh(CUBE), jnp.zeros((8, 4, 6))
    names = ("batch", "seq", "mlp")
    constrain = lambda x: sharding.constrain(x * 2, *names)
    expected = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
    assert inside(mesh, constrain, x).is_equivalent_to(expected, 3)
    expected = NamedSharding(mesh, P(("data", "fsdp"), "tensor", None))
    found = inside(mesh, constrain, x, sharding.SEQUENCE_PARALLEL)
    assert found.is_equivalent_to(expected, 3)
    mesh = make_mesh("fsdp=2,context=2,tensor=2")
    expected = NamedSharding(mesh, P("fsdp", "context", "tensor"))
    assert inside(mesh, constrain, x).is_equivalent_to(expected, 3)
    expected = NamedSharding(mesh, P("fsdp", ("context", "tensor"), None))
    found = inside(mesh, constrain, x, sharding.SEQUENCE_PARALLEL)
    assert found.is_equivalent_to(expected, 3)


def test_mesh_axes_of_a_dimension_are_text():
    assert sharding.split_by("seq") == ""
    with sharding.use(zoo.Layout("fsdp=2,context=4", sharding.SEQUENCE_PARALLEL)):
        assert sharding.split_by("seq") == "context=4"
        assert sharding.split_by("mlp") == ""
        with sharding.use(zoo.Layout(rules=sharding.whole_rows())):
            assert sharding.split_by("seq") == ""
            assert sharding.split_by("batch") == "fsdp=2"


def test_mismatched_constraints_are_refused():
    for shape, names, message in (
        ((8, 4), ("batch",), r"shape \(8, 4\) is named \('batch',\)"),
        ((8, 4), ("batch", "colour"), "logical axis 'colour'"),
        ((6, 4), ("batch", "embed"), r"the size 6 is not divisible by data\*fsdp=4"),
    ):
        x = jnp.zeros(shape)
        with sharding.use(make_mesh(CUBE)), pytest.raises(ShardingError, match=message):
            sharding.constrain(x, *names)


@pytest.mark.parametrize(
    ("rules", "stored", "used"),
    [
        ({}, P("fsdp", "tensor"), P(None, "tensor")),
        ({"mlp": ("data", "tensor")}, P("fsdp", ("data", "tensor")), P(None, "tensor")),
        ({"batch": ("data", "tensor")}, P("fsdp", "tensor"), P(None, None)),
        ({"batch": "tensor", "mlp": "data"}, P("fsdp", "data"), P(None, "data")),
    ],
    ids=str,
)
def test_gather_leaves_only_compute_sharding(rules: dict, stored: P, used: P):
    """And the gradient is sharded as the parameter is stored."""
    mesh, rules = make_mesh(CUBE), {**sharding.RULES, **rules}
    tree = eqx.filter_shard(part(), sharding.shardings(part(), zoo.Layout(mesh, rules)))
    assert tree.weight.sharding.spec == stored

    def gradient(tree: Any) -> jax.Array:
        return jax.grad(lambda tree: unshard(tree).weight.sum(), allow_int=True)(tree).weight

    def left(tree: Any) -> jax.Array:
        with left_stored():
            return unshard(tree).weight * 1

    for function, spec in (
        (left, stored),
        (lambda tree: unshard(tree).weight * 1, used),
        (lambda tree: tree.weight * 1, stored),
        (gradient, stored),
    ):
        found = inside(mesh, function, tree, rules)
        assert found.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_axes_of_a_dimension_are_gathered_one_by_one():
    for stored, used, expected in (
        (P("fsdp", "tensor"), P(None, "tensor"), []),
        (P(("fsdp", "context"), "tensor"), P(None, "tensor"), [P(("fsdp",), ("tensor",))]),
        (P(("tensor", "fsdp", "context"), None), P("tensor", None), [P(("tensor", "fsdp"), None)]),
    ):
        assert between(stored, used) == expected


def test_arrays_without_annotations_are_gathered_as_a_whole_model():
    mesh, tree = make_mesh(CUBE), {"part": part(), "table": jnp.zeros((8, 4))}
    stored = sharding.shardings(tree, zoo.Layout(mesh, axes={"table": "embed mlp"}))
    tree = eqx.filter_shard(tree, stored)

    def uses(unshard: Any) -> list[P]:
        with sharding.use(zoo.Layout(axes={"table": "embed mlp"})):
            found = [
                inside(mesh, lambda tree, get=get: get(unshard(tree)) * 1, tree)
                for get in (lambda tree: tree["table"], lambda tree: tree["part"].weight)
            ]
        return [sharding.canonical(each) for each in found]

    whole, in_parts = (("fsdp",), ("tensor",)), ((), ("tensor",))
    assert uses(lambda tree: tree) == [whole, whole]
    assert uses(unshard) == [whole, in_parts]
    assert uses(unshard_foreign) == [in_parts, whole]

    def gradient(tree: Any) -> jax.Array:
        loss = lambda table: unshard_foreign({**tree, "table": table})["table"].sum()
        return jax.grad(loss)(tree["table"])

    with sharding.use(zoo.Layout(axes={"table": "embed mlp"})):
        assert inside(mesh, gradient, tree).is_equivalent_to(
            NamedSharding(mesh, P("fsdp", "tensor")), 2
        )


def test_rules_and_mesh_are_scoped():
    mesh = make_mesh(CUBE)
    with sharding.use(zoo.Layout(mesh, {"seq": "data"})):
        assert sharding.partition_spec(("seq",), mesh) == P("data")
        with sharding.use(zoo.Layout(rules={"seq": "fsdp"})):
            assert sharding.partition_spec(("seq",), mesh) == P("fsdp")
            assert not jax.sharding.get_abstract_mesh().empty
        assert sharding.partition_spec(("seq",), mesh) == P("data")
    assert sharding.partition_spec(("seq",), mesh) == P(None)
    assert jax.sharding.get_abstract_mesh().empty


def test_partial_slice_meshes_are_refused(monkeypatch):
    def create(*_, **__):  # as of 7 of v5e:2x4
        raise AssertionError("jax_devices=[TpuDevice(id=0, …")

    monkeypatch.setattr("jax.experimental.mesh_utils.create_device_mesh", create)
    with pytest.raises(ShardingError, match="mesh 'fsdp=7' has 7 of the 8"):
        make_mesh("fsdp=7")


def test_slices_lie_side_by_side_along_data(monkeypatch):
    # Each of four devices; their order in the list does not matter.
    monkeypatch.setattr("zoo.sharding.mesh.slice_index", lambda device: device.id % 2)
    ids = {spec: [x.id for x in make_mesh(spec).devices.flat] for spec in ("data=2,fsdp=4", CUBE)}
    assert all(order == [0, 2, 4, 6, 1, 3, 5, 7] for order in ids.values())
    four = make_mesh("data=4,tensor=2").devices.reshape(4, 2)
    assert [{x.id % 2 for x in row} for row in four] == [{0}, {0}, {1}, {1}]
    # Machines of GPUs, whose network carries what is stored over them too, keep their own order.
    assert [x.id for x in make_mesh("fsdp=8").devices.flat] == list(range(8))


def test_slices_that_data_does_not_divide_into_are_refused(monkeypatch):
    devices = [Mock(jax.Device, id=i, platform="tpu") for i in range(8)]
    for spec, size, message in (
        ("fsdp=8", 4, "data=1, over 2 slices of 4, 4 TPUs.*'data=2,fsdp=-1'"),
        ("data=2,fsdp=4", 3, "data=2, over 3 slices of 3, 3, 2 TPUs"),
        ("data=2,fsdp=4", 5, "data=2, over 2 slices of 5, 3 TPUs"),
    ):
        where = lambda device, size=size: device.id // size
        monkeypatch.setattr("zoo.sharding.mesh.slice_index", where)
        with pytest.raises(ShardingError, match=message):
            make_mesh(spec, devices)


def test_multiprocess_meshes_need_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ShardingError, match="'data=4' has 4 of the 8 devices of 2 processes, and"):
        make_mesh("data=4")
    assert make_mesh("data=4,tensor=2").size == 8


def test_mapped_axes_reserve_their_mesh_axes():
    mesh, names = make_mesh(CUBE), ("batch", "embed", "mlp")
    with sharding.mapped("batch") as axes:
        assert axes is None
    with sharding.use(mesh):
        for name, taken, rest in (
            ("batch", ("data", "fsdp"), P(None, None, "tensor")),
            ("mlp", ("tensor",), P(("data", "fsdp"), None, None)),
            ("seq", None, P(("data", "fsdp"), None, "tensor")),
        ):
            with sharding.mapped(name) as axes:
                assert axes == taken
                assert sharding.partition_spec(names, mesh) == rest
            assert sharding.partition_spec(names, mesh) == P(("data", "fsdp"), None, "tensor")


def test_a_layout_is_made_of_a_text_or_a_mesh():
    layout = zoo.Layout(CUBE, {"batch": "tensor"})
    assert layout.mesh == make_mesh(CUBE)
    assert layout == zoo.Layout(make_mesh(CUBE), {"batch": "tensor"})
    assert sharding.layout_of(layout) is layout
    assert sharding.layout_of(make_mesh(CUBE)) == zoo.Layout(CUBE)
    assert sharding.layout_of(None).mesh is None
    assert sharding.num_batch_parts(zoo.Layout()) == sharding.num_batch_parts(None) == 1
    with pytest.raises(ShardingError, match="'tensro=2': no axis 'tensro'"):
        zoo.Layout("tensro=2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.strict = True
