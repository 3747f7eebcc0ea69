"""Modules of a user's own classes, in a model of the zoo or as all of it: saved and loaded."""

import copy
import dataclasses
import json
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import as_subclass, drawn_transformer, with_loud_mlp
from jaxtyping import Array, Float
from model_folders import write_package

import zoo
from zoo import __main__ as main
from zoo import lora, mlp, sharding, transformer
from zoo.nn.layers import LayerNorm, Linear
from zoo.nn.products import matmul
from zoo.publishing import PublishError, families, formats, models, shelf
from zoo.transformer import blocks
from zoo.wrappers.classifier import Classifier
from zoo.wrappers.ensemble import Ensemble

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Settings:
    slope: float = 2.0
    sizes: tuple[int, ...] = (1, 2)


def sharpened(x: Array) -> Array:
    return jnp.tanh(3 * x)


class OwnMLP(eqx.Module):
    """Other parameters, other shapes, static fields of every kind, a part of the zoo's."""

    w_in: Float[Array, "embed mlp"]
    w_out: Float[Array, "mlp embed"]
    gate: Linear
    activation: Any = eqx.field(static=True)
    settings: Settings = eqx.field(static=True)
    limit: float = eqx.field(static=True)

    def __init__(self, width: int, hidden: int, *, key):
        keys = jax.random.split(key, 3)
        self.w_in = 0.3 * jax.random.normal(keys[0], (width, hidden))
        self.w_out = 0.3 * jax.random.normal(keys[1], (hidden, width))
        self.gate = Linear(width, hidden, in_axis="embed", out_axis="mlp", key=keys[2])
        self.activation, self.settings, self.limit = sharpened, Settings(3.0), math.inf

    def __call__(self, x_BTE: Any) -> Any:
        hidden = self.activation(matmul(x_BTE, self.w_in)) * self.gate(x_BTE)
        return self.settings.slope * jnp.minimum(matmul(hidden, self.w_out), self.limit)


class LoudNorm(LayerNorm):
    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


class FlatAttention(blocks.Attention):
    """Subclasses keep their parent's fields."""

    def __call__(self, x_BTE, segment_ids, rotary, window, attend=blocks.attention):
        return super().__call__(x_BTE / 2, segment_ids, None, window, attend)


class Net(eqx.Module):
    """A convolutional network of Equinox's layers."""

    convolution: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    layers: list[Any]
    table: dict[str, Float[Array, "classes"]]

    def __init__(self, *, key):
        keys = jax.random.split(key, 2)
        self.convolution = eqx.nn.Conv2d(1, 4, 3, padding="SAME", key=keys[0])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        pool, last = eqx.nn.MaxPool2d(4, 4), eqx.nn.MLP(16, 3, 8, 1, key=keys[1])
        self.layers = [pool, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.1, True), last]
        self.table = {"bias": jnp.arange(3.0)}

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.convolution(x), state)
        pool, activation, drop, last = self.layers
        return last(drop(activation(pool(x))).reshape(-1)) + self.table["bias"], state


class Plain(eqx.Module):
    """A model of the user's own, annotated."""

    weight: Float[Array, "embed mlp"]
    scale: Any = eqx.field(static=True)

    def __init__(self, *, key, scale: Any = 2):
        self.weight, self.scale = jax.random.normal(key, (8, 16)), scale

    def __call__(self, x_BE: Any, key: Any = None) -> Any:
        return self.scale * x_BE @ self.weight


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    width: int = 4
    settings: Settings = Settings()


class Network(eqx.Module):
    """A family of one's own: its configuration makes it."""

    config: NetworkConfig = eqx.field(static=True)
    weight: Float[Array, "embed mlp"]

    def __init__(self, config: NetworkConfig, *, key):
        self.config, self.weight = config, jax.random.normal(key, (config.width, 16))


def skeleton(model: Any) -> Any:
    return eqx.filter_eval_shape(lambda x: x, model)


