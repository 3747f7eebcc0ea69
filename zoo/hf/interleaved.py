"""The dense types with rotary pairs side by side in the checkpoint: Helium, ERNIE, GLM, Cohere."""

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
GLM_RULES = (
    *common(Rotary(max_seq_len=131072, fraction=0.5), eps=1.5625e-07, kv_heads=2, head_dim=128),
    Same("attention_bias", "attention.qkv_bias", True),
)
GLM = decoder(
    model_type="glm",
    architecture="GlmForCausalLM",
    rules=GLM_RULES,
    tensors=DENSE | INTERLEAVED | GATE_UP,
    splits=PAIRS,
)
GLM4 = decoder(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    rules=GLM_RULES,
    always={"residual.norm_placement": "both"},
    tensors=DENSE
    | INTERLEAVED
    | GATE_UP
    | layer(
        """
        blocks.attention_out_norm.scale  post_self_attn_layernorm.weight
        blocks.mlp_out_norm.scale        post_mlp_layernorm.weight
        """
    ),
    splits=PAIRS,
)
COHERE_RULES = (
    *common(
        Rotary(max_seq_len=8192), tied=True, eps=1e-5, eps_name="layer_norm_eps", head_dim="derived"
    ),
    Same("logit_scale", "logit_multiplier", 0.0625),
    BIASES,
    Fixed("use_qk_norm", False),
)
COHERE_ALWAYS = {"residual.norm": "layer", "residual.parallel": "one_norm"}
COHERE = decoder(
    model_type="cohere",
    architecture="CohereForCausalLM",
    rules=COHERE_RULES,
    always=COHERE_ALWAYS,
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
COHERE2 = decoder(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rules=(*COHERE_RULES, RotaryInWindows(period=4)),
    always=COHERE_ALWAYS,
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
