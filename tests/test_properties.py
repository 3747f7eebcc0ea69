"""What holds of everything that can be asked for: Hypothesis draws it, and shrinks what fails."""

import contextlib
import functools
import itertools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import damage
import equinox as eqx
import fsspec
import jax
import numpy as np
import pytest
import safetensors.numpy
from damage import KINDS, hurt
from fsspec.implementations.memory import MemoryFile
from helpers import arrays, assert_trees_close, drawn_model, state_and_step, token_batch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from stores import tree

import zoo
from zoo import losses, rnn, sharding, transformer
from zoo.common import checksums
from zoo.common.files import AddressError
from zoo.common.store import Store, location
from zoo.data.corpus import Corpus
from zoo.data.labelled import LabelledDataset
from zoo.data.prepared.copies import Copies
from zoo.data.prepared.format import Manifest
from zoo.data.token_datasets import BucketedDataset, PackedDataset, TokenDataset
from zoo.hf.weights import Weights
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.recurrences.mixers import MIXERS
from zoo.publishing import PublishError, replacing, shelf
from zoo.rnn.cells import CELLS
from zoo.runs.checkpoint import Checkpointer
from zoo.runs.remote.copies import Record, RemoteCopies
from zoo.transformer.rotary import RopeScaling


def examples(count: int) -> settings:
    """So many examples, always the same; compiling takes long, and is no fault."""
    checks = [*HealthCheck]
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=checks,
    )


# Datasets