def with_parts(model: transformer.Transformer) -> transformer.Transformer:
    own = eqx.filter_vmap(lambda key: OwnMLP(32, 24, key=key))(jax.random.split(KEY, 2))
    model = eqx.tree_at(lambda m: m.blocks.mlp, model, own)
    attention = as_subclass(model.blocks.attention, FlatAttention)
    model = eqx.tree_at(lambda m: m.blocks.attention, model, attention)
    norm = eqx.tree_at(lambda n: n.bias, LoudNorm(32), 0.1 * jnp.ones(32))
    return eqx.tree_at(lambda m: m.final_norm, model, norm)


def assert_same(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a is b or np.array_equal(a, b)
        assert not eqx.is_array(a) or a.dtype == b.dtype


def test_replaced_parts_are_saved_and_loaded(tmp_path):
    model = with_parts(drawn_transformer())
    zoo.save(tmp_path / "model", model)
    loaded = zoo.load(tmp_path / "model", like=skeleton(model))
    assert_same(loaded, model)
    assert type(loaded.blocks.mlp) is OwnMLP
    assert loaded.blocks.mlp.settings == Settings(3.0)
    call = eqx.filter_jit(lambda model, tokens: model(tokens))
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(call(loaded, tokens), call(model, tokens))

    # With the cache as without one.
    prompt = list(range(5, 17))
    got = zoo.generate(loaded, [prompt], max_new_tokens=4, temperature=0.0)[0]
    whole = np.asarray(call(model, jnp.asarray([got[:-1]], jnp.int32)))[0].argmax(-1)
    assert got[len(prompt) :] == whole[len(prompt) - 1 :].tolist()


def test_attention_with_other_heads_is_refused_by_decoding():
    class OneHead(blocks.Attention):
        def __call__(self, x_BTE, segment_ids, rotary, window, attend=blocks.attention):
            def first(q, k, v, **options):
                return attend(q, k[:, :, :1], v[:, :, :1], **options)

            return super().__call__(x_BTE, segment_ids, rotary, window, first)

    model = drawn_transformer()
    one = as_subclass(model.blocks.attention, OneHead)
    model = eqx.tree_at(lambda m: m.blocks.attention, model, one)
    with pytest.raises(ValueError, match=r"OneHead attends .*1, 4\)"):
        zoo.generate(model, [[1, 2]], max_new_tokens=1, temperature=0.0)


def test_own_models_are_saved_with_their_state(tmp_path):
    model, state = eqx.nn.make_with_state(Net)(key=KEY)
    x = jax.random.normal(KEY, (4, 1, 8, 8))
    run = eqx.filter_jit(
        eqx.filter_vmap(
            lambda model, x, state: model(x, state),
            in_axes=(None, 0, None),
            axis_name="batch",
            out_axes=(0, None),
        )
    )
    _, state = run(model, x, state)
    zoo.save(tmp_path / "model", (model, state))
    like = eqx.nn.make_with_state(Net)(key=jax.random.key(1))
    loaded, its_state = zoo.load(tmp_path / "model", like=like)
    assert_same((loaded, its_state), (model, state))
    for got, want in zip(
        jax.tree.leaves(run(loaded, x, its_state)),
        jax.tree.leaves(run(model, x, state)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    half, kept = zoo.load(tmp_path / "model", dtype="bf16", like=like)
    assert half.convolution.weight.dtype == jnp.bfloat16
    assert_same(kept, state)  # running statistics, which would lose small steps
    zoo.save(tmp_path / "half", (half, kept))
    zoo.save(tmp_path / "like", (model, state), like=tmp_path / "half")
    assert_same(zoo.load(tmp_path / "like", like=like)[1], state)
    assert "Family: `test_registered.Net`" in (tmp_path / "model" / "README.md").read_text()


def test_own_models_are_sharded_with_their_state(tmp_path):
    made = eqx.nn.make_with_state(Net)(key=KEY)
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    zoo.save(tmp_path / "model", made)
    loaded = zoo.load(tmp_path / "model", mesh=mesh, like=skeleton(made))
    assert_same(loaded, made)
    convolution, last = loaded[0].convolution, loaded[0].layers[3].layers[-1]
    assert sharding.canonical(convolution.weight.sharding) == (("tensor",),)  # 1 input channel
    assert sharding.canonical(convolution.bias.sharding) == (("tensor",),)
    assert sharding.canonical(last.weight.sharding) == ((), ("fsdp",))  # 3 outputs
    state = jax.tree.leaves(loaded[1])
    assert len(state) > 2
    assert all(x.sharding.mesh == mesh and x.sharding.is_fully_replicated for x in state)

    zoo.save(tmp_path / "again", loaded)
    first, again = (tmp_path / x / "model.safetensors" for x in ("model", "again"))
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ensemble(lambda key: Plain(key=key), 4, key=KEY),
        lambda: Classifier(with_parts(drawn_transformer()), 3, key=KEY),
    ],
    ids=["ensemble of own", "classifier with parts"],
)
def test_wrapped_models_are_sharded(tmp_path, make):
    mesh, model = sharding.make_mesh("fsdp=2,tensor=2"), make()
    zoo.save(tmp_path / "model", model)
    loaded = zoo.load(tmp_path / "model", mesh=mesh, like=skeleton(model))
    assert_same(loaded, model)
    placed = sharding.shardings(model, mesh)
    arrays, where = (
        jax.tree.leaves(eqx.filter(x, eqx.is_array))
        if i == 0
        else [y for y in jax.tree.leaves(x) if isinstance(y, jax.sharding.Sharding)]
        for i, x in enumerate((loaded, placed))
    )
    assert [x.sharding for x in arrays] == where
    assert any(not x.sharding.is_fully_replicated for x in arrays)


def small() -> mlp.MLP:
    sizes = {"in_size": 4, "out_size": 2, "hidden_size": 8, "num_layers": 2, "norm": "rms"}
    return mlp.MLP(mlp.Config(**sizes), key=jax.random.key(1))


def another_eps(model: mlp.MLP) -> mlp.MLP:
    norm = copy.copy(model.first.norm)
    object.__setattr__(norm, "eps", 0.5)
    return eqx.tree_at(lambda m: m.first.norm, model, norm)


def test_adapters_of_a_model_with_own_parts(tmp_path):
    base = with_parts(drawn_transformer())
    zoo.save(tmp_path / "base", base)
    config = lora.Config(rank=2, targets=("blocks.mlp.w_in", "blocks.attention.wq"))
    model = lora.adapt(base, config, key=KEY)
    model = jax.tree.map(lambda x: x + 0.01 if eqx.is_inexact_array(x) else x, model)
    model = eqx.tree_at(
        lambda m: (m.blocks.mlp.w_in.weight, m.blocks.attention.wq.weight),
        model,
        (base.blocks.mlp.w_in, base.blocks.attention.wq),
    )
    zoo.save_adapters(tmp_path / "adapters", model, base=tmp_path / "base")
    loaded = zoo.load(tmp_path / "adapters", like=skeleton(base))
    assert_same(loaded.blocks.mlp.w_in, model.blocks.mlp.w_in)
    assert type(loaded.blocks.mlp) is OwnMLP


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plain(key=KEY), r"test_registered\.Plain .* family"),
        (lambda: Ensemble(lambda key: Plain(key=key), 2, key=KEY), r"\.Plain .* family"),
        (lambda: eqx.nn.make_with_state(Net)(key=KEY), r"test_registered\.Net .* family"),
        (
            lambda: eqx.tree_at(lambda m: m.head, small(), Plain(key=KEY)),
            r"head: test_registered\.Plain .* zoo\.nn\.layers\.Linear",
        ),
        (
            lambda: eqx.tree_at(lambda m: m.head.bias, small(), jnp.ones(3)),
            r"head\.bias: \(3,\) .* \(2,\)",
        ),
        (
            lambda: Ensemble(lambda key: another_eps(small()), 2, key=KEY),
            r"members\.first\.norm\.eps: 0\.5 .* 1e-06",
        ),
        (
            lambda: Classifier(with_loud_mlp(drawn_transformer()), 3, key=KEY),
            r"body\.blocks\.mlp: helpers\.LoudMLP here, zoo\.transformer\.blocks\.MLP by the",
        ),
    ],
    ids=["own", "ensemble", "state", "part", "shape", "static field", "classifier"],
)
def test_models_that_no_configuration_makes_need_one_like_them(tmp_path, make, message):
    model = make()
    zoo.save(tmp_path / "model", model)
    with pytest.raises(PublishError, match=rf"{message}.*zoo\.load\(folder, like=model\)"):
        zoo.load(tmp_path / "model")
    assert_same(zoo.load(tmp_path / "model", like=model), model)


