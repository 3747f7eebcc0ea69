"""zoo.export.gguf_file and architectures: files read back by gguf's reader, and by llama.cpp.

With llama-cpp-python installed (`pip install -e '.[engines]'`) the slow tests compare its logits
and its greedy tokens with ours.
"""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from zoo.common import configuration
from zoo.export import gguf_file
from zoo.export.architectures import TARGETS
from zoo.publishing import PublishError
from zoo.publishing.models import skeleton
from zoo.transformer import Config, Transformer

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
KINDS = gguf.GGMLQuantizationType


def write(path: Path, model: Any, type: str = "f32", tokenizer: Any = None) -> gguf.GGUFReader:
    gguf_file.write(path, model, name="tiny", type=type, tokenizer=tokenizer)
    return gguf.GGUFReader(path)


def exported(name: str, tmp_path: Path, **options: Any) -> tuple[dict[str, np.ndarray], Any, Any]:
    """Of a golden folder: the tensors of the file, those of the folder, and the reader."""
    reader = write(tmp_path / "x.gguf", zoo.load(GOLDEN / name), **options)
    found = {x.name: gguf.dequantize(x.data, x.tensor_type) for x in reader.tensors}
    theirs: dict[str, np.ndarray] = {}
    for file in (GOLDEN / name).glob("*.safetensors"):
        theirs |= safetensors.numpy.load_file(file)
    return found, theirs, reader


def value(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.get_field(key).contents()


def by_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head with the two of a rotary pair side by side, as llama.cpp has them."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def llama3_factors(config: dict) -> list[float]:
    """Grattafiori et al. 2024: by wavelength, 1 for short ones and `factor` for long ones."""
    rope, size, found = config["rope_parameters"], config["head_dim"], []
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], 16
    for pair in range(size // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * pair / size)
        smooth = min(max((length / wave - low) / (high - low), 0), 1)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return found


def test_llama(tmp_path: Path):
    found, theirs, reader = exported("llama3", tmp_path)
    config = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    layer, block = "model.layers.1.self_attn", "blk.1.attn"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    np.testing.assert_array_equal(
        found[f"{block}_q.weight"], by_pairs(theirs[f"{layer}.q_proj.weight"], heads)
    )
    np.testing.assert_array_equal(
        found[f"{block}_k.weight"], by_pairs(theirs[f"{layer}.k_proj.weight"], kv_heads)
    )
    np.testing.assert_array_equal(found[f"{block}_v.weight"], theirs[f"{layer}.v_proj.weight"])
    np.testing.assert_array_equal(found[f"{block}_output.weight"], theirs[f"{layer}.o_proj.weight"])
    np.testing.assert_array_equal(found["token_embd.weight"], theirs["model.embed_tokens.weight"])
    assert value(reader, "general.architecture") == "llama"
    assert value(reader, "llama.attention.head_count") == heads
    assert value(reader, "llama.attention.head_count_kv") == kv_heads
    assert value(reader, "llama.block_count") == config["num_hidden_layers"]
    assert value(reader, "llama.context_length") == config["max_position_embeddings"]
    assert value(reader, "llama.rope.freq_base") == config["rope_parameters"]["rope_theta"]
    assert value(reader, "tokenizer.ggml.model") == "no_vocab"
    np.testing.assert_allclose(found["rope_freqs.weight"], llama3_factors(config), rtol=1e-6)


def test_tensors_side_by_side(tmp_path: Path):
    found, theirs, _ = exported("gpt2", tmp_path)
    c_attn = theirs["transformer.h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_qkv.weight"], c_attn.T)
    bias = theirs["transformer.h.0.attn.c_attn.bias"]
    np.testing.assert_array_equal(found["blk.0.attn_qkv.bias"], bias)
    found, theirs, _ = exported("phi3_short", tmp_path)
    joined = theirs["model.layers.0.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(found["blk.0.ffn_up.weight"], joined)
    assert "blk.0.ffn_gate.weight" not in found
    joined = theirs["model.layers.0.self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_qkv.weight"], joined)


def test_norms_that_are_stored_less_one(tmp_path: Path):
    found, theirs, _ = exported("gemma", tmp_path)
    scale = theirs["model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_norm.weight"], scale + 1)