SEPARATOR = 0


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """Documents in which each token has an id of its own: it can be seen where it went."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
    total = sum(lengths)
    ends = np.cumsum(lengths)[:-1]
    counts = None
    if draw(st.booleans()):
        counted = draw(st.lists(st.booleans(), min_size=total, max_size=total))
        counts = np.split(np.array(counted, bool), ends)
    documents = np.split(np.arange(1, total + 1), ends)
    return Corpus.from_arrays(documents, total + 3, total, None, counts)


class Case(NamedTuple):
    dataset: TokenDataset
    cut: int | None  # a document's tokens are cut off there


@st.composite
def datasets(draw: st.DrawFn) -> Case:
    """A dataset of any kind over any corpus."""
    corpus, kind = (
        draw(corpora()),
        draw(st.sampled_from([PackedDataset, BucketedDataset, LabelledDataset])),
    )
    batch_size, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**32))
    shuffle = draw(st.booleans())
    begin, end = corpus.num_tokens + 1, corpus.num_tokens + 2
    ids = st.sampled_from([SEPARATOR, (begin, end), (None, end), (begin, None), (None, None)])
    ends = draw(ids)
    pair = ends if isinstance(ends, tuple) else (ends, ends)
    frame = 2 - pair.count(None)
    longest = max(len(corpus[i]) for i in range(len(corpus))) + frame - 1
    assume(longest > 0)
    too_long = draw(st.sampled_from(["error", "truncate", "split"]))
    if kind is PackedDataset:
        length = draw(st.integers(1, 40))
        lengths, cuts = [length], corpus.weighted
        options: Any = (ends, length, batch_size, seed, shuffle, too_long)
    else:
        lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True))
        cuts, options = True, (ends, lengths, batch_size, seed, too_long, shuffle)
    assume(too_long != "error" or not cuts or longest <= max(lengths))
    labels = (np.arange(len(corpus), dtype=np.int32) + 100,) if kind is LabelledDataset else ()
    cut = max(lengths) if cuts and too_long == "truncate" else None
    assume(any(len(pairs(corpus, i, pair, cut)) for i in range(len(corpus))))
    return Case(kind(corpus, *labels, *options), cut)


def pairs(corpus: Corpus, i: int, ends: tuple, cut: int | None) -> list[tuple[int, int, float]]:
    """(token, target, weight) at each position of document i, of which something counts."""
    text = corpus[i].tolist()
    counted = corpus.counted(i)
    counts = np.ones(len(text)) if counted is None else counted
    framed = [*ends[:1], *text, *ends[1:]]
    weights = [1.0, *map(float, counts), 1.0]
    kept = [(id, w) for id, w in zip(framed, weights, strict=True) if id is not None]
    found = [(a, b, w) for (a, _), (b, w) in itertools.pairwise(kept)]
    if cut is not None and len(found) > cut and not any(w for _, _, w in found[:cut]):
        return []
    return found[:cut]


def expected(dataset: TokenDataset, cut: int | None) -> Counter:
    """What has to come once: (token, target, weight), or (token, label of its document)."""
    wanted: Counter = Counter()
    for i in range(len(dataset.corpus)):
        found = pairs(dataset.corpus, i, (dataset.begin_id, dataset.end_id), cut)
        if isinstance(dataset, LabelledDataset):
            found = [(token, int(dataset.labels[i])) for token, _, _ in found]
        wanted.update(found)
    return wanted


def found_in(dataset: TokenDataset, batch: dict[str, np.ndarray]) -> list[tuple]:
    """The same of a batch, after a check of the form of its rows."""
    if isinstance(dataset, LabelledDataset):
        mask = batch["mask"]
        assert mask.any(1).all()
        mask = mask & (batch["weights"] > 0)[:, None]
        labels = np.broadcast_to(batch["labels"][:, None], mask.shape)
        return list(zip(batch["inputs"][mask].tolist(), labels[mask].tolist(), strict=True))
    segments, positions = batch["segment_ids"], batch["positions"]
    filled = segments > 0
    assert not any(array[~filled].any() for array in batch.values())
    for ids, places in zip(segments, positions, strict=True):
        used = int((ids > 0).sum())
        assert not ids[used:].any()
        begins = np.diff(ids[:used], prepend=0) > 0
        assert begins.sum() == ids.max()  # 1, 2, …, each in one piece
        count = np.arange(used)
        assert (places[:used] == count - np.maximum.accumulate(count * begins)).all()
    columns = (batch[name][filled].tolist() for name in ("tokens", "targets", "weights"))
    return list(zip(*columns, strict=True))


@examples(50)
@given(datasets(), st.integers(0, 3), st.integers(0, 6))
def test_datasets_give_each_token_once(case: Case, epoch: int, at: int):
    dataset, found = case.dataset, Counter()
    places = 0
    for k in range(epoch * dataset.batches_per_epoch, (epoch + 1) * dataset.batches_per_epoch):
        batch, halves = dataset.batch(k), (slice(at), slice(at, None))
        parts = [dataset.batch(k, rows) for rows in halves]
        for name, array in batch.items():
            assert len(array) == dataset.batch_size
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, array)
        assert dataset.bucket(k) in dataset.buckets
        places += dataset.batch_size * dataset.bucket(k)
        found.update(found_in(dataset, batch))
    assert found == expected(dataset, case.cut)
    assert dataset.padding_waste == pytest.approx(1 - found.total() / places)


# Meshes

AXES = ("data", "fsdp", "tensor")  # the others are in test_context_parallel and test_moe
SIZES = [
    (data, fsdp, tensor)
    for data in range(1, 9)
    for fsdp in range(1, 9)
    for tensor in range(1, 9)
    if 1 < data * fsdp * tensor <= 8
]


class World(NamedTuple):
    """A model and its batch, and devices that divide all of its axes."""

    mesh: dict[str, int]
    rules: sharding.Rules
    make_model: Callable[[Any], Any]
    batch: dict[str, np.ndarray]
    loss: Any


@st.composite
def worlds(draw: st.DrawFn, family: str) -> World:
    sizes = draw(st.sampled_from(SIZES))
    mesh = dict(zip(AXES, sizes, strict=True))
    unit = math.lcm(*sizes)
    axes = st.sampled_from([None, *AXES])
    # These have sizes that no mesh need divide.
    fixed = ("gates", "features", "classes", "rank", "member", "taps")
    if family != "transformer":  # most cells take one step after another, and an MLP none
        fixed += ("inner_seq",)
    rules = {name: draw(axes) for name in sharding.RULES if name not in fixed}
    rules = {**sharding.RULES, **(rules if draw(st.booleans()) else {})}
    world = World(mesh, rules, *WORLDS[family](draw, unit, math.prod(sizes)))
    return world if is_divided(world) else world._replace(rules=sharding.RULES)


def is_divided(world: World) -> bool:
    """Whether the rules split each size by a number that divides it: a cell has some of its own."""
    skeleton = eqx.filter_eval_shape(lambda key: world.make_model(key=key), jax.random.key(0))
    try:
        sharding.shardings(skeleton, zoo.Layout(world.mesh, world.rules))
    except sharding.ShardingError as error:
        if "is not divisible by" not in str(error):
            raise
        return False
    return True


def token_rows(unit: int, rows: int) -> dict[str, np.ndarray]:
    return token_batch(rows * (1 if rows > 4 else 2), unit * math.ceil(8 / unit))


def draw_transformer(draw: st.DrawFn, unit: int, rows: int) -> tuple[Callable, Any, Any]:
    groups, kv_heads = draw(st.integers(1, 2)), unit * draw(st.integers(1, 2))
    experts = draw(st.sampled_from([None, None, unit * math.ceil(2 / unit)]))
    gated = st.sampled_from(["swiglu", "geglu"])
    plain = st.sampled_from(["swiglu", "geglu", "gelu", "gelu_erf"])
    flag, norms = st.booleans(), st.sampled_from(["none", "per_head", "across_heads"])
    soft_caps = st.sampled_from([None, 5.0])
    kind = draw(st.sampled_from([*MIXERS]))
    pattern = draw(st.sampled_from([("attention",), ("attention",), (kind,), (kind, "attention")]))
    is_hybrid = kind in pattern
    config = transformer.Config(
        vocab_size=unit * math.ceil(64 / unit),
        d_model=unit * draw(st.integers(2, 4)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=groups * kv_heads,
        d_ff=unit * draw(st.integers(1, 8)),
        mlp=draw(plain if experts is None else gated),
        max_seq_len=unit * math.ceil(16 / unit),
        bias=experts is None and draw(st.booleans()),
        logit_soft_cap=draw(soft_caps),
        remat=draw(st.sampled_from(["none", "dots", "dots_no_batch", "full"])),
        attention=transformer.AttentionConfig(
            num_kv_heads=kv_heads,
            head_dim=2 * unit,
            window=draw(st.none() | st.integers(1, 9)),
            window_pattern=draw(st.sampled_from([("local",), ("local", "global")])),
            soft_cap=draw(soft_caps),
            qkv_bias=draw(flag),
            output_gate=draw(flag),
            qk_norm=draw(norms),
        ),
        experts=transformer.ExpertsConfig(num_experts=experts, normalize=draw(flag)),
        residual=transformer.ResidualConfig(
            norm=draw(st.sampled_from(["rms", "layer", "rms_offset"])),
            norm_placement=draw(st.sampled_from(["pre", "post", "both", "stream"])),
            scale_embedding=draw(flag),
        ),
        positions=positions_of(
            draw(st.sampled_from(["rotary", "learned"])),
            draw(st.sampled_from([RopeScaling(), RopeScaling(2.0), RopeScaling(8.0, 1.0, 4.0, 8)])),
        ),
        mixer=transformer.MixerConfig(
            pattern, draw_recurrence(draw, unit) if is_hybrid else RecurrenceConfig()
        ),
        causal=is_hybrid or draw(flag),
        **{name: draw(flag) for name in ("tie_embeddings", "scan_layers")},
    )
    note(str(config))
    make_model = functools.partial(transformer.Transformer, config)
    return make_model, token_rows(unit, rows), losses.next_token


def positions_of(kind: Any, scaling: RopeScaling) -> transformer.PositionsConfig:
    is_rotary = kind == "rotary"
    return transformer.PositionsConfig(kind, scaling=scaling if is_rotary else RopeScaling())


def draw_rnn(draw: st.DrawFn, unit: int, rows: int) -> tuple[Callable, Any, Any]:
    hidden, bidirectional = unit * draw(st.integers(1, 3)), draw(st.booleans())
    tied = draw(st.booleans())
    cell = draw(st.sampled_from([*CELLS, *MIXERS]))
    config = rnn.Config(
        vocab_size=unit * math.ceil(64 / unit),
        hidden_size=hidden,
        num_layers=draw(st.integers(1, 3)),
        cell=cell,
        embed_size=hidden * (1 + bidirectional) if tied else unit * draw(st.integers(1, 3)),
        tie_embeddings=tied,
        bidirectional=bidirectional,
        norm=draw(st.sampled_from(["none", "layer", "rms"])),
        truncate=draw(st.none() | st.integers(1, 9)),
        remat=draw(st.sampled_from(["none", "full"])),
        hoist=draw(st.booleans()),
        unroll=draw(st.integers(1, 3)),
        recurrence=draw_recurrence(draw, unit) if cell in MIXERS else RecurrenceConfig(),
    )
    note(str(config))
    make_model = functools.partial(rnn.RNN, config)
    return make_model, token_rows(unit, rows), losses.next_token


def draw_recurrence(draw: st.DrawFn, unit: int) -> RecurrenceConfig:
    return RecurrenceConfig(
        num_heads=unit,
        key_dim=draw(st.integers(1, 5)),
        value_dim=draw(st.integers(2, 5)),
        chunk=draw(st.integers(1, 9)),
    )


WORLDS = {"transformer": draw_transformer, "rnn": draw_rnn}


def loss_and_gradient(world: World, **where: Any) -> tuple[float, Any]:
    model = drawn_model(lambda key: world.make_model(key=key))
    state, step = state_and_step(lambda key: model, world.loss, **where)
    state, metrics = step(state, world.batch)
    return float(metrics["loss"]), state.opt_state.trace


@pytest.mark.slow
@pytest.mark.parametrize("family", WORLDS)
def test_any_mesh_matches_one_device_gradients(family: str):
    @examples(2)
    @given(worlds(family))
    def check(world: World) -> None:
        jax.clear_caches()  # hundreds of programs would use up the process's memory maps
        expected_loss, expected = loss_and_gradient(world)
        loss, gradient = loss_and_gradient(world, mesh=zoo.Layout(world.mesh, world.rules))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        largest = max(np.abs(x).max() for x in arrays(expected).values())
        assert largest > 0
        # A gradient that is zero by the maths, as a key's bias has, is rounding errors of the rest.
        assert_trees_close(gradient, expected, rtol=1e-4, atol=1e-6 * float(largest))

    check()


# Checkpoints

MESHES = st.sampled_from(["", "data=8", "fsdp=2,tensor=2", "tensor=4", "data=2,fsdp=2,tensor=2"])
LIVES = st.tuples(st.just("live"), MESHES, st.integers(0, 2), st.booleans())
DAMAGES = st.tuples(st.just("damage"), st.sampled_from(KINDS), st.integers(0, 2**32))


def test_newest_undamaged_step_is_restored(tmp_path_factory):
    """Saves, kills inside saves and damages in any order, each life on a mesh of its own."""

    @examples(12)
    @given(st.lists(LIVES | DAMAGES, min_size=3, max_size=6))
    def check(events: list[tuple]) -> None:
        world = tmp_path_factory.mktemp("life")
        folder, pristine = world / "checkpoints", world / "pristine"
        pristine.mkdir()
        for event in events:
            if event[0] == "live":
                live(folder, pristine, *event[1:])
            elif folder.exists():
                hurt(event[1], folder, folder, random.Random(event[2]))
        shutil.rmtree(world)

    check()


def live(folder: Path, pristine: Path, mesh: str, saves: int, killed: bool) -> None:
    """Restore, save some steps, and keep copies of them; at the end of it a save may be torn."""
    wrong, refused = damage.restore(folder, pristine, mesh)
    assert not wrong
    if refused:  # then a user starts again
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        shutil.rmtree(pristine)
        pristine.mkdir()
    with contextlib.closing(Checkpointer(folder)) as checkpointer:
        restored = checkpointer.restore(damage.make_state(0, mesh))
        step = 0 if restored is None else restored[1]
        for step in range(step + 1, step + saves + 1):  # noqa: B020
            checkpointer.save(step, damage.make_state(step, mesh), {"step": step})
            checkpointer.wait()
        saved = {str(step) for step in checkpointer.good_steps()}
    for name in saved | {path.name for path in pristine.iterdir()}:
        if name not in saved:
            shutil.rmtree(pristine / name)
        elif not (pristine / name).exists():  # else it may have been damaged since
            shutil.copytree(folder / name, pristine / name)
    if killed and saves:
        shutil.rmtree(pristine / str(step))
        torn = (folder / str(step)).rename(folder / f"{step}.tmp")
        (torn / "meta.json").unlink()


# Names from outside

TRICKS = ["..", ".", "", "~", "C:", "...", " ", "%2e%2e", "..\\", "\0", "\\", "\n", "\ud800"]
USUAL = ["a", "b.json", "link", "link.json", "lock", ".remote.json", "tokenizer", "x" * 300]
PIECES = st.text(max_size=3) | st.sampled_from(TRICKS + USUAL)
HOSTILE = st.builds(
    lambda first, pieces, between: first + between.join(pieces),
    st.sampled_from(["", "", "", "/", "//", "C:\\", "file:///", "s3://b/", "BOX/", "../" * 3]),
    st.lists(PIECES, min_size=1, max_size=5),
    st.sampled_from(["/", "/", "\\", "//"]),
)
LEADING_OUT = [
    "../a.txt",
    "../../a.txt",
    "c/../../a.txt",
    "link/b.txt",
    "BOX/a.txt",
    "link/secret.json",
]
NAMES = (
    HOSTILE
    | st.sampled_from(["a", "b.json", "a b.txt", "c/d.json", "c/é/..e"])
    | st.sampled_from(LEADING_OUT)
)
SECRET = b"s" * 777


class Hostile(NamedTuple):
    """A store of a stranger's, folders to read it into, and a box around them, which has to stay.

    Links in the folder lead to the box; names lead anywhere.
    """

    box: Path
    folder: Path
    store: Any

    def put(self, name: str, content: bytes | dict = b"x") -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.store.store[f"/store/{name}"] = MemoryFile(self.store, name, content)

    def prepare(self) -> None:
        self.store.store.clear()
        for folder in (self.folder, self.box / "home"):
            shutil.rmtree(folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / "link").symlink_to(self.box)
        (self.folder / "link.json").symlink_to(self.box / "secret.json")

    def outside(self) -> dict[str, bytes | None]:
        """All files in the box, but those in the folder and in the cache's folders of models."""
        inside = (self.folder, *self.box.glob("home/.cache/zoo/models/*/*"))
        return {
            str(path): path.read_bytes()
            for path in self.box.rglob("*")
            if path.is_file() and not any(path.is_relative_to(folder) for folder in inside)
        }