def test_other_models_are_refused_as_like(tmp_path):
    zoo.save(tmp_path / "model", Plain(key=KEY))
    with pytest.raises(PublishError, match=r"weight: \(8, 16\)"):
        zoo.load(tmp_path / "model", like=small())
    zoo.save(tmp_path / "hf", drawn_transformer(), format="hf")
    with pytest.raises(PublishError, match=r"like: .* Hugging Face's"):
        zoo.load(tmp_path / "hf", like=drawn_transformer())


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    zoo.register("my-project/network")(Network)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("members", "wanted"), [(None, (("fsdp",), ("tensor",))), (2, (("tensor",), ("fsdp",)))]
)
def test_registered_classes_are_made_by_their_configurations(tmp_path, members, wanted):
    config = NetworkConfig(8, Settings(3.0, (4,)))
    one = lambda key: Network(config, key=key)
    model = one(KEY) if members is None else Ensemble(one, members, key=KEY)
    zoo.save(tmp_path / "model", model)
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    loaded = zoo.load(tmp_path / "model", mesh=mesh)
    assert_same(loaded, model)
    [weight] = jax.tree.leaves(loaded)
    assert sharding.canonical(weight.sharding) == wanted
    description = json.loads((tmp_path / "model" / "config.json").read_text())
    assert description["family"] == "my-project/network"
    assert description["config"] == {"width": 8, "settings": {"slope": 3.0, "sizes": [4]}}


