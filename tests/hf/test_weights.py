"""zoo.hf.weights and layouts: files of tensors, damaged or whole, read slice by slice."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import arrays, assert_same, drawn_transformer
from hf_cases import refusal
from model_folders import FetchedSizes
from test_hf import GOLDEN, tensors

import zoo
from zoo import hf, sharding
from zoo.hf.model_types import MODEL_TYPES
from zoo.publishing import PublishError, models


@pytest.mark.parametrize("prefix", ["model.", "transformer.", "bert."])
def test_tensor_name_prefix_is_optional(prefix: str, copy: Any):
    name = {"model.": "llama3", "transformer.": "gpt2", "bert.": "bert"}[prefix]
    folder, want = copy(name), zoo.load(GOLDEN / name)
    stored = tensors(folder)
    bare = {x.removeprefix(prefix): y for x, y in stored.items()}
    if name == "bert":
        bare = {prefix + x: y for x, y in stored.items()}
    assert bare.keys() != stored.keys()
    safetensors.numpy.save_file(bare, folder / "model.safetensors")
    assert_same(zoo.load(folder), want)


def test_buffers_and_tied_heads_are_accepted(copy: Any):
    folder = copy("gpt2")
    stored = tensors(folder)
    extra = {"transformer.h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}
    head = {"lm_head.weight": stored["transformer.wte.weight"]}
    safetensors.numpy.save_file(stored | extra | head, folder / "model.safetensors")
    zoo.load(folder)
    head = {"lm_head.weight": stored["transformer.wte.weight"] + 1}
    safetensors.numpy.save_file(stored | extra | head, folder / "model.safetensors")
    assert "lm_head.weight: (53, 20) here, none" in refusal(folder)


# Damage


def test_mismatched_tensors_are_named(copy: Any):
    folder = copy("llama2")
    stored = tensors(folder)
    stored["model.layers.0.surplus"] = stored.pop("model.norm.weight")
    stored["lm_head.weight"] = stored["lm_head.weight"][:50]
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    assert [line.strip() for line in refusal(folder).splitlines()[1:]] == [
        "lm_head.weight: (50, 24) here, (53, 24) by the configuration",
        "model.layers.0.surplus: (24,) here, none by the configuration",
        "model.norm.weight: none here, (24,) by the configuration",
    ]


def test_damaged_files_are_refused(copy: Any):
    folder = copy("llama2")
    path, config = folder / "model.safetensors", folder / "config.json"
    content, good = path.read_bytes(), config.read_bytes()
    huge = (2**63 - 1).to_bytes(8, "little")
    for damaged in (content[:-3], content[:100], b"", huge + content[8:], b"\x80\x04." * 9):
        path.write_bytes(damaged)
        assert "model.safetensors is damaged, or no safetensors file" in refusal(folder)
    path.unlink()
    assert "has neither model.safetensors nor" in refusal(folder)
    path.write_bytes(content)
    for damaged in (good[:-5], b"[]", b"\xff\xfe"):
        config.write_bytes(damaged)
        assert "config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_never_opened(name: str, copy: Any):
    folder = copy("llama2")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = refusal(folder)
    assert name in message
    assert "runs any code that is in it" in message
    assert "is a file: a model is a folder" in refusal(folder / name)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(x="../elsewhere.safetensors"), r"x lies in '../elsewhere.*outside"),
        (lambda m: m.update(x="/etc/passwd"), "x lies in '/etc/passwd', outside"),
        (lambda m: m.update(x="a\\b.safetensors"), "outside the folder"),
        (lambda m: m.update(x=".."), "outside the folder"),
        (lambda m: m.update(x="weights.bin"), r"x lies in 'weights.bin', .* safetensors"),
        (lambda m: m.update(x="gone.safetensors"), r"gone\.safetensors is missing"),
        (lambda m: m.update(x=1), "index.json is damaged"),
        (lambda m: m.clear(), "index.json is damaged"),
        (lambda m: m.update(x=m["lm_head.weight"]), "names tensors that their files lack: x in"),
        (lambda m: m.pop("lm_head.weight"),
         r"holds lm_head.weight, which model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_invalid_shard_indexes_are_refused(change: Any, message: str, copy: Any):
    folder = copy("mistral")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(PublishError, match=message):
        zoo.load(folder)


def test_two_sets_of_weights_are_refused(copy: Any):
    folder = copy("llama2")
    names = list(tensors(folder))
    write = lambda file: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, file)})
    )
    want = zoo.load(folder)
    write("model.safetensors")  # which is what is opened without it
    assert eqx.tree_equal(zoo.load(folder), want)
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    write("model-00001-of-00001.safetensors")
    assert "both model.safetensors, which transformers opens, and model.saf" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert eqx.tree_equal(zoo.load(folder), want)


# Shardings and memory


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", "bfloat16"), ("mixtral", None), ("gemma3", None)]
)
def test_loaded_weights_are_sharded(name: str, dtype: Any, copy: Any):
    folder, rules = copy(name), {**sharding.RULES}
    mesh = zoo.make_mesh("fsdp=2,tensor=1" if name == "mixtral" else "fsdp=4")
    want = zoo.load(folder)
    got = zoo.load(folder, mesh=mesh, dtype=dtype)
    placed = sharding.shardings(got, zoo.Layout(mesh, rules))
    for (path, x), where in zip(arrays(got).items(), jax.tree.leaves(placed), strict=True):
        whole = arrays(want)[path]
        assert x.sharding.is_equivalent_to(where, x.ndim), path
        np.testing.assert_array_equal(x, whole.astype(dtype or whole.dtype))
    assert not got.blocks.attention.wq.sharding.is_fully_replicated


def test_layout_slices_match_whole_arrays():
    """By a mesh that splits heads, experts and widths, over names that do not lie together."""
    rng = np.random.default_rng(0)
    for name in ("gpt2", "mixtral", "llama3", "qwen3_next"):
        model, family = zoo.load(GOLDEN / name), None
        kind = json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
        family = MODEL_TYPES[kind]
        stored = tensors(GOLDEN / name)
        names = family.layouts(model, family.prefixes[0])
        for path, whole in arrays(model).items():
            for _ in range(5):
                starts = [int(rng.integers(0, n)) for n in whole.shape]
                index = tuple(
                    slice(a, int(rng.integers(a, n)) + 1)
                    for a, n in zip(starts, whole.shape, strict=True)
                )
                got = names[path].read(index, np.float32, lambda key, s: stored[key][s])  # noqa: B023
                np.testing.assert_array_equal(got, np.asarray(whole)[index], err_msg=path)


PEAK = """
import sys, threading, time, resource
sys.path.insert(0, sys.argv[2])
import jax, numpy as np
import zoo
from pathlib import Path
folder = Path(sys.argv[1])
mesh = zoo.make_mesh("fsdp=8")
zoo.load(folder / "small", mesh=mesh)  # what the program itself takes, and compiled code
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = zoo.load(folder / "large", mesh=mesh)
done = True
thread.join()
peak = max(peak, resident())
size = sum(path.stat().st_size for path in (folder / "large").glob("*.safetensors"))
held = {}
for leaf in jax.tree.leaves(model):
    if isinstance(leaf, jax.Array):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