def test_experts(tmp_path: Path):
    found, theirs, reader = exported("mixtral", tmp_path)
    names = [f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight" for i in range(5)]
    down = np.stack([theirs[name] for name in names])
    np.testing.assert_array_equal(found["blk.1.ffn_down_exps.weight"], down)
    gate = theirs["model.layers.1.block_sparse_moe.gate.weight"]
    np.testing.assert_array_equal(found["blk.1.ffn_gate_inp.weight"], gate)
    assert value(reader, "llama.expert_count") == len(down)
    # The window of 9 is where llama.cpp's contexts of such a model end.
    assert value(reader, "llama.context_length") == 9


def test_what_differs_is_said(tmp_path: Path):
    model = zoo.load(GOLDEN / "gpt_oss")
    notes = gguf_file.write(tmp_path / "x", model, name="x", type="f16", tokenizer=None)
    assert any("positions.scaling.truncate=False" in note for note in notes)
    notes = gguf_file.write(tmp_path / "y", model_of("phi3"), name="x", type="f16", tokenizer=None)
    assert any("positions.scaling.long_factors" in note for note in notes)


def test_a_context_ends_at_a_window_that_llama_cpp_lacks(tmp_path: Path):
    model = zoo.load(GOLDEN / "mistral")
    notes = gguf_file.write(tmp_path / "x", model, name="x", type="f16", tokenizer=None)
    assert any("7 positions in place of 64" in note for note in notes)


@pytest.mark.parametrize(("type", "bits"), [("q8_0", 8), ("q4_0", 4), ("bf16", 0), ("f16", 0)])
def test_values_of_matrices(tmp_path: Path, type: str, bits: int):
    config = Config(vocab_size=64, d_model=64, num_layers=1, num_heads=2, d_ff=40)
    model = Transformer(config, key=jax.random.key(0))
    reader = write(tmp_path / "x.gguf", model, type)
    kinds = {x.name: KINDS(x.tensor_type).name for x in reader.tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_up.weight"] == type.upper()
    # 32 does not divide rows of 40.
    assert kinds["blk.0.ffn_down.weight"] == ("F16" if bits else type.upper())
    assert kinds["token_embd.weight"] == {"q4_0": "Q8_0"}.get(type, type.upper())
    [stored] = [x for x in reader.tensors if x.name == "blk.0.ffn_up.weight"]
    values = gguf.dequantize(stored.data, stored.tensor_type)
    exact = np.asarray(model.blocks.mlp.w_up[0]).T
    # A step is the largest value of 32 over 127, or over 8, in float16.
    largest = np.abs(exact.reshape(-1, 32)).max(axis=1, keepdims=True)
    step = {8: largest / 127 / 2, 4: largest / 8, 0: np.abs(exact.reshape(-1, 32)) / 128}[bits]
    assert (np.abs(values - exact).reshape(-1, 32) <= step * 1.15 + 1e-6).all()
    assert value(reader, "general.file_type") == gguf.LlamaFileType[f"MOSTLY_{type.upper()}"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mamba2", "mamba2"),
        ("bert", "bert"),
        ("arcee", "mlp_bias=True"),
        ("seed_oss", "attention.out_bias=True"),
        ("smollm3", "positions.pattern="),
        ("gemma2", "attention.scale="),
        ("qwen2_moe", "experts.interval=2"),
        ("qwen3_moe", "experts.normalize=False"),
        ("nemotron", "attention.head_dim=8"),
        ("deepseek_v2", "attention.latent.q_rank=None.*experts.group_score=1"),
        ("deepseek_v3", "attention.scale="),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path, name: str, words: str):
    with pytest.raises(PublishError, match=words):
        write(tmp_path / "x.gguf", skeleton(GOLDEN / name))
    assert not [*tmp_path.iterdir()]


def test_wavelengths_scaled_as_by_llama_3_are_refused_where_llama_cpp_has_no_place(tmp_path: Path):
    scaling = skeleton(GOLDEN / "llama3").config.positions.scaling
    config = configuration.replaced(
        skeleton(GOLDEN / "qwen3").config, {"positions.scaling": scaling}
    )
    with pytest.raises(PublishError, match=r"'qwen3' has no positions\.scaling\.ramp='llama3'"):
        write(tmp_path / "x.gguf", Transformer(config, key=jax.random.key(0)))
    assert not [*tmp_path.iterdir()]


# With the engine.

SIZES = {"d_model": 64, "num_layers": 4, "num_heads": 4, "d_ff": 96, "attention.head_dim": 16}
# What golden folders have that llama.cpp has not, in values that it has.
OTHER: dict[str, dict[str, Any]] = {
    "arcee": {"mlp_bias": False},
    "cohere": {"attention.out_bias": False, "attention.qkv_bias": False},
    "deepseek_v2": {
        "attention.latent.q_rank": 24,
        "experts.num_groups": 1,
        "experts.groups_per_token": 1,
    },
    # mscale and mscale_all_dim of 1, and a factor of 4
    "deepseek_v3": {"attention.scale": 16**-0.5 * (0.1 * math.log(4) + 1) ** 2},
    "kimi_k2": {"attention.scale": 16**-0.5 * (0.1 * math.log(4) + 1) ** 2},
    "falcon": {"attention.num_kv_heads": 1},
    "gemma2": {"attention.scale": None, "attention.window": 7},
    "gemma3_text": {"attention.scale": None, "attention.window": 7},
    "gpt_oss": {"positions.scaling.truncate": True},
    "gpt_bigcode": {"attention.num_kv_heads": 1},
    "olmoe": {"attention.num_kv_heads": 4},
    "phi3": {"positions.scaling.original_max_seq_len": 512, "max_seq_len": 1024},
    "qwen2_moe": {"experts.interval": 1, "experts.first_dense": 0, "attention.window": None},
    "qwen3_moe": {"experts.normalize": True, "experts.interval": 1, "experts.first_dense": 0},
    "seed_oss": {"attention.out_bias": False},
    "smollm3": {"positions.pattern": ("rotary",) * 3 + ("none",), "attention.window": None},
}
FOLDERS = {
    "kimi_k2": "deepseek_v3",
    "gemma3_text": "gemma3",
    "exaone4": "exaone4_full",
    "llama": "llama3",
}


def model_of(model_type: str) -> Transformer:
    config = skeleton(GOLDEN / FOLDERS.get(model_type, model_type)).config
    changes: dict[str, Any] = {**SIZES, "max_seq_len": 256, "attention.num_kv_heads": 2}
    changes["eos_ids"] = ()
    latent = config.attention.latent.kv_rank is not None
    if model_type in ("gpt2", "gpt_neox", "phi") or latent:
        changes["attention.num_kv_heads"] = 4
    if config.attention.window is not None:
        changes["attention.window"] = 200
    scaling = config.positions.scaling
    if scaling.short_factors:
        pairs = round(8 * config.positions.rotary_fraction)
        changes["positions.scaling.short_factors"] = tuple(1 + 0.1 * i for i in range(pairs))
        changes["positions.scaling.long_factors"] = tuple(1 + 0.7 * i for i in range(pairs))
    if config.positions.rotary_fraction != 1:
        changes["positions.rotary_fraction"] = 0.5
    config = configuration.replaced(config, changes | OTHER.get(model_type, {}))
    drawn = Transformer(config, key=jax.random.key(0))
    flat, tree = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(1), len(flat))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(flat, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


class Engine:
    """llama.cpp, by the functions of its library."""

    def __init__(self, path: Path):
        self.cpp = pytest.importorskip("llama_cpp", reason="pip install 'zoo[engines]'")
        self.silent = self.cpp.llama_log_callback(lambda level, text, data: None)
        self.cpp.llama_log_set(self.silent, None)
        options = self.cpp.llama_model_default_params()
        self.model = self.cpp.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, path
        options = self.cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 256
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = 0  # keys and values in float32
        options.flash_attn_type = 0
        self.context = self.cpp.llama_init_from_model(self.model, options)
        self.vocabulary = self.cpp.llama_model_get_vocab(self.model)
        self.size = self.cpp.llama_vocab_n_tokens(self.vocabulary)
        self.length = 0

    def logits(self, ids: list[int]) -> np.ndarray:
        """The logits behind each of some further tokens, [seq, vocab]."""
        batch = self.cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, id in enumerate(ids):
            batch.token[place], batch.pos[place] = id, self.length + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        assert self.cpp.llama_decode(self.context, batch) == 0
        self.length += len(ids)
        rows = (self.cpp.llama_get_logits_ith(self.context, i) for i in range(len(ids)))
        return np.array([np.ctypeslib.as_array(row, (self.size,)).copy() for row in rows])

    def greedy(self, ids: list[int], count: int) -> list[int]:
        found = [int(self.logits(ids)[-1].argmax())]
        while len(found) < count:
            found.append(int(self.logits(found[-1:])[-1].argmax()))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TARGETS))
def test_llama_cpp_computes_the_same(tmp_path: Path, model_type: str):
    pytest.importorskip("llama_cpp", reason="pip install 'zoo[engines]'")
    model = model_of(model_type)
    write(tmp_path / "x.gguf", model)
    prompt = [*np.random.default_rng(0).integers(0, model.config.vocab_size, 24).tolist()]
    engine = Engine(tmp_path / "x.gguf")
    ours = np.asarray(jax.jit(lambda x: model(x))(jnp.array([prompt], jnp.int32))[0])
    theirs = engine.logits(prompt)
    # llama.cpp's GELU is a table of float16.
    tolerance = 2e-2 if "gelu" in model.config.mlp or model.config.mlp == "geglu" else 1e-4
    np.testing.assert_allclose(theirs, ours, atol=tolerance * np.abs(ours).max(), rtol=0)
    if tolerance < 1e-2:
        tokens = zoo.generate(
            model, jnp.array([prompt], jnp.int32), max_new_tokens=32, temperature=0.0
        )
        assert (
            Engine(tmp_path / "x.gguf").greedy(prompt, 32) == np.asarray(tokens)[0, -32:].tolist()
        )