def test_loading_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    zoo.register("os:system")(Network)
    zoo.save(tmp_path / "model", Network(NetworkConfig(), key=KEY))
    del families.FAMILIES["os:system"]
    with pytest.raises(PublishError, match=r"family 'os:system' is unknown; .* imports nothing"):
        zoo.load(tmp_path / "model")


@pytest.mark.usefixtures("registered")
def test_names_are_of_one_class():
    again = type("Network", (Network,), {"__module__": __name__})
    zoo.register("my-project/network")(again)  # as in a notebook, where a cell runs again
    assert families.FAMILIES["my-project/network"] is again
    with pytest.raises(ValueError, match=r"'mlp' .*mlp\.MLP"):
        zoo.register("mlp")(Network)
    with pytest.raises(ValueError, match=r"Plain has .* config .* like="):
        zoo.register("my-project/plain")(Plain)


class Unwritable(Network):
    """Its configuration has what JSON lacks."""


@pytest.mark.usefixtures("registered")
def test_configurations_that_json_lacks_are_refused(tmp_path):
    zoo.register("my-project/unwritable")(Unwritable)
    for settings in (Settings(math.nan), Settings(sizes=sharpened)):  # type: ignore[arg-type]
        model = Unwritable(NetworkConfig(4, settings), key=KEY)
        with pytest.raises(PublishError, match="configuration does not survive JSON"):
            zoo.save(tmp_path / "model", model)
    assert not list(tmp_path.iterdir())