def of_a_listing(names: list[str], world: Hostile) -> Any:
    world.put("net/config.json", {"model_type": "llama"})
    for name in names:
        world.put(f"net/{name}")
    return tree(shelf.fetched("memory://store/net"))


def of_checksums(names: list[str], world: Hostile) -> Any:
    listed = {name: {"bytes": 1, "sha256": checksums.sha256(b"x")} for name in names}
    world.put("net/checksums.json", {"files": listed, "sha256": checksums._digest(listed)})
    for name in names:
        world.put(f"net/{name}")
    return tree(shelf.fetched("memory://store/net"))


def of_local_checksums(names: list[str], world: Hostile) -> Any:
    listed = {name: {"bytes": 1, "sha256": checksums.sha256(b"x")} for name in names}
    content = json.dumps({"files": listed, "sha256": checksums._digest(listed)})
    for name in ("a", "b.json"):
        (world.folder / name).write_text("x")
    (world.folder / "checksums.json").write_text(content)
    found = "\n".join(checksums.problems(world.folder))
    assert "777 bytes" not in found
    if "outside of the folder" in found or "leads out of the folder" in found:
        raise AddressError(found)
    return not found


def of_a_step(names: list[str], world: Hostile) -> Any:
    listed = {name: {"bytes": 1, "sha256": checksums.sha256(b"x")} for name in names}
    world.put("run/checkpoints/5/checksums.json", json.loads(checksums.as_text(listed)))
    for name in names:
        world.put(f"run/checkpoints/5/{name}")
    copies = RemoteCopies(world.folder, Store("memory://store/run"), Record(), owner="me", keep=1)
    if copies.fetch_step(above=-1) is None:
        raise AddressError("damaged")
    return tree(world.folder / "checkpoints" / "5")


