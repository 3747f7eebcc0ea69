import dataclasses
import hashlib
import json
import os
import re
import shutil
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import safetensors.numpy
from helpers import VOCAB, arrays, assert_same, drawn_transformer
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, Float, Int
from model_folders import FetchedSizes, flip_bit

import zoo
from zoo import lora, mlp, rnn, sharding, transformer
from zoo.common import checksums, configuration
from zoo.nn import parameters
from zoo.publishing import PublishError, families, models, tensors
from zoo.publishing import shelf as the_shelf
from zoo.publishing.tensors import Tensor, write_file
from zoo.sharding import make_mesh
from zoo.wrappers.classifier import Classifier
from zoo.wrappers.ensemble import Ensemble

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


@dataclasses.dataclass(frozen=True)
class Config:
    embed: int = 16
    mlp: int = 8
    scales: tuple[float, ...] = (1.0, 0.5)
    kind: str | None = None

    def __post_init__(self):
        if self.embed < 1:
            raise ValueError(f"embed={self.embed}: must be positive")


class Block(eqx.Module):
    w: Float[Array, "embed mlp"]
    b: Float[Array, "mlp"] | None


class Net(eqx.Module):
    blocks: list[Block]
    scale: Float[Array, ""]
    counts: Int[Array, "embed"]
    none: Float[Array, "embed"]
    activation: object
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key):
        keys = jax.random.split(key, 2)
        shape = (config.embed, config.mlp)
        self.blocks = [
            Block(jax.random.normal(k, shape), b)
            for k, b in zip(keys, [None, jnp.ones(config.mlp)], strict=True)
        ]
        self.scale = jnp.float32(config.scales[0])
        self.counts = jnp.arange(config.embed, dtype=jnp.int32)
        self.none = jnp.zeros(0)
        self.activation = jax.nn.gelu
        self.config = config


@pytest.fixture(autouse=True)
def family(monkeypatch, tmp_path):
    monkeypatch.setitem(families.FAMILIES, "net", Net)
    monkeypatch.setattr(the_shelf, "_shelf", lambda: tmp_path / "shelf")


def net(**fields) -> Net:
    return Net(Config(**fields), key=jax.random.key(1))


class Tokenizer:
    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"type": "bytes"}')


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "net"
    zoo.save(folder, net(), tokenizer=Tokenizer(), card="A net. ✓", metrics={"loss": 0.5})
    return folder


def test_round_trip(folder):
    model = zoo.load(folder)
    assert_same(model, net())
    assert model.config == Config()
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "checksums.json",
        "config.json",
        "metrics.json",
        "model.safetensors",
        "tokenizer.json",
    }
    readme = (folder / "README.md").read_text()
    assert "A net." in readme
    assert f"{2 * 16 * 8 + 8 + 1 + 16:,} parameters" in readme
    names = safetensors.numpy.load_file(folder / "model.safetensors").keys()
    assert names == {"blocks.0.w", "blocks.1.b", "blocks.1.w", "counts", "none", "scale"}
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_are_kept_or_cast(tmp_path, dtype):
    small = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, net())
    # In another order of memory than the file's.
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    column_major = Format(Layout(major_to_minor=(1, 0)), where)
    w = jax.device_put(small.blocks[0].w, column_major)
    assert not np.asarray(w).flags.c_contiguous
    zoo.save(tmp_path / "small", eqx.tree_at(lambda m: m.blocks[0].w, small, w))
    assert_same(zoo.load(tmp_path / "small"), small)
    zoo.save(tmp_path / "full", net())
    assert_same(zoo.load(tmp_path / "full", dtype=dtype), small)
    assert zoo.load(tmp_path / "full", dtype="bfloat16").counts.dtype == jnp.int32


def test_dtype_names_are_recognised(folder):
    for name, dtype in (("bf16", jnp.bfloat16), ("fp16", jnp.float16), ("float32", jnp.float32)):
        assert zoo.load(folder, dtype=name).scale.dtype == dtype
    for dtype in ("int8", jnp.int32, "bf17", "half precision"):
        with pytest.raises(PublishError, match=r"dtype=.*choose one of .*'bf16', 'fp16'"):
            zoo.load(folder, dtype=dtype)