THEIRS = """
import dataclasses, json, pathlib
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from jaxtyping import Array, Float
from zoo.publishing.formats import Format, Opened
from zoo import mlp

@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 4

class Scale(eqx.Module):
    config: Config = eqx.field(static=True)
    weight: Float[Array, "embed"]
    def __init__(self, config, *, key):
        self.config, self.weight = config, jax.random.normal(key, (config.size,))

class Npz(Format):
    config = "theirs.json"
    def describes(self, folder): return b"their_sizes" in (folder / self.config).read_bytes()
    def open(self, folder, options, base=None):
        config = mlp.Config(**json.loads((folder / self.config).read_text())["their_sizes"])
        made = eqx.filter_eval_shape(lambda key: mlp.MLP(config, key=key), jax.random.key(0))
        def load(skeleton):
            dtype = options.dtype or np.float32
            arrays = [jnp.asarray(x, dtype) for x in np.load(folder / "weights.npz").values()]
            return jax.tree.unflatten(jax.tree.structure(skeleton), arrays)
        return Opened(made, load)
    def dtypes(self, folder): return {}, jnp.dtype(jnp.bfloat16)
    def write(self, folder, model, source):
        config = dataclasses.asdict(model.config)
        (folder / self.config).write_text(json.dumps({"their_sizes": config}))
        np.savez(folder / "weights.npz", *jax.tree.leaves(model))
        return {}
    def weight_files(self, folder): return ["weights.npz"]
    def sampling(self, folder): return (folder / self.config, {"top_k": 3})
    def is_id(self, name): return name == "their-net"
    def fetch(self, name, *, revision, weights): return pathlib.Path(__file__).parent / "theirs"
NPZ = Npz()
"""
ENTRIES = """
[zoo.formats]
npz = their_formats:NPZ
[zoo.families]
their/scale = their_formats:Scale
"""


def test_a_package_brings_a_format_and_a_family(tmp_path, monkeypatch):
    write_package(tmp_path, "their_formats", THEIRS, ENTRIES)
    theirs, ours, hub = (tmp_path / name for name in ("theirs", "ours", "hub"))
    with pytest.raises(ValueError, match=r"format='npz': .* \['zoo', 'hf'\]"):
        zoo.save(theirs, small(), format="npz")
    with pytest.raises(PublishError, match=r"'their-net' .* shelf"):
        zoo.load("their-net")

    monkeypatch.syspath_prepend(tmp_path)
    from their_formats import Config, Scale

    zoo.save(theirs, small(), format="npz", card="Theirs.")
    zoo.save(ours, Scale(Config(3), key=KEY))
    zoo.save(hub, drawn_transformer(), format="hf")
    found = [formats.name_of(folder) for folder in (theirs, ours, hub)]
    assert found == ["npz", "zoo", "hf"]
    assert_same(zoo.load(theirs), small())
    assert_same(zoo.load("their-net"), small())
    assert zoo.load(theirs, dtype="bf16").head.bias.dtype == jnp.bfloat16
    assert models.skeleton(theirs).config == small().config
    assert zoo.load(theirs, overrides={"dropout": 0.5}).config.dropout == 0.5
    assert models.weights_checksum(theirs) != models.weights_checksum(hub)
    assert shelf.sampling(theirs) == (theirs / "theirs.json", {"top_k": 3})
    zoo.save(tmp_path / "like", small(), like=theirs)
    assert zoo.load(tmp_path / "like").head.bias.dtype == jnp.bfloat16
    assert type(zoo.load(ours)) is Scale
    assert_same(zoo.load(ours), Scale(Config(3), key=KEY))
    assert json.loads((ours / "config.json").read_text())["family"] == "their/scale"
    with open(theirs / "weights.npz", "ab") as file:
        file.write(b"more")
    with pytest.raises(PublishError, match=r"weights\.npz"):
        zoo.load(theirs)


COMMAND = """
import tyro

def greet(name: tyro.conf.Positional[str], times: int = 1) -> None:
    \"\"\"Greet somebody by a package beside the zoo.\"\"\"
    print(f"Good day, {name}. " * times)
"""


def test_a_package_brings_a_command(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main.main(["greet", "Ada"])
    assert "greet" in capsys.readouterr().err
    write_package(
        tmp_path, "their_command", COMMAND, "[zoo.commands]\ngreet = their_command:greet\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    main.main(["greet", "Ada", "--times", "2"])
    assert capsys.readouterr().out == "Good day, Ada. Good day, Ada. \n"
    with pytest.raises(SystemExit):
        main.main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    for text in ("by a package beside the zoo", "Compile a train step", "List the published"):
        assert text in output