print((peak - before) / size, max(held.values()) / size, min(held.values()) / size, len(held))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_loading_memory_stays_near_file_size(tmp_path: Path):
    """Mapped pages of the files count too: this is the whole process's resident memory."""
    options = {"vocab_size": 8192, "d_ff": 1024, "attention.head_dim": None, "tie_embeddings": True}
    for name, size, layers in (("small", 64, 1), ("large", 512, 6)):
        model = drawn_transformer(d_model=size, num_layers=layers, **options)
        zoo.save(tmp_path / name, model, format="hf")
        (tmp_path / name / "checksums.json").unlink()
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(Path(zoo.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, most, least, devices = map(float, done.stdout.split())
    print(f"peak {peak:.2f} of the file's size, each device holds {least:.4f} to {most:.4f} of it")
    assert peak < 1.3
    assert devices == 8
    assert 0.12 < least <= most < 0.13


def test_tensors_are_fetched_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf.layouts, "BLOCK_BYTES", 1024)
    fetched = FetchedSizes(monkeypatch, hf.layouts)
    model = drawn_transformer(num_layers=4, d_ff=24, **{"experts.num_experts": 4})
    zoo.save(tmp_path / "model", model, format="hf")
    assert fetched.most_at_once <= 2 * 1024 < model.embedding.weight.nbytes
    stored = tensors(tmp_path / "model")
    assert fetched.count > 2 * len(stored) > 2 * 4 * 4 * 3
    safetensors.numpy.save_file(stored, tmp_path / "at once", metadata={"format": "pt"})
    again = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "at once").read_bytes()


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert", "modernbert"])
def test_skeletons_without_weights_are_those_with_them(tmp_path: Path, name: str):
    values = json.loads((GOLDEN / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    here = models.skeleton(tmp_path, weights=False)
    stored = models.skeleton(GOLDEN / name, dtype="bf16")
    assert jax.tree.structure(here) == jax.tree.structure(stored)
    assert jax.tree.leaves(here) == jax.tree.leaves(stored)
    assert len({leaf for leaf in jax.tree.leaves(here) if hasattr(leaf, "shape")}) > 4
    with pytest.raises(PublishError, match=r"has neither model\.safetensors nor"):
        models.skeleton(tmp_path)