def test_sharded_loading_reads_only_slices(folder, tmp_path, monkeypatch):
    mesh = make_mesh("fsdp=4,tensor=2")
    layout = zoo.Layout(mesh, {**sharding.RULES, "embed": "tensor"})
    others = zoo.load(folder, mesh=layout)
    assert_same(others, net())
    placed = sharding.shardings(others, layout)
    assert [x.blocks[0].w.sharding for x in (others,)] == [placed.blocks[0].w]
    read = []
    make = tensors.place

    def spy(shape, where, part):
        return make(shape, where, lambda index: read.append(found := part(index)) or found)

    monkeypatch.setattr(tensors, "place", spy)
    model = zoo.load(folder, mesh=mesh)
    assert_same(model, net())
    wanted = sharding.shardings(model, mesh)
    w, where = model.blocks[0].w, wanted.blocks[0].w
    assert w.sharding == where
    assert not where.is_fully_replicated
    matrices = [part.size for part in read if part.ndim == 2]
    assert set(matrices) == {int(np.prod(where.shard_shape(w.shape)))}
    parts = {str(index) for index in where.devices_indices_map(w.shape).values()}
    assert len(matrices) == len(model.blocks) * len(parts)  # each is read once
    zoo.save(tmp_path / "again", model)
    same = lambda name: (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert same("model.safetensors")


def test_bytes_match_the_safetensors_library(tmp_path, monkeypatch):
    dtypes = ["float16", "bfloat16", "int64", "uint8", "bool", "int16", "float8_e4m3fn", "float32"]
    stored = {f'{i % 3}.é"{x}': np.arange(i + 3).astype(x) for i, x in enumerate(dtypes)}
    stored |= {"z": np.zeros((), np.float32), "a": np.zeros((0, 3), np.float32)}
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file(stored, tmp_path / "at once", metadata=metadata)
        pieces = {
            name: Tensor(x.shape, x.dtype, lambda x=x: iter(np.split(x, [1]) if x.ndim else [x]))
            for name, x in stored.items()
        }
        write_file(tmp_path / "pieces", pieces, metadata)
        assert (tmp_path / "pieces").read_bytes() == (tmp_path / "at once").read_bytes()
    with pytest.raises(PublishError, match="x is of type int4"):
        write_file(tmp_path / "pieces", {"x": Tensor((), jnp.dtype("int4"), lambda: iter(()))})
    monkeypatch.undo()
    published = the_shelf.find("mlp-digits")
    zoo.save(tmp_path / "again", zoo.load(published))
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (published / "model.safetensors").read_bytes()


@pytest.mark.parametrize("mesh", [None, "fsdp=4,tensor=2"])
def test_arrays_are_written_block_by_block(tmp_path, monkeypatch, mesh):
    monkeypatch.undo()
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 4096)
    fetched = FetchedSizes(monkeypatch, tensors)
    model = drawn_transformer(num_layers=4, d_ff=96)
    if mesh is not None:
        model = jax.device_put(model, sharding.shardings(model, make_mesh(mesh)))
    zoo.save(tmp_path / "model", model)
    assert fetched.most_at_once <= 2 * 4096
    assert fetched.count > 3 * len(arrays(model))
    stored = {path: np.array(x) for path, x in arrays(model).items()}
    safetensors.numpy.save_file(stored, tmp_path / "at once")
    again = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "at once").read_bytes()


def test_saving_replaces_only_model_folders(folder, tmp_path):
    zoo.save(folder, net(embed=4))
    assert zoo.load(folder).config.embed == 4
    assert not (folder / "metrics.json").exists()
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "thesis").mkdir()
    zoo.save(tmp_path / "thesis", net())  # an empty folder is free
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(PublishError, match=r"thesis\.tex\. Move"):
        zoo.save(tmp_path / "other", net())
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").touch()
    with pytest.raises(PublishError, match=r"notes/mine\.txt"):
        zoo.save(folder, net())
    assert (folder / "notes" / "mine.txt").exists()
    assert (tmp_path / "other" / "thesis.tex").exists()
    with pytest.raises(PublishError, match="is a file"):
        zoo.save(tmp_path / "other" / "thesis.tex", net())


