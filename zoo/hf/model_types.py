"""The model types: Llama and families with its names, GPT-2, and all others, by name.

GPT-2 has weights as [in, out], and queries, keys and values side by side.
"""

from zoo import transformer
from zoo.hf.canonical import canonical
from zoo.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from zoo.hf.delta_nets import OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from zoo.hf.dense import (
    ARCEE,
    BIASES,
    EXAONE4,
    GRANITE_DENSE,
    JAIS2,
    MINISTRAL,
    NEMOTRON,
    OLMO,
    OLMO3,
    PHI,
    PHI3,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
from zoo.hf.encoders import BERT, DISTILBERT, ESM, MODERNBERT, ROBERTA
from zoo.hf.experts import (
    DENSE_MLP,
    ERNIE4_5_MOE,
    GLM4_MOE,
    GRANITE_MOE,
    INTERVAL,
    OLMOE,
    QWEN2_MOE,
)
from zoo.hf.family import Family, table
from zoo.hf.gpt_oss import GPT_OSS
from zoo.hf.gpts import CODEGEN, FALCON, GELUS, GPT_BIGCODE, GPT_NEO, GPT_NEOX, GPTJ
from zoo.hf.interleaved import COHERE, COHERE2, ERNIE4_5, GLM, GLM4, HELIUM
from zoo.hf.llamas import (
    BOTH_NORMS,
    DENSE,
    MIXTRAL_EXPERTS,
    POST_NORMS,
    QWEN3_EXPERTS,
    SILU,
    NumExperts,
    decoder,
    sizes,
)
from zoo.hf.mambas import BAMBA, GRANITE, MAMBA2
from zoo.hf.rotary import Rotary
from zoo.hf.rules import (
    Choice,
    Fixed,
    LayerTypes,
    OptionalLayerTypes,
    QueryScale,
    Rule,
    Same,
    words,
)
from zoo.hf.vits import DINOV2, DINOV3, SIGLIP, VIT
from zoo.hf.xlstm import XLSTM

# The part for text of a whole model, in the names of newer and of older versions.
OF_WHOLE_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
VISION = dict.fromkeys(("model.vision_tower.", "vision_tower."), "a vision tower") | dict.fromkeys(
    ("model.multi_modal_projector.", "multi_modal_projector."), "a projector of images"
)

LLAMA = decoder(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rules=(
        *sizes(),
        SILU,
        Rotary(),
        BIASES,
        Fixed("mlp_bias", False),
        Fixed("rope_interleaved", False, written=False),
    ),
    ignored=frozenset({"is_llama_config", "pretraining_tp"}),  # the latter: how products are cut
)
MISTRAL = decoder(
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(
        *sizes(kv_heads=8),
        SILU,
        Rotary(max_seq_len=131072),
        Same("sliding_window", "attention.window", 4096),
    ),
    prefixes=OF_WHOLE_PREFIXES,
    within="mistral3",
    left_out=VISION,
)
QWEN2 = decoder(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=(
        *sizes(),
        SILU,
        Rotary(max_seq_len=32768),
        OptionalLayerTypes(),
        Fixed("use_mrope", False, written=False),
    ),
    always={"attention.qkv_bias": True},
)
QWEN3 = decoder(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=(
        *sizes(head_dim=128),
        SILU,
        Rotary(max_seq_len=32768),
        OptionalLayerTypes(),
        Fixed("attention_bias", False),
    ),
    always={"attention.qk_norm": "per_head"},
)
OLMO2 = decoder(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rules=(*sizes(eps=1e-5), SILU, Rotary(), Fixed("attention_bias", False)),
    always={"attention.qk_norm": "across_heads", "residual.norm_placement": "post"},
    tensors=DENSE | POST_NORMS,
)

# Gemma has norms on both sides, and windows on some layers.
GEMMA_ALWAYS = {
    "residual.norm": "rms_offset",
    "residual.norm_placement": "both",
    "residual.scale_embedding": True,
}
GEMMA_MLPS = {"gelu_pytorch_tanh": "geglu", "silu": "swiglu"}


def _gemma_rules(
    attention_cap: float | None, logit_cap: float | None, vocab: int = 256_000
) -> tuple[Rule, ...]:
    return (
        *sizes(
            tied=True,
            kv_heads=4,
            head_dim=256,
            defaults={"vocab_size": vocab, "num_attention_heads": 8},
        ),
        Choice("hidden_activation", "mlp", GEMMA_MLPS, "gelu_pytorch_tanh"),
        Same("attn_logit_softcapping", "attention.soft_cap", attention_cap),
        Same("final_logit_softcapping", "logit_soft_cap", logit_cap),
        QueryScale(),
        Fixed("attention_bias", False),
    )


CAUSAL = Fixed("use_bidirectional_attention", False)
GEMMA = decoder(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    rules=(
        *sizes(tied=True, kv_heads=16, head_dim=256),
        # "gelu" is meant to be the other, too.
        Choice("hidden_act", "mlp", {**GEMMA_MLPS, "gelu": "geglu"}, "gelu_pytorch_tanh"),
        # Versions of transformers do not agree on which of the two counts.
        Fixed("hidden_activation", None, written=False),
        Rotary(max_seq_len=8192),
        BIASES,
        CAUSAL,
    ),
    always={"residual.norm": "rms_offset", "residual.scale_embedding": True},
)
GEMMA2 = decoder(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    rules=(*_gemma_rules(50.0, 30.0), Rotary(max_seq_len=8192), LayerTypes(period=2), CAUSAL),
    always=GEMMA_ALWAYS,
    tensors=DENSE | BOTH_NORMS,
    # transformers uses hidden_activation instead.
    ignored=frozenset({"hidden_act"}),
)
GEMMA3 = decoder(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rules=(
        *_gemma_rules(None, None, 262_208),
        Rotary(theta=1_000_000.0, local=10_000.0, max_seq_len=131072),
        LayerTypes(period=6),
        CAUSAL,
    ),
    always={**GEMMA_ALWAYS, "attention.qk_norm": "per_head"},
    prefixes=OF_WHOLE_PREFIXES,
    within="gemma3",
    left_out=VISION,
    tensors=DENSE | BOTH_NORMS,
)


MIXTRAL = decoder(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=(
        *sizes(eps=1e-5, kv_heads=8),
        SILU,
        Rotary(theta=1_000_000.0, max_seq_len=131072),
        Same("sliding_window", "attention.window", None),
        NumExperts(("num_local_experts",), 8),
        Same("num_experts_per_tok", "experts.per_token", 2),
    ),
    always={"experts.normalize": True},
    tensors=DENSE | MIXTRAL_EXPERTS,
)
QWEN3_MOE = decoder(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=(
        *sizes(kv_heads=4, hidden="moe_intermediate_size"),
        SILU,
        Rotary(max_seq_len=32768),
        OptionalLayerTypes(all_layers=True),
        NumExperts(("num_experts", "num_local_experts"), 128),
        Same("num_experts_per_tok", "experts.per_token", 8),
        *INTERVAL,
        Fixed("attention_bias", False),
    ),
    always={"attention.qk_norm": "per_head"},
    tensors=DENSE | DENSE_MLP | QWEN3_EXPERTS,
)

_GPT2 = table(
    """
    embedding.weight             {prefix}wte.weight
    position_embedding.weight    {prefix}wpe.weight
    final_norm.scale             {prefix}ln_f.weight
    final_norm.bias              {prefix}ln_f.bias
    head.weight                  lm_head.weight         vocab embed
    blocks.attention_norm.scale  ln_1.weight
    blocks.attention_norm.bias   ln_1.bias
    blocks.attention.wq          attn.c_attn.weight     embed part.heads.head_dim 0/3
    blocks.attention.wk          attn.c_attn.weight     embed part.kv_heads.head_dim 1/3
    blocks.attention.wv          attn.c_attn.weight     embed part.kv_heads.head_dim 2/3
    blocks.attention.bq          attn.c_attn.bias       part.heads.head_dim 0/3
    blocks.attention.bk          attn.c_attn.bias       part.kv_heads.head_dim 1/3
    blocks.attention.bv          attn.c_attn.bias       part.kv_heads.head_dim 2/3
    blocks.attention.wo          attn.c_proj.weight     heads.head_dim embed
    blocks.attention.bo          attn.c_proj.bias
    blocks.mlp_norm.scale        ln_2.weight
    blocks.mlp_norm.bias         ln_2.bias
    blocks.mlp.w_up              mlp.c_fc.weight
    blocks.mlp.b_up              mlp.c_fc.bias
    blocks.mlp.w_down            mlp.c_proj.weight
    blocks.mlp.b_down            mlp.c_proj.bias
    """,
    layer="{prefix}h.{layer}.",
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    model=transformer.Transformer,
    config=transformer.Config,
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("n_embd", "d_model"),
        Same("n_layer", "num_layers"),
        Same("n_head", "num_heads"),
        Same("n_inner", "d_ff", None),
        Same("n_positions", "max_seq_len", 1024),
        Same("layer_norm_epsilon", "residual.norm_eps", 1e-5),
        Same("tie_word_embeddings", "tie_embeddings", True),
        Choice("activation_function", "mlp", GELUS, "gelu_new"),
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Fixed("add_cross_attention", False),
    ),
    always={"residual.norm": "layer", "positions.kind": "learned", "bias": True},
    canonical=canonical,
    tensors=_GPT2,
    prefixes=("transformer.", ""),
    marker="{prefix}wte.weight",
    # The length a second time, a matter of precision, and fields of a head that is not used.
    ignored=words(
        "n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout "
        "summary_proj_to_labels summary_type summary_use_proj"
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
)

# Types that the zoo's layers are not like.
REFUSED = {
    "phimoe": "experts are chosen, and weighted, by a threshold on the distances of their scores "
    "(sparsemixer)",
    "apertus": "an activation has parameters of its own (xIELU)",
    "bloom": "attention falls off with the distance (ALiBi)",
    "falcon_h1": "a layer has attention and Mamba-2 side by side",
    "hunyuan_v1_dense": "queries and keys are normed after their rotation",
    "lfm2": "layers mix positions by short gated convolutions",
    "ministral3": "queries grow with the logarithm of their position",
    "mpt": "attention falls off with the distance (ALiBi)",
    "nemotron_h": "a layer is a mixer or an MLP alone",
    "opt": "a table of positions begins with two rows that no position has",
}

# `family_of` prefers the first of the families that fit.
_ORDER = [LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA2, GEMMA3]
_ORDER += [MIXTRAL, QWEN3_MOE, GPT2, BERT]
_ORDER += [QWEN2_MOE, OLMOE, GRANITE_MOE, GLM4_MOE, GPT_OSS]
_ORDER += [DEEPSEEK_V3, DEEPSEEK_V2, KIMI_K2, ERNIE4_5_MOE]
_ORDER += [GEMMA, GRANITE_DENSE, PHI3, SMOLLM3, OLMO, OLMO3, EXAONE4, SEED_OSS, ARCEE, NEMOTRON]
_ORDER += [JAIS2, MINISTRAL, STARCODER2, STABLELM, PHI]
_ORDER += [GLM, GLM4, COHERE, COHERE2, HELIUM, ERNIE4_5]
_ORDER += [GPT_NEOX, GPTJ, CODEGEN, GPT_NEO, GPT_BIGCODE, FALCON]
_ORDER += [VIT, DINOV2, DINOV3, SIGLIP]
_ORDER += [ROBERTA, DISTILBERT, ESM, MODERNBERT]
_ORDER += [QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID, GRANITE, BAMBA, MAMBA2, XLSTM]
MODEL_TYPES = {family.model_type: family for family in _ORDER}
