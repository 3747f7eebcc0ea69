"""Modules of a user's own classes, in a model of the zoo or as all of it: saved and loaded."""

import dataclasses
import enum
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import VOCAB, as_subclass, drawn_transformer
from jaxtyping import Array, Float
from safetensors.numpy import load_file

import zoo
from zoo import __main__ as main
from zoo import lora, mlp, rnn, sharding, transformer
from zoo.base import checksums
from zoo.nn.layers import LayerNorm, Linear
from zoo.nn.products import matmul
from zoo.publishing import parts, registry, slices, tensors
from zoo.publishing.errors import PublishError
from zoo.sharding import parts as parts_of_arrays
from zoo.transformer import blocks
from zoo.wrappers.classifier import Classifier
from zoo.wrappers.ensemble import Ensemble

if TYPE_CHECKING:
    from nowhere import Missing

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


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    zoo.register("project/own-mlp")(OwnMLP)
    for target in (LoudNorm, FlatAttention, Net, Plain, Settings, sharpened):
        zoo.register(target)


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
    text = (tmp_path / "model" / "config.json").read_text()
    description = json.loads(text, parse_constant=pytest.fail)  # infinity is not of JSON
    assert description["family"] == "transformer"
    assert description["parts"].keys() == {"blocks.mlp", "blocks.attention", "final_norm"}
    assert description["needs"] == {
        "project/own-mlp": f"{__name__}:OwnMLP",
        **{f"{__name__}:{x}": f"{__name__}:{x}" for x in ("FlatAttention", "LoudNorm", "Settings")},
        f"{__name__}:sharpened": f"{__name__}:sharpened",
    }
    loaded = zoo.load(tmp_path / "model")
    assert_same(loaded, model)
    assert type(loaded.blocks.mlp) is OwnMLP
    assert loaded.blocks.mlp.settings == Settings(3.0)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(loaded(tokens), model(tokens))

    # With the cache as without one.
    prompt = list(range(5, 17))
    got = zoo.generate(loaded, [prompt], max_new_tokens=4, temperature=0.0)[0]
    whole = np.asarray(model(jnp.asarray([got[:-1]], jnp.int32)))[0].argmax(-1)
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
    with pytest.raises(ValueError, match=r"OneHead attends to keys of the shape .* 1, 4\)"):
        zoo.generate(model, [[1, 2]], max_new_tokens=1, temperature=0.0)