def test_failed_saves_keep_the_old_model(folder):
    class Broken:
        def save(self, folder):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        zoo.save(folder, net(embed=4), tokenizer=Broken())
    assert_same(zoo.load(folder), net())
    assert not list(folder.parent.glob(".*"))


FILES = ["config.json", "model.safetensors", "metrics.json", "tokenizer.json", "checksums.json"]


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named(folder, name):
    content = (folder / name).read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 4
    for damaged in (bytes(flipped), content[:-3], b"", None):
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        with pytest.raises(PublishError, match=name):
            zoo.load(folder)
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("A card edited by hand.")
    assert_same(zoo.load(folder), net())


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("zero", lambda path: path.symlink_to("/dev/zero"), "zero is no regular file"),
        ("pipe", os.mkfifo, "pipe is no regular file"),
        ("secret", lambda path: path.symlink_to("../secret"), "secret is a link that leads out"),
        ("inner", lambda path: path.symlink_to("config.json"), None),
    ],
)
def test_only_regular_files_inside_are_verified(folder, tmp_path, name, make, message):
    """Nothing else is opened, which might have no end; nor are the sizes of others told."""
    (tmp_path / "secret").write_bytes(b"x" * 777)
    make(folder / name)
    known = (folder / "config.json").read_bytes()
    entry = {"bytes": len(known), "sha256": checksums.sha256(known)}
    listed = checksums.of(folder) | {name: entry}
    content = {"files": listed, "sha256": checksums._digest(listed)}
    (folder / "checksums.json").write_text(json.dumps(content))
    found = ended(lambda: checksums.problems(folder))
    if message is None:
        assert found == []
        return
    assert len(found) == 1
    assert message in found[0]
    assert "777" not in found[0]
    with pytest.raises(PublishError, match=re.escape(message)):
        ended(lambda: zoo.load(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checksums.json", r"checksums.json .* regular file"),
        ("config.json", r"it has no config\.json|config\.json is damaged: it is no regular file"),
        ("model.safetensors", "has neither model.safetensors nor"),
        ("model-00001-of-00004.safetensors", "no regular file: .*00001|00001.* is no regular"),
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices_are_no_files_of_a_model(folder, tmp_path, name, message, make):
    if name != "checksums.json":
        kind = "mistral" if name.startswith("model-") else "llama2"
        folder = Path(shutil.copytree(GOLDEN / kind, tmp_path / "hf"))
    (folder / name).unlink()
    make(folder / name)
    reads = (zoo.load, models.skeleton, models.weights_checksum)
    # The last reads weights alone, and the last two verify nothing.
    num_reads = {"checksums.json": 1, "config.json": 2}.get(name, 3)
    for read in reads[:num_reads]:
        with pytest.raises((PublishError, OSError), match=message):
            ended(partial(read, folder))


def test_files_of_a_hub_cache_are_its_own(folder, tmp_path):
    """There a snapshot is a folder of links to the blobs beside it."""
    cache = tmp_path / "models--some--model"
    snapshot, blobs = cache / "snapshots" / "1", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        (snapshot / path.name).symlink_to(path.rename(blobs / str(number)))
    assert checksums.problems(snapshot) == []
    assert eqx.tree_equal(zoo.load(snapshot), zoo.load(shutil.copytree(snapshot, folder / "a")))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blobs.rename(tmp_path / "blobs") / "0")
    assert len(checksums.problems(snapshot)) >= 1


def ended(call):
    """The result of a call, which has to end by itself."""
    begun = Future()

    def run():
        try:
            begun.set_result(call())
        except BaseException as error:
            begun.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return begun.result(timeout=10)


def test_models_that_cannot_be_reloaded_are_refused(tmp_path):
    with pytest.raises(PublishError, match=r"configuration does not survive JSON"):
        zoo.save(tmp_path / "net", net(kind=jnp.float32))
    with pytest.raises(PublishError, match=r"has adapters: merge them by zoo\.lora\.merge"):
        zoo.save(tmp_path / "net", lora.adapt(small(), lora.Config(), key=jax.random.key(0)))
    assert not list(tmp_path.iterdir())


def small(**fields) -> mlp.MLP:
    sizes = {"in_size": 4, "out_size": 2, "hidden_size": 8, "num_layers": 3, "norm": "rms"}
    return mlp.MLP(mlp.Config(**sizes | fields), key=jax.random.key(1))


def classifier() -> Classifier:
    config = rnn.Config(vocab_size=8, hidden_size=4, num_layers=1)
    return Classifier(rnn.RNN(config, key=jax.random.key(0)), 3, key=jax.random.key(1))


def ensemble() -> Ensemble:
    return Ensemble(lambda key: small(), 2, key=jax.random.key(1))


DAMAGE = {
    "deleted": ...,
    "null": None,
    "list": [],
    "object": {},
    "text": "foo",
    "negative": -1,
    "huge": 10**12,
    "beyond": 10**400,
    "boolean": True,
    "fraction": 0.5,
    "nan": float("nan"),
    "deep": "DEEP",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [ensemble, classifier, drawn_transformer])
def test_malformed_configurations_are_refused_or_harmless(tmp_path, monkeypatch, make):
    """Every field damaged in every way: it is taken as it says, or is a PublishError."""
    monkeypatch.undo()
    zoo.save(tmp_path / "model", make())
    path = tmp_path / "model" / "config.json"
    good = json.loads(path.read_text())
    wanted, refused, loaded = arrays(make()), 0, 0
    nested = [name for name, x in good["config"].items() if isinstance(x, dict)]
    sections = {"config": good["config"], **{name: good["config"][name] for name in nested}}
    places = [(None, good, name) for name in good]
    places += [(section, parent, name) for section, parent in sections.items() for name in parent]
    for section, parent, name in places:
        for value in DAMAGE.values():
            original = parent[name]
            if value is ...:
                del parent[name]
            else:
                parent[name] = value
            text = json.dumps(good).replace('"DEEP"', "[" * 10_000 + "]" * 10_000)
            parent[name] = original
            path.write_text(text)
            checksums.write(path.parent, skip=("README.md",))
            try:
                model = zoo.load(path.parent)
            except PublishError:
                refused += 1
                continue
            loaded += 1
            assert arrays(model).keys() == wanted.keys()
            config = families.body_of(model).config
            if section and value is not ...:
                values = getattr(config, section) if section in nested else config
                if value == {} and dataclasses.is_dataclass(taken := getattr(values, name)):
                    assert taken == type(taken)()
                else:
                    assert getattr(values, name) == (tuple(value) if value == [] else value)
    assert refused > 8 * len(places)
    assert loaded > len(places)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "max"}, r"config\.json: pooling='max': .* \['auto', 'mean'"),
        ({"pooling": ...}, r"field pooling .* missing"),
        ({"width": 3, "zoo": "9.9"}, "no field width .*hidden_size.*version '9.9'"),
        ({"num_classes": "3"}, "num_classes='3':"),
        ({"config": [1]}, r"config=\[1\]: must be"),
        ({"family": ...}, "family None is unknown; known are mlp, "),
        ({"family": ["zoo.rnn.RNN"]}, r"family \['zoo.rnn.RNN'\] is unknown"),
        ({"cell": "foo"}, r"cell='foo': .*'lstm', 'gru'"),
        ({"bidirectional": "false"}, "bidirectional='false':"),
        ({"num_layers": 5000}, r"num_layers=5000: .* 4096"),
    ],
    ids=str,
)
def test_the_malformed_field_is_named(tmp_path, monkeypatch, changes, message):
    monkeypatch.undo()
    zoo.save(tmp_path / "model", classifier())
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    for name, value in changes.items():
        (values if name in values else values["config"])[name] = value
    path.write_text(json.dumps({name: x for name, x in values.items() if x is not ...}))
    checksums.write(path.parent)
    with pytest.raises(PublishError, match=message):
        zoo.load(path.parent)


