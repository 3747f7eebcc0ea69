"""Folders quantised by GPTQ, AWQ and bitsandbytes, read as they are.

The golden files are made by `golden/make_quantized_golden.py`; nothing here needs PyTorch.
"""

import importlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from helpers import assert_same
from jax.experimental.compilation_cache import compilation_cache

import zoo
from zoo import transformer
from zoo.common import configuration
from zoo.nn.products import dequantize, is_quantized
from zoo.publishing import PublishError
from zoo.publishing.models import skeleton
from zoo.quantization.matrix import QuantizedMatrix
from zoo.runs.metrics import read_metrics
from zoo.sharding.axes import keystr
from zoo.tasks import finetuning
from zoo.wrappers import lora

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_quantized"
CASES = sorted(path.name for path in GOLDEN.iterdir())
LAYER = "model.layers.0."
Q = f"{LAYER}self_attn.q_proj"


def read(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def changed(
    name: str,
    folder: Path,
    tensors: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
    **settings: Any,
) -> Path:
    """A golden folder with other tensors and settings; a setting of None is left out."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    found = read(folder)
    tensors(found)
    safetensors.numpy.save_file(found, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    described = values["quantization_config"] | settings
    values["quantization_config"] = {x: y for x, y in described.items() if y is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def matrices(model: Any) -> dict[str, QuantizedMatrix]:
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_quantized)
    return {keystr(path): x for path, x in leaves if is_quantized(x)}


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_what_the_methods_own_programs_dequantise(name: str):
    golden, model = np.load(GOLDEN / name / "golden.npz"), zoo.load(GOLDEN / name, dtype="fp32")
    attention, w_down = model.blocks.attention, model.blocks.mlp.w_down
    embed = w_down.shape[-1]
    got = {
        "self_attn.q_proj": np.asarray(attention.wq.value())[0].reshape(embed, -1),
        "self_attn.o_proj": np.asarray(attention.wo.value())[0].reshape(-1, embed),
        "mlp.down_proj": np.asarray(w_down.value())[0],
    }
    for module, x in got.items():
        want = golden[f"layers.0.{module}"]
        # bitsandbytes multiplies by 1 / 127 where it is divided here.
        np.testing.assert_allclose(x.T[::11], want, rtol=3e-7 if name == "int8" else 0)
        assert np.abs(want).max() > 0.3
    quantised = matrices(model)
    assert sorted(quantised) == [f"blocks.attention.w{x}" for x in "koqv"] + [
        f"blocks.mlp.w_{x}" for x in ("down", "gate", "up")
    ]
    bits = 8 if name in ("int8", "gptq_act_order") else 4
    for x in quantised.values():
        assert x.codes.nbytes == np.prod(x.shape) * bits // 8
    wo = attention.wo
    assert (wo.order is not None) == (name == "gptq_act_order")
    assert (wo.zeros is not None) == (name in ("awq", "gptq", "gptq_act_order"))


SLOW = pytest.mark.slow
QUICK = {"gptq_act_order", "nf4"}


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=SLOW) for x in CASES])
def test_logits_match_transformers(name: str):
    golden, model = np.load(GOLDEN / name / "golden.npz"), zoo.load(GOLDEN / name, dtype="fp32")
    got = eqx.filter_jit(model)(jnp.asarray(golden["tokens"]))
    np.testing.assert_allclose(got, golden["logits"], atol=3e-5)
    assert np.abs(golden["logits"]).max() > 3


# A group of nf4's is cut in two: each device has half of the low codes, and half of the high ones.
MESHES = {"awq": "fsdp=2", "nf4": "fsdp=2", "fp4": "fsdp=2,tensor=2", "int8": "fsdp=2,tensor=2"}


@pytest.mark.parametrize("name", MESHES)
def test_each_device_reads_its_slices(name: str):
    mesh = zoo.make_mesh(MESHES[name])
    one, sharded = zoo.load(GOLDEN / name), zoo.load(GOLDEN / name, mesh=mesh)
    assert_same(one, sharded)
    for path, x in matrices(sharded).items():
        assert len({str(shard.index) for shard in x.codes.addressable_shards}) == mesh.size, path


@pytest.mark.parametrize("name", CASES)
def test_a_skeleton_is_that_of_the_model(name: str):
    for dtype in (None, "bf16"):
        want = jax.eval_shape(lambda x: x, zoo.load(GOLDEN / name, dtype=dtype))
        got = skeleton(GOLDEN / name, dtype=dtype)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        pairs = [*zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
        assert pairs
        assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


def test_a_dtype_is_of_what_is_not_quantised_and_of_the_values():
    stored, cast = zoo.load(GOLDEN / "gptq"), zoo.load(GOLDEN / "gptq", dtype="bf16")
    for model, dtype in ((stored, jnp.float16), (cast, jnp.bfloat16)):
        wq = model.blocks.attention.wq
        assert model.embedding.weight.dtype == wq.dtype == wq.value().dtype == dtype
        assert (wq.scales.dtype, wq.codes.dtype) == (jnp.float16, jnp.uint8)


def without_borrows(tensors: dict[str, np.ndarray]) -> None:
    """Zero points of the second version in the first, where those of 0 borrow from the next."""
    for name in tensors:
        if name.endswith("qzeros"):
            words = tensors[name].view(np.uint32)
            words = words & ~np.uint32(0xF0)  # the second output of each word
            tensors[name] = words.view(np.int32)


def test_versions_of_gptq_differ_by_one_in_zero_points(tmp_path: Path):
    second = changed("gptq", tmp_path / "2", without_borrows, checkpoint_format="gptq_v2")

    def less_one(tensors: dict[str, np.ndarray]) -> None:
        without_borrows(tensors)
        for name in tensors:
            if name.endswith("qzeros"):
                less = tensors[name].view(np.uint32) - np.uint32(0x11111111)
                tensors[name] = less.view(np.int32)

    first = zoo.load(changed("gptq", tmp_path / "1", less_one))
    wk = first.blocks.mlp.w_down
    assert (wk.zeros == 0).any()
    assert (wk.zeros > 0).any()
    assert_same(first, zoo.load(second))


def test_symmetric_codes_need_no_zero_points(tmp_path: Path):
    def middle(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            if name.endswith("qzeros"):
                tensors[name] = np.full_like(tensors[name], 0x77777777)

    symmetric = zoo.load(changed("gptq", tmp_path / "sym", middle, sym=True))
    said = zoo.load(changed("gptq", tmp_path / "said", sym=True))
    kept = zoo.load(changed("gptq", tmp_path / "kept", middle))
    for path, x in matrices(symmetric).items():
        assert x.zeros is None
        assert matrices(said)[path].zeros is not None, "a setting that is not true of the file"
        np.testing.assert_array_equal(x.value(), matrices(kept)[path].value())


def test_scales_of_scales_have_blocks_of_their_own(tmp_path: Path):
    rng = np.random.default_rng(3)
    factors = rng.uniform(0.5, 2, 4).astype(np.float32)

    def finer(tensors: dict[str, np.ndarray]) -> None:
        name = f"{LAYER}self_attn.q_proj.weight"
        tensors[f"{name}.nested_absmax"] = tensors[f"{name}.nested_absmax"] * factors
        state = f"{name}.quant_state.bitsandbytes__nf4"
        values = json.loads(tensors[state].tobytes()) | {"nested_blocksize": 16}
        tensors[state] = np.frombuffer(json.dumps(values).encode(), np.uint8)

    got = zoo.load(changed("nf4", tmp_path, finer)).blocks.attention.wq.scales[0, 0]
    tensors = read(GOLDEN / "nf4")
    name = f"{Q}.weight"
    state = json.loads(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
    codes = tensors[f"{name}.nested_quant_map"][tensors[f"{name}.absmax"]]
    absmax = codes * np.repeat(tensors[f"{name}.nested_absmax"] * factors, 16)
    want = absmax + np.float32(state["nested_offset"])
    np.testing.assert_allclose(got.reshape(-1), want, rtol=1e-6)  # one block per output here
    assert np.unique(want).size > 10


def gptq_of_plain(source: Path, folder: Path, plain: Path, *, order: bool) -> list[str]:
    """A folder's linear layers by GPTQ, and `plain` with their values; the names of those."""
    rng, tensors, values = np.random.default_rng(0), {}, {}
    found = read(source)
    linears = [x for x in found if x.endswith("weight") and found[x].ndim == 2]
    linears = [x for x in linears if not any(y in x for y in ("embed", "lm_head", "gate.weight"))]
    for name, w in found.items():
        if name not in linears:
            tensors[name] = values[name] = w
            continue
        (outputs, inputs), module = w.shape, name.removesuffix(".weight")
        groups = np.arange(inputs) // 8
        groups = groups[rng.permutation(inputs)] if order else groups
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(1, 16, (inputs // 8, outputs))
        scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
        nibbles = 16 ** np.arange(8, dtype=np.int64)
        by_inputs = (codes.reshape(-1, 8, outputs) * nibbles[:, None]).sum(1)
        by_outputs = ((zeros - 1).reshape(inputs // 8, -1, 8) * nibbles).sum(2)
        tensors |= {
            f"{module}.qweight": by_inputs.astype(np.uint32).view(np.int32),
            f"{module}.qzeros": by_outputs.astype(np.uint32).view(np.int32),
            f"{module}.scales": scales,
            f"{module}.g_idx": groups.astype(np.int32),
        }
        value = (codes - zeros[groups]) * scales[groups].astype(np.float32)
        values[name] = np.ascontiguousarray(value.T)
    config = json.loads((source / "config.json").read_text())
    described = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": order}
    for path, content, more in ((folder, tensors, True), (plain, values, False)):
        path.mkdir()
        safetensors.numpy.save_file(content, path / "model.safetensors")
        extra = {"quantization_config": described} if more else {}
        (path / "config.json").write_text(json.dumps(config | extra))
    return linears


FAMILIES = {
    "qwen2": {"attention.qkv_bias": True, "residual.norm": "rms"},
    "mixtral": {"experts.num_experts": 4, "experts.normalize": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "order"), [("mixtral", False), ("qwen2", True)])
def test_every_family_with_llamas_names(family: str, order: bool, tmp_path: Path):
    sizes = {"d_model": 32, "num_heads": 4, "attention.num_kv_heads": 2, "d_ff": 32}
    small = transformer.Config(16, num_layers=2)
    config = configuration.replaced(small, {"mlp": "swiglu", **sizes, **FAMILIES[family]})
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "whole", model, format="hf")
    folders = tmp_path / "whole", tmp_path / "gptq", tmp_path / "plain"
    linears = gptq_of_plain(*folders, order=order)
    assert json.loads((folders[1] / "config.json").read_text())["model_type"] == family
    assert len(linears) == 2 * (4 + 3 * (config.experts.num_experts or 1))
    got = zoo.load(folders[1])
    assert len(matrices(got)) == 7
    assert all((x.order is not None) == order for x in matrices(got).values())
    assert_same(dequantize(got), zoo.load(folders[2]))
    assert_same(got, zoo.load(folders[1], mesh=zoo.make_mesh("fsdp=2,tensor=2")))


def test_biases_of_zeros_that_the_family_lacks_are_left_out(tmp_path: Path):
    def bias(tensors: dict[str, np.ndarray], value: float) -> None:
        tensors[f"{Q}.bias"] = np.full(64, value, np.float16)

    got = zoo.load(changed("gptq", tmp_path / "0", partial(bias, value=0)))
    assert_same(got, zoo.load(GOLDEN / "gptq"))
    with pytest.raises(PublishError, match=r"q_proj\.bias: \(64,\)"):
        zoo.load(changed("gptq", tmp_path / "1", partial(bias, value=1)))


def test_adapters_stand_on_quantised_matrices():
    """With an order of inputs: the product takes its inputs in it, and so does its gradient."""
    model = zoo.load(GOLDEN / "gptq_act_order", dtype="fp32")
    wo = jax.tree.map(lambda x: x[0], model.blocks.attention.wo)
    x = jax.random.normal(jax.random.key(0), (3, 5, *wo.shape[:2]))
    want = lambda x: jnp.tensordot(x, wo.value(), 2)
    got = lambda x: wo.times(x, contract=2)
    np.testing.assert_allclose(got(x), want(x), atol=1e-5)
    gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (got, want)]
    np.testing.assert_allclose(*gradients, atol=1e-4)
    assert np.abs(gradients[0]).max() > 1

    adapted = lora.adapt(model, lora.Config(rank=2), key=jax.random.key(0))
    assert lora.has_adapters(adapted)
    assert sum(map(bool, jax.tree.leaves(lora.trainable(adapted)))) == 14
    merged = lora.base(adapted)
    assert_same(merged, model)


@pytest.fixture
def recipe(no_curves):
    """`recipe(name)` is a recipe's module; its compilation cache ends with the test."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda name: importlib.import_module(f"recipes.{name}")
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def with_tokenizer(name: str, folder: Path) -> Path:
    """A golden folder that has a tokenizer too, of 30 ids: there is no room for those of bytes."""
    shutil.copytree(GOLDEN / name, folder)
    letters = [*"abcdefghijklmnopqrstuvwxyz \n.", "<|endoftext|>"]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(letters)}, []))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq_act_order"])
def test_quantised_folders_are_fine_tuned_by_adapters(name: str, tmp_path: Path, recipe, capsys):
    folder, run_dir = with_tokenizer(name, tmp_path / "model"), tmp_path / "run"
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"letter {'abcdefghij'[number]} comes here.\n" * 20)
    finetune, generate = recipe("finetune"), recipe("generate")
    config = finetune.Config(
        run_dir=run_dir,
        steps=10,
        model=str(folder),
        method="lora",
        sample_tokens=4,
        data=finetuning.Data(str(tmp_path / "*.txt"), held_out=0.2, seq_len=32, batch_size=4),
        optimizer=finetuning.Optimizer(learning_rate=0.01, warmup_steps=0),
    )
    finetune.main(config)
    losses = [x["eval_loss"] for x in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in x]
    assert losses[-1] < losses[0] - 0.3
    served, base = zoo.load(run_dir / "adapters"), zoo.load(folder)
    assert len(matrices(base)) == 7
    assert_same(lora.base(served), base)
    capsys.readouterr()
    greedy, adapters = zoo.Sampling(temperature=0.0), str(run_dir / "adapters")
    generate.main(generate.Config(adapters, ("letter ",), max_new_tokens=6, sampling=greedy))
    assert capsys.readouterr().out.count("letter ") == 1


def test_quantised_matrices_are_not_fine_tuned_in_full(tmp_path: Path):
    config = finetuning.Config(run_dir=tmp_path, steps=1, model=str(GOLDEN / "gptq"))
    run = object.__new__(zoo.Run)  # not begun: the model is looked at before
    run.config = config
    with pytest.raises(ValueError, match=r"gptq' is stored quantised.*take method='lora'"):
        finetuning.Base(run)


def drop(suffix: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.__delitem__(f"{Q}{suffix}")


def put(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q}{suffix}"] = change(tensors[f"{Q}{suffix}"]).copy()

    return edit


def whole_first_layer(tensors: dict[str, np.ndarray]) -> None:
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{Q}.{suffix}"]
    tensors[f"{Q}.weight"] = np.zeros((64, 64), np.float16)


def nothing_quantised(tensors: dict[str, np.ndarray]) -> None:
    for name in [x for x in tensors if "_proj" in x]:
        del tensors[name]


STATE = ".weight.quant_state.bitsandbytes__nf4"
REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "another method": ("gptq", None, {"quant_method": "hqq"}, r"'hqq' are not read, only.*gptq"),
    "a setting": ("gptq", None, {"rotation": "x"}, r"unknown fields.*rotation='x'"),
    "3 bits": ("gptq", None, {"bits": 3}, r"bits=3 is not supported"),
    "marlin": ("gptq", None, {"checkpoint_format": "marlin"}, r"layout 'marlin' of GPTQ"),
    "gemv": ("awq", None, {"version": "gemv"}, r"layout 'gemv' of AWQ"),
    "dynamic": ("gptq", None, {"dynamic": {"x": {}}}, r"settings per module"),
    "no bits": ("gptq", None, {"bits": None}, r"has no field bits"),
    "group size": ("gptq", None, {"group_size": 48}, r"q_proj: group_size=48 does not divide"),
    "another group size": ("awq", None, {"group_size": 16}, r"scales: \(2, 64\) here, \(4, 64\)"),
    "no zero points": ("gptq", drop(".qzeros"), {}, r"q_proj\.qzeros: none here, \(2, 8\) by"),
    "no scales": ("awq", drop(".scales"), {}, r"q_proj\.scales: none here, \(2, 64\) by"),
    "no g_idx": ("gptq", drop(".g_idx"), {}, r"q_proj\.g_idx: none here, \(64,\) by"),
    "g_idx": ("gptq", put(".g_idx", lambda x: x * 0), {}, r"q_proj: g_idx is damaged"),
    "negative": ("gptq", put(".g_idx", lambda x: x - 1), {}, r"q_proj: g_idx is damaged"),
    "a shape": ("gptq", put(".qweight", lambda x: x[:4]), {},
                r"qweight: \(4, 64\) here, \(8, 64\)"),
    "a type": ("gptq", put(".scales", lambda x: x.astype(np.int32)), {}, r"of type int32.*float16"),
    "one layer": ("gptq", whole_first_layer, {},
                  r"blocks.attention.wq stacks layers, of which som"),
    "none": ("gptq", nothing_quantised, {}, r"no matrix here is quantised"),
    "no absmax": ("nf4", drop(".weight.absmax"), {}, r"weight\.absmax: none here, \(1,\) by"),
    "no state": ("nf4", drop(STATE), {}, r"bitsandbytes__nf4: none here"),
    "state": ("nf4", put(STATE, lambda x: x[:9]), {}, r"nf4 is damaged"),
    "blocks": ("fp4", put(".weight.absmax", lambda x: x[1:]), {}, r"63 numbers, and 64 blocks"),
    "a table": ("nf4", put(".weight.quant_map", lambda x: -x), {},
                r"another table than that of nf4"),
    "another kind": ("nf4", None, {"bnb_4bit_quant_type": "fp4"}, r"bitsandbytes__fp4: none here"),
    "4 or 8 bits": ("nf4", None, {"load_in_8bit": True}, r"one of load_in_4bit and load_in_8bit"),
    "rows": ("int8", put(".weight_format", lambda x: np.ones((), x.dtype)), {},
             r"weight_format=1: only 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_damaged_or_unknown_is_refused_by_name(case: str, tmp_path: Path):
    name, edit, settings, message = REFUSED[case]
    folder = changed(name, tmp_path, *([edit] if edit else []), **settings)
    with pytest.raises(PublishError, match=f"(?s){message}"):
        zoo.load(folder)


def test_tensors_without_a_description_are_refused(tmp_path: Path):
    folder = changed("awq", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(PublishError, match=r"_proj\.q\w+ .* config.json has"):
        zoo.load(folder)


def test_a_family_without_such_matrices_is_refused(tmp_path: Path):
    source = GOLDEN.with_name("hf") / "gpt2"
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tensors, values = read(source), json.loads((source / "config.json").read_text())
    for name in [x for x in tensors if x.endswith("mlp.c_fc.weight")]:
        tensors[name.replace("weight", "qweight")] = tensors.pop(name).astype(np.int32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    described = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    values["quantization_config"] = described
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PublishError, match=r"c_fc.weight .* gpt2"):
        zoo.load(tmp_path)


def test_what_is_quantised_is_not_quantised_again():
    with pytest.raises(PublishError, match=r"quantize='int8' .* weights.*by gptq"):
        zoo.load(GOLDEN / "gptq", quantize="int8")
    with pytest.raises(PublishError, match=r"quantize='nf4' .* weights.*by awq"):
        skeleton(GOLDEN / "awq", quantize="nf4")
