"""zoo.hf.floats: weights of 4 and 8 bits as bfloat16, by the formulas of their formats."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from helpers import arrays

import zoo
from zoo.hf import floats
from zoo.hf.weights import Weights
from zoo.publishing import PublishError

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def mxfp4(rng: Any, shape: tuple[int, int, int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Blocks and scales of [experts, in, out] values, and the values, one by one."""
    experts, inputs, outputs = shape
    codes = rng.integers(0, 16, (experts, outputs, inputs))
    powers = rng.integers(120, 131, (experts, outputs, inputs // 32))
    values = np.zeros(shape)
    for e, i, o in np.ndindex(shape):
        values[e, i, o] = E2M1[codes[e, o, i]] * 2.0 ** (int(powers[e, o, i // 32]) - 127)
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    blocks = packed.reshape(experts, outputs, inputs // 32, 16).astype(np.uint8)
    return {"_blocks": blocks, "_scales": powers.astype(np.uint8)}, values


def stored(folder: Path, tensors: dict[str, np.ndarray], settings: dict) -> Weights:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return floats.decoded(Weights(folder), settings, "config.json")


def test_blocks_of_four_bits_are_read_by_slices(tmp_path: Path):
    tensors, values = mxfp4(np.random.default_rng(0), (3, 64, 5))
    tensors = {f"w{end}": x for end, x in tensors.items()}
    weights = stored(tmp_path, tensors | {"b": np.ones(2)}, {"quant_method": "mxfp4"})
    assert {name: x.shape for name, x in weights.tensors.items()} == {"w": (3, 64, 5), "b": (2,)}
    with weights.reader() as read:
        for at in np.s_[0:3, 0:64, 0:5], np.s_[1:2, 7:9, 2:4], np.s_[0:3, 30:34, 4:5]:
            found = read("w", at)
            assert found.dtype == jnp.bfloat16
            np.testing.assert_array_equal(found.astype(np.float64), values[at])
        np.testing.assert_array_equal(read("b", (slice(0, 2),)), 1)


def test_scales_of_squares_of_eight_bits_are_read_by_slices(tmp_path: Path):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(7, 10)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (3, 3)).astype(np.float32)
    values = np.array(
        [[float(codes[i, j]) * scales[i // 3, j // 4] for j in range(10)] for i in range(7)]
    )
    settings = {"quant_method": "fp8", "weight_block_size": [3, 4], "fmt": "e4m3"}
    with stored(tmp_path, {"w": codes, "w_scale_inv": scales}, settings).reader() as read:
        for at in np.s_[0:7, 0:10], np.s_[2:4, 3:9], np.s_[6:7, 9:10]:
            found = read("w", at)
            np.testing.assert_allclose(found.astype(np.float64), values[at], rtol=2**-8)


@pytest.mark.parametrize(
    "changes", [{"weight_block_size": None}, {"fmt": "e5m2"}, {"activation_scheme": "static"}]
)
def test_other_floats_are_refused(changes: dict, tmp_path: Path):
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], **changes}
    (name, value), *_ = changes.items()
    with pytest.raises(PublishError, match=rf"{name}={value!r}"):
        stored(tmp_path, {"w": np.ones(2)}, settings)


def test_gpt_oss_opens_as_it_is_published(tmp_path: Path):
    """With experts in MXFP4: the model of the values, in bf16 and in fp32."""
    golden = Path(__file__).parents[1] / "golden" / "hf" / "gpt_oss" / "config.json"
    config = {**json.loads(golden.read_text()), "num_hidden_layers": 1, "hidden_size": 32}
    config |= {"intermediate_size": 32, "num_local_experts": 2, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng, experts = np.random.default_rng(0), "model.layers.0.mlp.experts."
    plain, packed = {}, {}
    for name, shape in (("gate_up_proj", (2, 32, 64)), ("down_proj", (2, 32, 32))):
        codes, values = mxfp4(rng, shape)
        plain[experts + name] = values.astype(ml_dtypes.bfloat16)
        packed |= {experts + name + end: x for end, x in codes.items()}
    layer, size = "model.layers.0.", {"q": 24, "k": 12, "v": 12}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (53, 32)}
    shapes |= {"lm_head.weight": (53, 32), "model.norm.weight": (32,)}
    shapes |= {f"{layer}{x}_layernorm.weight": (32,) for x in ("input", "post_attention")}
    shapes |= {f"{layer}self_attn.{x}_proj.weight": (n, 32) for x, n in size.items()}
    shapes |= {f"{layer}self_attn.{x}_proj.bias": (n,) for x, n in size.items()}
    shapes |= {f"{layer}self_attn.o_proj.weight": (32, 24), f"{layer}self_attn.o_proj.bias": (32,)}
    shapes |= {f"{layer}self_attn.sinks": (4,), f"{layer}mlp.router.weight": (2, 32)}
    shapes |= {f"{layer}mlp.router.bias": (2,), f"{experts}down_proj_bias": (2, 32)}
    shapes |= {f"{experts}gate_up_proj_bias": (2, 64)}
    rest = {x: rng.normal(size=y).astype(ml_dtypes.bfloat16) for x, y in shapes.items()}
    safetensors.numpy.save_file({**rest, **plain}, tmp_path / "model.safetensors")
    want = zoo.load(tmp_path)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file({**rest, **packed}, tmp_path / "model.safetensors")
    found = zoo.load(tmp_path)
    assert found.config == want.config
    for name, x in arrays(want).items():
        np.testing.assert_array_equal(arrays(found)[name], x)
    assert zoo.load(tmp_path, dtype="fp32").blocks.mlp.w_down.dtype == jnp.float32