def test_own_models_are_saved_with_their_state(tmp_path):
    model, state = eqx.nn.make_with_state(Net)(key=KEY)
    x = jax.random.normal(KEY, (4, 1, 8, 8))
    run = eqx.filter_vmap(
        lambda model, x, state: model(x, state),
        in_axes=(None, 0, None),
        axis_name="batch",
        out_axes=(0, None),
    )
    _, state = run(model, x, state)
    zoo.save(tmp_path / "model", (model, state))
    loaded, its_state = zoo.load(tmp_path / "model")
    assert_same((loaded, its_state), (model, state))
    for got, want in zip(
        jax.tree.leaves(run(loaded, x, its_state)),
        jax.tree.leaves(run(model, x, state)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    half, kept = zoo.load(tmp_path / "model", dtype="bf16")
    assert half.convolution.weight.dtype == jnp.bfloat16
    assert_same(kept, state)  # running statistics, which would lose small steps
    zoo.save(tmp_path / "half", (half, kept))
    zoo.save(tmp_path / "like", (model, state), like=tmp_path / "half")
    assert_same(zoo.load(tmp_path / "like")[1], state)
    assert "Family: `test_registered:Net`" in (tmp_path / "model" / "README.md").read_text()


def test_models_of_the_zoo_are_saved_beside_a_state(tmp_path):
    _, state = eqx.nn.make_with_state(Net)(key=KEY)
    zoo.save(tmp_path / "model", (small(), state))
    assert_same(zoo.load(tmp_path / "model"), (small(), state))


@dataclasses.dataclass(frozen=True)
class Doubling:
    width: int

    def __post_init__(self):
        object.__setattr__(self, "width", 2 * self.width)


def test_settings_that_change_when_made_again_are_refused(tmp_path):
    zoo.register(Doubling)
    with pytest.raises(PublishError, match=r"scale\.width: 2 here, 4 by the configuration"):
        zoo.save(tmp_path / "model", plain_with(Doubling(1)))


def test_own_models_are_sharded_with_their_state(tmp_path, monkeypatch):
    made = eqx.nn.make_with_state(Net)(key=KEY)
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    zoo.save(tmp_path / "model", made)
    monkeypatch.setattr(registry, "_registered", {})
    loaded = zoo.load(tmp_path / "model", mesh=mesh, classes=[Net])
    assert_same(loaded, made)
    convolution, last = loaded[0].convolution, loaded[0].layers[3].layers[-1]
    assert sharding.canonical(convolution.weight.sharding) == (("tensor",),)  # 1 input channel
    assert sharding.canonical(convolution.bias.sharding) == (("tensor",),)
    assert sharding.canonical(last.weight.sharding) == ((), ("fsdp",))  # 3 outputs
    state = jax.tree.leaves(loaded[1])
    assert len(state) > 2
    assert all(x.sharding.mesh == mesh and x.sharding.is_fully_replicated for x in state)

    zoo.register(Net)
    zoo.save(tmp_path / "again", loaded)
    first, again = (tmp_path / x / "model.safetensors" for x in ("model", "again"))
    assert again.read_bytes() == first.read_bytes()


class Unresolved(eqx.Module):
    lost: "dict[str, Missing]"


def test_what_stacks_layers_is_gathered_in_parts(tmp_path, monkeypatch):
    seen = []

    def seen_gathered(array, index):
        seen.append(parts_of_arrays.gathered(array, index))
        return seen[-1]

    monkeypatch.setattr(tensors, "gathered", seen_gathered)
    _, state = eqx.nn.make_with_state(Net)(key=KEY)
    blocks = drawn_transformer().blocks
    monkeypatch.setattr(slices, "BLOCK_BYTES", blocks.mlp.w_up[0].nbytes)
    model = {"lost": Unresolved({"a": jnp.ones((8, 4))}), "mlp": blocks.mlp, "state": state}
    tensors.write_tensors(tmp_path / "x.safetensors", model)
    stored = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(stored["mlp.w_up"], blocks.mlp.w_up)
    layers = len(blocks.mlp.w_up)
    assert layers > 1
    assert sum(part.shape[1:] == blocks.mlp.w_up.shape[1:] for part in seen) >= layers
    assert max(part.nbytes for part in seen) == slices.BLOCK_BYTES
    assert (8, 4) in [part.shape for part in seen]
    assert (4,) in [part.shape for part in seen]  # the running mean of four channels


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plain(key=KEY),
        lambda: Ensemble(lambda key: Plain(key=key), 4, key=KEY),
        lambda: Ensemble(
            lambda key: eqx.tree_at(lambda m: m.first.norm, small(), LoudNorm(8)), 2, key=KEY
        ),
        lambda: Classifier(with_parts(drawn_transformer()), 3, key=KEY),
    ],
    ids=["own", "ensemble of own", "ensemble with a part", "classifier with parts"],
)
def test_wrapped_models_are_sharded(tmp_path, make):
    mesh, model = sharding.make_mesh("fsdp=2,tensor=2"), make()
    zoo.save(tmp_path / "model", model)
    loaded = zoo.load(tmp_path / "model", mesh=mesh)
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


def test_adapters_of_a_model_with_own_parts(tmp_path, monkeypatch):
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
    given = dict(registry._registered)
    monkeypatch.setattr(registry, "_registered", {})
    loaded = zoo.load(tmp_path / "adapters", classes=given)
    assert_same(loaded.blocks.mlp.w_in, model.blocks.mlp.w_in)
    assert type(loaded.blocks.mlp) is OwnMLP


class Unregistered(eqx.Module):
    weight: Float[Array, "embed mlp"]
    mlp: OwnMLP | None = None


class Level(enum.IntEnum):
    LOW = 1


def plain_with(value: Any) -> Plain:
    return Plain(key=KEY, scale=value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Unregistered(jnp.ones((2, 2))),
            r'no family of the zoo; .* write @zoo\.register\("my-project/unregistered"\) above it',
        ),
        (
            lambda: eqx.tree_at(lambda m: m.head, small(), Unregistered(jnp.ones((2, 2)))),
            r'head: .*Unregistered here, .*\n.* @zoo\.register\("my-project/unregistered"\)',
        ),
        (lambda: plain_with(lambda x: x), "scale: <function .* folders hold no code"),
        (lambda: plain_with(np.float32(1)), r"scale: (np.float32\(1.0\) of type|an array in)"),
        (lambda: plain_with((1, jnp.ones(2))), r"scale\.1: an array in a static field"),
        (lambda: plain_with({1: 2}), r"scale: \{1: 2\} of type builtins\.dict"),
        (lambda: plain_with(Level.LOW), r"scale: <Level\.LOW: 1> of type .*Level can't be stored"),
        (lambda: plain_with([Unregistered(None)]), r"scale\.0: .* write @zoo\.register above"),
        (lambda: Net(key=KEY), r"norm\.batch_counter: .* eqx\.nn\.make_with_state"),
    ],
    ids=[
        "root",
        "part",
        "lambda",
        "numpy",
        "static array",
        "keys",
        "enum",
        "nested",
        "state within",
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path, make, message):
    with pytest.raises(PublishError, match=message):
        zoo.save(tmp_path / "model", make())
    assert not list(tmp_path.iterdir())


