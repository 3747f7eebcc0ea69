"""The dense types with rotary pairs side by side in the checkpoint: Helium, ERNIE, GLM, Cohere."""

from dataclasses import replace

from zoo.hf.dense import BIASES
from zoo.hf.llamas import DENSE, GATE_UP, INTERLEAVED, PAIRS, common, decoder, layer
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Fixed, RotaryInWindows, Same

HELIUM = decoder(
    model_type="helium",
    architecture="HeliumForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=4096), eps=1e-8, kv_heads=20, head_dim=128),
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
    ),
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
ERNIE4_5 = decoder(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=131072), tied=True, eps=1e-5, kv_heads=2, head_dim=128),
        Fixed("use_bias", False),
    ),
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
GLM = decoder(
    model_type="glm",
    architecture="GlmForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=131072, fraction=0.5), eps=1.5625e-07, kv_heads=2, head_dim=128),
        Same("attention_bias", "attention.qkv_bias", True),
    ),
    tensors=DENSE | INTERLEAVED | GATE_UP,
    splits=PAIRS,
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    always={"residual.norm_placement": "both"},
    tensors={
        **GLM.tensors,
        **layer(
            """
            blocks.attention_out_norm.scale  post_self_attn_layernorm.weight
            blocks.mlp_out_norm.scale        post_mlp_layernorm.weight
            """
        ),
    },
)
COHERE = decoder(
    model_type="cohere",
    architecture="CohereForCausalLM",
    rules=(
        *common(
            Rotary(max_seq_len=8192),
            tied=True,
            eps=1e-5,
            eps_name="layer_norm_eps",
            head_dim="derived",
        ),
        Same("logit_scale", "logit_multiplier", 0.0625),
        BIASES,
        Fixed("use_qk_norm", False),
    ),
    always={"residual.norm": "layer", "residual.parallel": "one_norm"},
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rules=(*COHERE.rules, RotaryInWindows(period=4)),
)