def test_published_names_load_from_shelf(folder, tmp_path, monkeypatch):
    assert zoo.published() == {}
    with pytest.raises(PublishError, match="shelf, which has: nothing"):
        zoo.load("tiny")
    shutil.copytree(folder, tmp_path / "shelf" / "tiny")
    card = zoo.published()["tiny"]
    assert (card.name, card.num_parameters, card.metrics["loss"]) == ("tiny", 281, 0.5)
    measured = {name: file["sha256"] for name, file in card.metrics["files"].items()}
    assert measured == {
        name: hashlib.sha256((card.folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert card.family == "net"
    assert "A net. ✓" in card.text
    assert_same(zoo.load("tiny"), net())
    with pytest.raises(PublishError, match=r"shelf, .* tiny"):
        zoo.load("tinny")
    monkeypatch.chdir(tmp_path)
    zoo.save("tiny", net(embed=4))
    assert zoo.load("tiny").config.embed == 4  # a folder comes first


def test_shelf_is_the_models_folder(monkeypatch):
    monkeypatch.undo()
    assert the_shelf._shelf() == Path(zoo.__file__).parents[1] / "models"


def test_unknown_formats_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    with pytest.raises(ValueError, match=r"format='gguf': .* \['zoo', 'hf'\]"):
        zoo.save(tmp_path / "model", net(), format="gguf")
    assert not list(tmp_path.iterdir())


class WithIds(Tokenizer):
    separator_id = 2


class WithEos(WithIds):
    eos_ids = (5, 6)


class Large(Tokenizer):
    separator_id = VOCAB


@pytest.mark.parametrize(
    ("tokenizer", "own", "ids"),
    [
        (None, (), ()),
        (Tokenizer(), (), ()),
        (WithIds(), (), (2,)),
        (WithEos(), (), (5, 6)),
        (WithEos(), (7,), (7,)),
    ],
    ids=["none", "no ends", "one", "two", "own"],
)
def test_ids_that_end_a_text_are_stored(tmp_path, tokenizer, own, ids):
    model = drawn_transformer(num_layers=1, eos_ids=own)
    zoo.save(tmp_path / "model", model, tokenizer=tokenizer)
    assert zoo.load(tmp_path / "model").config.eos_ids == ids
    assert model.config.eos_ids == own


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(PublishError, match=f"the id {VOCAB}.*not the tokenizer of this model"):
        zoo.save(tmp_path / "model", drawn_transformer(num_layers=1), tokenizer=Large())
    assert not (tmp_path / "model").exists()


def folders_of_three_kinds(tmp_path: Path) -> dict[str, Path]:
    """A model in bf16 in the zoo's format, adapters of it in fp32, and Hugging Face's format."""
    model = parameters.cast(drawn_transformer(num_layers=1), jnp.bfloat16)
    zoo.save(tmp_path / "zoo", model)
    zoo.save(tmp_path / "hf", model, format="hf")
    adapted = lora.adapt(model, lora.Config(rank=2), key=jax.random.key(0))
    zoo.save_adapters(tmp_path / "adapters", adapted, base=tmp_path / "zoo")
    return {name: tmp_path / name for name in ("zoo", "hf", "adapters")}


def test_checksums_of_weights(tmp_path: Path):
    folders = folders_of_three_kinds(tmp_path)
    first = {name: models.weights_checksum(folder) for name, folder in folders.items()}
    assert len({*first.values()}) == 3
    # The list of the folder and the bytes give the same, and a card is no weight.
    (folders["hf"] / checksums.NAME).unlink()
    (folders["hf"] / "README.md").write_text("another card")
    assert models.weights_checksum(folders["hf"]) == first["hf"]
    zoo.save(folders["zoo"], drawn_transformer(num_layers=1))
    changed = {name: models.weights_checksum(folder) for name, folder in folders.items()}
    assert changed["zoo"] != first["zoo"]
    assert changed["adapters"] != first["adapters"]  # whose base is another


OVERRIDES = {"dropout": 0.25, "remat": "full"}


@pytest.mark.slow
def test_loaded_models_take_other_values_for_training(tmp_path: Path):
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    for name, folder in folders_of_three_kinds(tmp_path).items():
        plain = zoo.load(folder)
        for quantize in (None, "int8") if name == "zoo" else (None,):
            model = zoo.load(folder, overrides=OVERRIDES, quantize=quantize)
            assert (model.config.dropout, model.config.remat) == (0.25, "full")
            assert model.blocks.dropout == 0.25  # and not only beside what it computes with
            skeleton = models.skeleton(folder, overrides=OVERRIDES, quantize=quantize)
            assert jax.tree.structure(skeleton) == jax.tree.structure(model), name
        model = zoo.load(folder, overrides=OVERRIDES)
        np.testing.assert_array_equal(model(tokens), plain(tokens))
        key = jax.random.key(0)
        assert np.abs(model(tokens, key=key) - plain(tokens, key=key)).max() > 0
    with pytest.raises(PublishError, match=r"num_layers=3: .*attention\.kernel.*dropout"):
        zoo.load(folder, overrides={"num_layers": 3})
    with pytest.raises(PublishError, match=r"num_leyers=3: .*dropout"):
        zoo.load(folder, overrides={"num_leyers": 3})
    with pytest.raises(PublishError, match=r"dropout=2.0: .* \[0, 1\)"):
        zoo.load(folder, overrides={"dropout": 2.0})
    zoo.save(tmp_path / "net", net())
    with pytest.raises(PublishError, match=r"embed=3: "):
        zoo.load(tmp_path / "net", overrides={"embed": 3})


def test_fields_that_can_be_overridden_change_no_parameter():
    others = {bool: False, int: 3, float: 0.5}
    made = {
        "mlp": mlp.Config(3, 2, hidden_size=4),
        "rnn": rnn.Config(16, hidden_size=4),
        "transformer": transformer.Config(16, d_model=8, num_layers=1, num_heads=2),
    }
    count = 0
    for name, config in made.items():
        cls = families.FAMILIES[name]
        make = lambda config, cls=cls: eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
        shapes = tensors.parameter_shapes(make(config))
        for field, old in configuration.flat(config).items():
            value = {
                "attention.kernel": "xla",
                "kernel": "xla",
                "remat": "full",
                "implementation": "scan",
                "experts.dispatch": "all_to_all",
                "eos_ids": (3,),
                "origin": "",
            }.get(field, others.get(type(old), 3))
            try:
                changed = configuration.changed(config, {field: value})
            except ValueError:
                continue
            count += 1
            assert tensors.parameter_shapes(make(changed)) == shapes, field
    assert count >= 4 + 4 + 2 + 5


def test_a_model_is_saved_in_the_dtypes_of_another(tmp_path):
    model = drawn_transformer(num_layers=1)
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    zoo.save(tmp_path / "base", small)
    zoo.save(tmp_path / "again", model, like=tmp_path / "base")
    assert_same(zoo.load(tmp_path / "again"), small)
    adapted = lora.adapt(model, lora.Config(), key=jax.random.key(0))
    zoo.save_adapters(tmp_path / "adapters", adapted, base=tmp_path / "base")
    zoo.save(tmp_path / "more", model, like=tmp_path / "adapters")
    assert_same(zoo.load(tmp_path / "more"), small)
    ours = net()
    half = {"scale": jnp.dtype("float16")}
    dtypes = tensors.stored_dtypes(ours, half, jnp.dtype("bfloat16"))
    assert (dtypes["scale"], dtypes["blocks.0.w"]) == ("float16", "bfloat16")
    assert dtypes["counts"] == ours.counts.dtype  # integers stay


@pytest.mark.slow
def test_loading_unmaps_what_it_read(tmp_path, monkeypatch):
    file = str(tmp_path / "m" / "model.safetensors")

    def mapped() -> int:  # bytes of the file that count as memory of this process
        lines = Path("/proc/self/smaps").read_text().splitlines()
        at = [i for i, line in enumerate(lines) if line.endswith(file)]
        return sum(
            1024 * int(lines[i + j].split()[1])
            for i in at
            for j in (1, 2, 3, 4)
            if lines[i + j].startswith("Rss:")
        )

    # Larger than the 2 MiB that the kernel may map at once.
    zoo.save(
        tmp_path / "m", mlp.MLP(mlp.Config(256, 256, 1024, num_layers=5), key=jax.random.key(0))
    )
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 2**16)
    seen, blocks, block = [], [], tensors._File._block

    def watched(*args):
        found = block(*args)
        found.sum()  # reads it
        blocks.append(found.nbytes)
        if len(blocks) % 32 == 0:  # all of a process's memory is much to list
            seen.append(mapped())
        return found

    monkeypatch.setattr(tensors._File, "_block", watched)
    largest = max(
        x.nbytes for x in jax.tree.leaves(eqx.filter(zoo.load(tmp_path / "m"), eqx.is_array))
    )
    assert len(seen) > 2
    assert 0 < max(seen) < largest < (tmp_path / "m" / "model.safetensors").stat().st_size


MESHES = ["fsdp=8", "data=2,fsdp=2,tensor=2"]


@pytest.fixture
def in_parts(monkeypatch):
    """Checksums of parts for files as small as those of tests."""
    monkeypatch.setattr(checksums, "PART_BYTES", 1000)
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)


@pytest.mark.parametrize("format", ["zoo", "hf"])
def test_every_mesh_loads_and_saves_the_same(tmp_path, in_parts, format):
    model = drawn_transformer(num_layers=2, num_heads=8, d_model=32, d_ff=64, tie_embeddings=False)
    zoo.save(tmp_path / "one", model, format=format)
    assert len(checksums.parts(tmp_path / "one" / "model.safetensors").sha256) > 20
    alone = zoo.load(tmp_path / "one")
    want = arrays(alone)
    zoo.save(tmp_path / "alone", alone, format=format)
    for spec in MESHES:
        found = zoo.load(tmp_path / "one", mesh=make_mesh(spec))
        assert {path: x.tobytes() for path, x in arrays(found).items()} == {
            path: x.tobytes() for path, x in want.items()
        }
        zoo.save(tmp_path / "again", found, format=format)
        for name in ("model.safetensors", "config.json", "checksums.json"):
            again = (tmp_path / "again" / name).read_bytes()
            assert again == (tmp_path / "alone" / name).read_bytes(), (spec, name)
    for name in ("one", "alone"):
        stored = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert sum(x.nbytes for x in stored.values()) == sum(x.nbytes for x in want.values())


def test_only_the_parts_that_are_read_are_verified(tmp_path, in_parts):
    path = tmp_path / "model.safetensors"
    whole = np.arange(6000, dtype=np.float32).reshape(2, 30, 100)
    known = {path.name: write_file(path, {"w": Tensor(whole.shape, whole.dtype, lambda: [whole])})}
    checksums.write(tmp_path, known=known)
    assert checksums.problems(tmp_path) == []
    flip_bit(path, at=5_000)
    assert checksums.problems(tmp_path, by_parts=True) == []
    with tensors.slice_reader() as read:
        half = (slice(1, 2), slice(None), slice(3, 90, None))
        np.testing.assert_array_equal(read(path, "w", half), whole[half])
        with pytest.raises(PublishError, match=r"model\.safetensors .* 5,000"):
            read(path, "w", (slice(0, 2), slice(None), slice(0, 1)))
    assert checksums.problems(tmp_path) == [
        "model.safetensors is damaged: its SHA-256 is not the one written with it"
    ]


def test_a_file_has_one_checksum_with_and_without_parts(tmp_path, in_parts):
    zoo.save(tmp_path / "m", mlp.MLP(mlp.Config(16, 16, 64), key=jax.random.key(0)))
    first = models.weights_checksum(tmp_path / "m")
    stored = json.loads((tmp_path / "m" / checksums.NAME).read_text())["files"]
    assert stored["model.safetensors"]["parts"]["bytes"] == 1000
    checksums.write(tmp_path / "m", skip=("README.md",))  # as earlier versions did
    assert not checksums.parts(tmp_path / "m" / "model.safetensors").sha256
    assert models.weights_checksum(tmp_path / "m") == first
    zoo.load(tmp_path / "m")


def test_slices_of_any_shape_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 64)
    rng = np.random.default_rng(0)
    shapes = [(), (0, 3), (7,), (5, 6, 7), (2, 3, 4, 5)]
    dtypes = ["float32", "bfloat16", "bool", "float8_e4m3fn", "int16"]
    stored = {f"{i}{x}": rng.normal(size=i).astype(x) for i in shapes for x in dtypes}
    safetensors.numpy.save_file(stored, tmp_path / "f")
    with tensors.slice_reader() as read:
        for name, whole in stored.items():
            for _ in range(4):
                starts = [int(rng.integers(0, max(n, 1))) for n in whole.shape]
                index = tuple(slice(a, n) for a, n in zip(starts, whole.shape, strict=True))
                found = read(tmp_path / "f", name, index)
                assert (found.dtype, found.shape) == (whole.dtype, whole[index].shape)
                assert found.tobytes() == whole[index].tobytes()