def test_hugging_face_has_no_own_parts(tmp_path):
    with pytest.raises(PublishError, match=r"test_registered\.OwnMLP here|does not fit"):
        zoo.save(tmp_path / "model", with_parts(drawn_transformer()), format="hf")


def test_unregistered_classes_can_be_given(tmp_path, monkeypatch):
    zoo.save(tmp_path / "model", Plain(key=KEY))
    monkeypatch.setattr(registry, "_registered", {})
    name = f"{__name__}:Plain"
    message = (
        rf"config\.json: .*'{name}' of '{name}'.*classes=\{{'{name}': TheClass\}}.*"
        rf"allow_import=\['{__name__}'\]"
    )
    with pytest.raises(PublishError, match=message):
        zoo.load(tmp_path / "model")
    for options in (
        {"classes": [Plain]},
        {"classes": {name: Plain}},
        {"allow_import": [__name__]},
        {"allow_import": __name__},
    ):
        assert_same(zoo.load(tmp_path / "model", **options), Plain(key=KEY))
    assert not registry._registered  # for that call alone
    with pytest.raises(PublishError, match=message):
        zoo.load(tmp_path / "model", allow_import=f"{__name__}.other")
    for classes in ([Plain(key=KEY)], {name: Plain(key=KEY)}):
        with pytest.raises(PublishError, match="give classes, not instances"):
            zoo.load(tmp_path / "model", classes=classes)
    with pytest.raises(PublishError, match=r"has the fields a, b now.*'weight, scale'"):
        zoo.load(tmp_path / "model", classes={name: dataclasses.make_dataclass("C", ["a", "b"])})


def test_loading_imports_nothing_by_itself(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_layers.py").write_text(
        "import equinox as eqx, zoo\nfrom jaxtyping import Array, Float\n"
        "@zoo.register('project/own')\nclass Own(eqx.Module):\n"
        "    w: Float[Array, 'embed']\n"
        "    def __init__(self):\n        raise RuntimeError\n"
    )
    folder = tmp_path / "model"
    zoo.save(folder, Plain(key=KEY))
    change(
        folder,
        needs={"project/own": "own_layers:Own"},
        model={"class": "project/own", "fields": {"w": {"array": "float32", "shape": [8, 16]}}},
    )
    stored = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(stored.replace(b'{"weight"', b'{"w"     '))
    checksums.write(folder)
    with pytest.raises(PublishError, match="'project/own' of 'own_layers:Own'"):
        zoo.load(folder)
    with pytest.raises(PublishError, match="'project/own' of 'own_layers:Own'"):
        zoo.load(folder, allow_import=["own", "jax"])
    assert "own_layers" not in sys.modules
    assert type(zoo.load(folder, allow_import=["own_layers"])).__name__ == "Own"
    del sys.modules["own_layers"]


def test_allowed_imports_give_classes_alone(tmp_path):
    zoo.save(tmp_path / "model", Plain(key=KEY))
    change(tmp_path / "model", needs={"a": "os:system"}, model={"function": "a"})
    with pytest.raises(PublishError, match="'a' of 'os:system'"):
        zoo.load(tmp_path / "model", allow_import=["os"])


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    description = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: x for name, x in description.items() if x is not ...}))
    checksums.write(folder)


ARRAY = {"array": "float32", "shape": [8, 16]}
PLAIN = f"{__name__}:Plain"