def of_a_run(names: list[str], world: Hostile) -> Any:
    world.put("run/run.json", {"id": "1"})
    for name in names:
        world.put(f"run/{name}")
    RemoteCopies(world.folder, Store("memory://store/run"), Record(), owner="me", keep=1).fetch()
    return tree(world.folder)


def of_a_prepared_corpus(names: list[str], world: Hostile) -> Any:
    for name in names:
        world.put(f"corpus/tokenizer/{name}")
    manifest = Manifest({}, "", "uint16", 257, 2, ())
    copies = Copies(location("memory://store/corpus", "data"), manifest, world.folder)
    return tree(copies.folder("tokenizer"))


def of_an_index(names: list[str], world: Hostile) -> Any:
    files = {f"{name}.safetensors": f"{name}.safetensors" for name in names}
    for name in ("a.safetensors", "b.json.safetensors"):
        safetensors.numpy.save_file({name: np.zeros(1)}, world.folder / name)
    (world.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return Weights(world.folder).tensors


def of_a_folder_to_replace(names: list[str], world: Hostile) -> Any:
    for name in names:
        world.put(f"net/{name}")
    world.put("net/saving.json", json.dumps(names).encode())
    with replacing.replacing("memory://store/net") as new:
        (new / "config.json").write_text("{}")
    return [key for key in world.store.store if key.startswith("/store/net/")] == [
        "/store/net/config.json"
    ]


READERS = (
    of_a_listing,
    of_checksums,
    of_local_checksums,
    of_a_step,
    of_a_run,
    of_a_prepared_corpus,
    of_an_index,
    of_a_folder_to_replace,
)


def test_names_from_outside_stay_inside(tmp_path, monkeypatch, caplog):
    """What a listing or a file names is read and written inside of its folder, or refused."""
    box = tmp_path / "1/2/3/4/box"
    (box / "home").mkdir(parents=True)
    (box / "secret.json").write_bytes(SECRET)
    monkeypatch.setenv("HOME", str(box / "home"))
    caplog.set_level("ERROR")
    world = Hostile(box, box / "folder", fsspec.filesystem("memory"))
    before, ends = None, Counter()

    def check(reader: Callable, names: list[str]) -> None:
        nonlocal before
        world.prepare()
        world.put("other/a", b"another's")
        before = before or world.outside()
        try:
            end = bool(reader([name.replace("BOX", str(box)) for name in names], world))
        except (AddressError, PublishError, OSError) as error:
            end = type(error).__name__
        ends[reader.__name__, end] += 1
        assert not [*world.box.rglob("a.txt")]  # names with "..", or absolute, have it
        assert world.outside() == before
        assert world.store.store["/store/other/a"].getvalue() == b"another's"
        assert not [x for x in tmp_path.rglob("*") if not x.is_relative_to(box) and x.is_file()]

    for reader in READERS:
        check(reader, ["a"])
    hostile = st.lists(NAMES, min_size=1, max_size=3, unique=True)
    examples(400)(given(st.sampled_from(READERS), hostile)(check))()
    world.store.store.clear()
    for reader in READERS:  # each of them has read some, and refused some
        assert ends[reader.__name__, True] > 0, ends
        assert ends[reader.__name__, "AddressError"] + ends[reader.__name__, "PublishError"] > 5
