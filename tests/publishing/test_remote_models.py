"""Models at addresses: zoo.load and zoo.save, the cache, faults, and saves that are cut short."""

import functools
import http.server
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import tyro
from fsspec.implementations.memory import MemoryFile
from helpers import assert_same
from stores import Store, gs, gs_port, s3, s3_port, tree  # noqa: F401

import zoo
from recipes import finetune, generate
from zoo import __main__, mlp
from zoo.common import files, store
from zoo.common.files import AddressError
from zoo.common.store import location
from zoo.publishing import PublishError, replacing, shelf
from zoo.publishing.shelf import find
from zoo.wrappers import lora


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home/.cache/zoo/models"


def net(seed: int) -> mlp.MLP:
    return mlp.MLP(mlp.Config(3, 2, hidden_size=4, num_layers=1), key=jax.random.key(seed))


def error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except (PublishError, AddressError) as error:
        return str(error)
    return None


def files_of(root) -> set[str]:
    return set(tree(root))


def noted_fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are fetched from now on, by name."""
    found: list[str] = []
    get = store.Store.get

    def noted(self, folder, names, *others, **more):
        found.extend(names)
        return get(self, folder, names, *others, **more)

    monkeypatch.setattr(store.Store, "get", noted)
    return found


@pytest.fixture
def memory() -> str:
    address = "memory://models"
    fs = location(address, "x").fs
    if fs.exists("/models"):
        fs.rm("/models", recursive=True)
    return address


def test_a_model_at_an_address_is_fetched_once_and_replaced(memory: str, cache: Path, monkeypatch):
    address = f"{memory}/net"
    fetched = noted_fetches(monkeypatch)
    zoo.save(address, net(0), metrics={"loss": 1.0})
    assert files_of(location(address, "x")) == {
        "README.md", "checksums.json", "config.json", "metrics.json", "model.safetensors",
    }  # fmt: skip
    assert list((cache / "saving").iterdir()) == []
    assert_same(zoo.load(address), net(0))
    assert sorted(fetched) == ["README.md", "config.json", "metrics.json", "model.safetensors"]
    assert_same(zoo.load(Path(address)), net(0))  # which makes one slash of the two
    assert len(fetched) == 4
    assert "zoo.load" in (find(address) / "README.md").read_text()
    # Of the model that takes its place, the old one's files go.
    zoo.save(address, net(1))
    assert "metrics.json" not in files_of(location(address, "x"))
    assert_same(zoo.load(address), net(1))
    assert len(fetched) == 7


def test_what_is_no_whole_model_is_refused(memory: str, monkeypatch):
    root = location(memory, "x")
    with pytest.raises(PublishError, match=r"memory://models/none .* model"):
        zoo.load(f"{memory}/none")
    (root / "run/checkpoints/1.txt").write_text("")
    (root / "run/config.json").write_text("{}")
    with pytest.raises(PublishError, match="run is a run that has not finished"):
        zoo.load(f"{memory}/run")
    (root / "other/notes.txt").write_text("mine")
    with pytest.raises(PublishError, match=r"files that are not part of a model: notes\.txt"):
        zoo.save(f"{memory}/other", net(0))
    assert files_of(root / "other") == {"notes.txt"}
    zoo.save(f"{memory}/run/model", net(0))
    assert_same(zoo.load(f"{memory}/run"), net(0))
    weights = root / "run/model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    zoo.save(f"{memory}/run/model", net(2))
    weights.write_bytes(content)
    with pytest.raises(PublishError, match="run/model is damaged"):
        zoo.load(f"{memory}/run")
    with pytest.raises(PublishError, match="damaged: memory://models/run"):
        __main__.verify((f"{memory}/run",))


@pytest.mark.slow
def test_a_save_that_is_cut_anywhere_leaves_no_half_model(s3: Store):  # noqa: F811
    """Whatever request is the last, a reader has the old model, the new one, or an error."""
    address, outcomes, loaded = f"{s3.address}/net", [], []
    for last in range(0, 100, 2):
        zoo.save(address, net(0), metrics={"loss": 1.0})
        with s3.proxied(lambda number, *_, last=last: 403 if number > last else None):
            failed = error_of(lambda: zoo.save(address, net(1)))
        assert "refuses permission" in (failed or "refuses permission")
        if unread := error_of(lambda: loaded.append(zoo.load(address))):
            assert "is being saved, or that was interrupted" in unread
            outcomes.append(-1)
        else:
            same = [eqx.tree_equal(loaded[-1], net(seed)) for seed in (0, 1)]
            outcomes.append(same.index(True))
        if not failed:
            break
    assert {*outcomes} == {0, -1, 1}
    assert outcomes == sorted(outcomes, key=[0, -1, 1].index)


def fail_at(patch: pytest.MonkeyPatch, number: int, error: type[BaseException], *calls) -> None:
    """The call of this number, of those to any of some functions, raises an error instead."""
    counted = itertools.count()

    def counting(call, *given, **more):
        if next(counted) == number:
            raise error
        return call(*given, **more)

    for owner, name in calls:
        call = functools.partial(counting, getattr(owner, name))
        patch.setattr(owner, name, lambda *given, call=call, **more: call(*given, **more))


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_fetch_that_fails_twice_resumes(memory: str, cache: Path, monkeypatch, has_checksums):
    """Killed at any moment, then cut off from the store at some: no part is taken for a whole."""
    address = f"{memory}/net"
    place, kinds = location(address, "x"), set()
    if has_checksums:
        zoo.save(address, net(0))
    else:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            place.fs.pipe_file(f"{place.path}/{name}", b'{"model_type": "llama"}')
    expected = tree(place)
    at_store = [(type(place.fs), name) for name in ("cat_file", "find", "open")]
    at_store.append((MemoryFile, "read"))
    here = [(files, "replace"), (files, "sync"), (Path, "write_bytes"), (Path, "rename")]
    monkeypatch.setattr(store, "_AT_ONCE", 1)  # in order
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def start(*fault) -> bool:
        """Whether it ends with the whole model; if not, no part is in its place."""
        with monkeypatch.context() as patch:
            fail_at(patch, *fault)
            error: BaseException | None = None
            try:
                assert tree(find(address)) == expected
            except (KeyboardInterrupt, AddressError) as raised:
                error = raised
        found = shelf.cached(address)
        assert found is None or tree(found) == expected
        assert "the store cannot be reached" in str(error) or isinstance(error, fault[1] | None)
        return error is None

    def whole() -> dict[str, int]:
        return {x.name: x.stat().st_ino for x in cache.glob("*/*/*") if x.suffix != ".tmp"}

    for killed in itertools.count():
        for cut in range(killed % 6, 99, 6):
            shutil.rmtree(cache, ignore_errors=True)
            if start(killed, KeyboardInterrupt, *at_store, *here):
                assert len(kinds) == len(expected) + 1
                return
            kept = whole()
            kinds.add(len(kept))
            is_last = start(cut, ConnectionError, *at_store)
            assert start(-1, KeyboardInterrupt)
            assert kept.items() <= whole().items()
            if is_last:
                break


@pytest.mark.slow
def test_adapters_at_an_address_on_a_base_at_one(memory: str):
    base = f"{memory}/base"
    zoo.save(base, net(0))
    adapted = lora.adapt(zoo.load(base), lora.Config(rank=2, targets=("*",)), key=jax.random.key(1))
    adapted = jax.tree.map(
        lambda x: x + jnp.ones_like(x) if eqx.is_inexact_array(x) else x, adapted
    )
    zoo.save(base, lora.base(adapted))
    zoo.save_adapters(f"{memory}/adapters", adapted, base=base)
    assert_same(lora.merge(zoo.load(f"{memory}/adapters")), lora.merge(adapted))
    assert_same(
        lora.merge(zoo.load_adapters(f"{memory}/adapters", zoo.load(base))), lora.merge(adapted)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_models_on_stores(kind: str, request: pytest.FixtureRequest, capsys, monkeypatch):
    store: Store = request.getfixturevalue(kind)
    address = f"{store.address}/models/net"
    zoo.save(address, net(0))
    assert_same(zoo.load(address), net(0))
    zoo.save(address, net(1))
    assert_same(zoo.load(address), net(1))
    assert replacing.SAVING not in files_of(location(address, "x"))
    __main__.verify((address,))
    assert "3 files are as they were written" in capsys.readouterr().out.replace(
        "2 files", "3 files"
    )
    __main__.describe(address)
    with pytest.raises((PublishError, AddressError), match=r"no such bucket|not a model"):
        zoo.load(f"{store.scheme}://none-of-this-name/net")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_store_that_falters_is_asked_again(kind: str, request: pytest.FixtureRequest):
    """Every third request is answered by 500, and every fifth is cut."""
    store: Store = request.getfixturevalue(kind)

    def fault(number: int, method: str, path: str):
        return 500 if number % 3 == 0 else "drop" if number % 5 == 0 else None

    address = f"{store.address}/net"
    with store.proxied(fault):
        zoo.save(address, net(0))
        assert_same(zoo.load(address), net(0))


@pytest.mark.slow
def test_half_answers_are_read_again_or_refused(s3: Store, cache: Path):  # noqa: F811
    address = f"{s3.address}/net"
    zoo.save(address, net(0))
    cut: list[int] = []

    def fault(number: int, method: str, path: str):
        if method == "GET" and path.endswith("model.safetensors") and len(cut) < 2:
            cut.append(number)
            return "half"
        return None

    with s3.proxied(fault):
        assert_same(zoo.load(address), net(0))
    assert len(cut) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), [(403, "refuses permission"), (507, "is full")])
def test_a_save_that_cannot_be_copied_keeps_the_model_here(s3: Store, cache: Path, fault, message):  # noqa: F811
    puts = lambda number, method, path: fault if method == "PUT" else None
    with s3.proxied(puts), pytest.raises(PublishError, match=message) as caught:
        zoo.save(f"{s3.address}/net", net(0))
    [kept] = (cache / "saving").glob("*/net")
    assert str(kept) in str(caught.value)
    assert_same(zoo.load(kept), net(0))
    with pytest.raises(PublishError, match="is not a model"):
        zoo.load(f"{s3.address}/net")


def test_a_model_on_a_web_server_is_read(tmp_path: Path):
    zoo.save(tmp_path / "web/net", net(0))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/net"
        assert_same(zoo.load(address), net(0))
        with pytest.raises(PublishError, match="a web server is only read"):
            zoo.save(address, net(0))
        server.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_recipes_take_models_at_addresses(s3: Store, tmp_path: Path, capsys):  # noqa: F811
    shelf = Path(zoo.__file__).parents[1] / "models" / "rnn-python"
    address = f"{s3.address}/rnn"
    for name, content in tree(shelf).items():
        (location(address, "x") / name).write_bytes(content)

    def run(recipe: Any, *arguments: str) -> str:
        recipe.main(tyro.cli(recipe.Config, args=arguments))
        return capsys.readouterr().out

    flags = ("def f", "--max-new-tokens", "4")
    told = run(generate, address, *flags)
    assert told.startswith("def f")
    assert told == run(generate, str(shelf), *flags)
    (tmp_path / "a.txt").write_text("def f(x): return x\n" * 50)
    (tmp_path / "b.txt").write_text("def g(y): return y\n" * 50)
    flags = ("--steps=1", "--data.seq-len=32", "--data.batch-size=8", "--method=lora")
    files = (f"--data.files={tmp_path}/*.txt", f"--run-dir={tmp_path / 'run'}")
    run(finetune, f"--model={address}", "--compilation-cache=None", *flags, *files)
    assert run(generate, str(tmp_path / "run"), "def f", "--max-new-tokens=4").startswith("def f")