def deep(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"class": "os:system", "fields": {}}}, "nothing is registered as 'os:system'"),
        ({"model": {"function": "os:system"}}, "nothing is registered as 'os:system'"),
        ({"model": {"function": PLAIN}}, "is a class, not a function"),
        ({"model": {"class": "jax.nn.relu", "fields": {}}}, "is no class of modules"),
        ({"needs": {"a": "os:system"}}, "'a' of 'os:system'"),
        ({"needs": ["os:system"]}, "must be texts by name"),
        ({"needs": {"a": 1}}, "must be texts by name"),
        ({"model": {"class": PLAIN, "fields": {"weight": ARRAY}}}, "has the fields weight, scale"),
        (
            {"model": {"class": PLAIN, "fields": {"weight": ARRAY, "scale": 1, "__class__": 1}}},
            "has the fields weight, scale",
        ),
        ({"model": {"class": PLAIN, "fields": {}, "x": 1}}, "describes no part"),
        ({"model": {"array": "float32", "shape": [8, -16]}}, "describes no part"),
        ({"model": {"array": "float32", "shape": [8, True]}}, "describes no part"),
        ({"model": {"array": "float32", "shape": [10**30]}}, "describes no part"),
        ({"model": {"array": "nonsense", "shape": [8]}}, "'nonsense' is no dtype"),
        ({"model": {"array": "float32", "shape": [2**40, 2**40]}}, "does not fit its config"),
        ({"model": {"class": PLAIN, "fields": {"weight": 1, "scale": 1}}}, "does not fit"),
        ({"model": None}, "does not fit"),
        ({"model": {"float": "0"}}, "describes no part"),
        ({"model": deep(900)}, "config.json"),
        ({"model": ..., "family": PLAIN}, "is unknown; known are bert"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_hostile_descriptions_are_refused(tmp_path, values, message):
    zoo.save(tmp_path / "model", Plain(key=KEY))
    change(tmp_path / "model", **values)
    with pytest.raises(PublishError, match=message):
        zoo.load(tmp_path / "model")


@pytest.mark.parametrize(
    "form",
    [
        {"array": "float32", "shape": [2]},
        {"float": "inf"},
        {"tuple": []},
        {"dict": {}},
        {"state_index": "a"},
        {"state": {}},
        {"function": "jax.nn.relu"},
        {"class": "equinox.nn.Identity", "fields": {}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_descriptions_have_no_other_keys(form):
    known = registry.known()
    parts.decode(form, known)
    with pytest.raises(ValueError, match="describes no part"):
        parts.decode({**form, "x": 1}, known)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"../../etc": None}, r"has no part"),
        ({"blocks.__class__": None}, "has no part '__class__'"),
        ({"blocks.0": None}, "has no part '0'"),
        ({"config.vocab_size": 7}, "no part of a Config can be replaced"),
        ([1], r"parts=\[1\]: must be"),
        ({}, "does not fit its configuration"),
    ],
    ids=str,
)
def test_hostile_parts_are_refused(tmp_path, new, message):
    zoo.save(tmp_path / "model", with_parts(drawn_transformer()))
    change(tmp_path / "model", parts=new)
    with pytest.raises(PublishError, match=message):
        zoo.load(tmp_path / "model")


def test_names_are_of_one_class():
    with pytest.raises(ValueError, match=r"'project/own-mlp' is taken, by .*:OwnMLP"):
        zoo.register("project/own-mlp")(Plain)
    with pytest.raises(ValueError, match=r"name 'jax\.nn\.relu' is taken"):
        zoo.register("jax.nn.relu")(sharpened)
    with pytest.raises(ValueError, match="must be a class"):
        zoo.register(3)
    again = type("Plain", (eqx.Module,), {"__module__": Plain.__module__})
    zoo.register(again)  # as in a notebook, where a cell runs again
    assert registry.name_of(again) == PLAIN
    assert registry.name_of(Plain) is None


def test_known_names_are_of_one_class_each():
    known = registry.known()
    assert {"zoo.nn.Linear", "zoo.transformer.MLP", "zoo.mlp.MLP", "equinox.nn.Conv2d"} <= {*known}
    assert {"zoo.rnn.Config", "jax.nn.relu", "zoo.nn.gelu", "jax.lax.max"} <= {*known}
    for make in (
        small,
        drawn_transformer,
        lambda: rnn.RNN(rnn.Config(vocab_size=VOCAB, hidden_size=8, num_layers=1), key=KEY),
    ):
        model = make()
        assert_same(parts.decode(parts.encode(model), known).config, model.config)


def test_the_command_line_describes_own_models(tmp_path, capsys, monkeypatch):
    zoo.save(tmp_path / "model", Plain(key=KEY), card="Mine.")
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(PublishError, match="allow_import"):
        main.describe(str(tmp_path / "model"))
    main.describe(str(tmp_path / "model"), allow_import=(__name__,))
    main.verify((str(tmp_path / "model"),))
    out = capsys.readouterr().out
    assert "Mine." in out
    assert "weight" in out
    assert "files are as they were written" in out
