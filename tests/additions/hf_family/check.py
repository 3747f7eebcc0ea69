"""A folder of VaultGemma is the model that it says, and is written as it was."""

import json
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from zoo import transformer
from zoo.publishing import PublishError

FIELDS = {
    "architectures": ["VaultGemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 4,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 16,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 64,
    "model_type": "vaultgemma",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.50.0",
    "use_cache": True,
    "vocab_size": 24,
}
SHAPES = {
    "self_attn.q_proj": (16, 8),
    "self_attn.k_proj": (8, 8),
    "self_attn.v_proj": (8, 8),
    "self_attn.o_proj": (8, 16),
    "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
    "input_layernorm": (8,),
    "pre_feedforward_layernorm": (8,),
}

rng = np.random.default_rng(0)
shapes = {"model.embed_tokens.weight": (24, 8), "model.norm.weight": (8,)}
shapes |= {f"model.layers.{i}.{n}.weight": s for i in range(2) for n, s in SHAPES.items()}
tensors = {name: (0.4 * rng.normal(size=s)).astype(np.float32) for name, s in shapes.items()}
folder = Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(FIELDS))
safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
model = zoo.load(folder)

# The same model, set by hand: [out, in] there is [in, out] here, and heads are apart.
config = transformer.Config(
    vocab_size=24,
    d_model=8,
    num_layers=2,
    num_heads=4,
    d_ff=16,
    mlp="geglu",
    max_seq_len=64,
    tie_embeddings=True,
    attention=transformer.AttentionConfig(num_kv_heads=2, head_dim=4),
    residual=transformer.ResidualConfig(norm="rms_offset", scale_embedding=True),
)


def stacked(name, *shape):
    each = [tensors[f"model.layers.{i}.{name}.weight"].T for i in range(2)]
    return jnp.asarray(np.stack([x.reshape(shape or x.shape) for x in each]))


def parameters(model):
    attention, mlp = model.blocks.attention, model.blocks.mlp
    return [
        *[model.embedding.weight, model.final_norm.scale],
        *[attention.wq, attention.wk, attention.wv, attention.wo],
        *[mlp.w_gate, mlp.w_up, mlp.w_down],
        *[model.blocks.attention_norm.scale, model.blocks.mlp_norm.scale],
    ]


want = transformer.Transformer(config, key=jax.random.key(0))
by_hand = [
    jnp.asarray(tensors["model.embed_tokens.weight"]),
    jnp.asarray(tensors["model.norm.weight"]),
    stacked("self_attn.q_proj", 8, 4, 4),
    stacked("self_attn.k_proj", 8, 2, 4),
    stacked("self_attn.v_proj", 8, 2, 4),
    stacked("self_attn.o_proj", 4, 4, 8),
    stacked("mlp.gate_proj"),
    stacked("mlp.up_proj"),
    stacked("mlp.down_proj"),
    stacked("input_layernorm"),
    stacked("pre_feedforward_layernorm"),
]
assert len(by_hand) == len(jax.tree.leaves(eqx.filter(want, eqx.is_array)))
want = eqx.tree_at(parameters, want, by_hand)
tokens = jnp.asarray(rng.integers(0, 24, (2, 9)), jnp.int32)
logits = np.asarray(model(tokens))
assert np.abs(logits).max() > 1
np.testing.assert_array_equal(logits, want(tokens))

# It is written as it was, and read again.
zoo.save(folder / "again", model, format="hf")
written = json.loads((folder / "again" / "config.json").read_text())
same = set(FIELDS) & set(written) - {"bos_token_id", "eos_token_id", "pad_token_id"}
assert len(same) > 15, same
assert {name: written[name] for name in same} == {name: FIELDS[name] for name in same}
again = safetensors.numpy.load_file(folder / "again" / "model.safetensors")
assert {n: x.tobytes() for n, x in again.items()} == {n: x.tobytes() for n, x in tensors.items()}
assert zoo.load(folder / "again").config == model.config

# A field that may change the maths is refused.
for name, value in {"attention_sinks": 4, "hidden_activation": "gelu"}.items():
    (folder / "config.json").write_text(json.dumps(FIELDS | {name: value}))
    with pytest.raises(PublishError, match=name):
        zoo.load(folder)
print("done")
