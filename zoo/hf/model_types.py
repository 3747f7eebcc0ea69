"""The model types: Llama and the closest to it, and all others, by name."""

from dataclasses import replace

from zoo.hf import deepseek, delta_nets, dense, encoders, experts, gpts, mambas, vits
from zoo.hf.dense import BIASES
from zoo.hf.experts import DENSE_MLP, INTERVAL
from zoo.hf.family import Family
from zoo.hf.heads import OF_DECODERS
from zoo.hf.llamas import (
    BOTH_NORMS,
    DENSE,
    MIXTRAL_EXPERTS,
    POST_NORMS,
    QWEN3_EXPERTS,
    NumExperts,
    common,
    decoder,
    sizes,
)
from zoo.hf.rotary import GivenRotary, Rotary
from zoo.hf.rules import Choice, Computed, Fixed, LayerTypes, OptionalLayerTypes, Rule, Same

# The part for text of a whole model, in the names of newer and of older versions.
OF_WHOLE_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
VISION = dict.fromkeys(("model.vision_tower.", "vision_tower."), "a vision tower") | dict.fromkeys(
    ("model.multi_modal_projector.", "multi_modal_projector."), "a projector of images"
)

LLAMA = decoder(
    model_type="llama",
    architecture="LlamaForCausalLM",
    heads=OF_DECODERS,
    rules=(
        *common(Rotary()),
        BIASES,
        Fixed("mlp_bias", False),
        Fixed("rope_interleaved", False, written=False),
    ),
    ignored=frozenset({"is_llama_config", "pretraining_tp"}),  # the latter: how products are cut
)
MISTRAL = decoder(
    model_type="mistral",
    architecture="MistralForCausalLM",
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(max_seq_len=131072), kv_heads=8),
        Same("sliding_window", "attention.window", 4096),
    ),
    prefixes=OF_WHOLE_PREFIXES,
    within="mistral3",
    left_out=VISION,
)
MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    rules=(
        *common(
            GivenRotary(theta=1_000_000.0, max_seq_len=262144, grows=True),
            eps=1e-5,
            kv_heads=8,
            head_dim=128,
        ),
        Same("sliding_window", "attention.window", None),
    ),
)
QWEN2 = decoder(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(max_seq_len=32768)),
        OptionalLayerTypes(),
        Fixed("use_mrope", False, written=False),
    ),
    always={"attention.qkv_bias": True},
)
QWEN3 = decoder(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(max_seq_len=32768), head_dim=128),
        OptionalLayerTypes(),
        Fixed("attention_bias", False),
    ),
    always={"attention.qk_norm": "per_head"},
)
OLMO2 = decoder(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rules=(*common(Rotary(), eps=1e-5), Fixed("attention_bias", False)),
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
        *sizes(tied=True, kv_heads=4, head_dim=256, vocab_size=f":{vocab}", num_heads=":8"),
        Choice("hidden_activation", "mlp", GEMMA_MLPS, "gelu_pytorch_tanh"),
        Same("attn_logit_softcapping", "attention.soft_cap", attention_cap),
        Same("final_logit_softcapping", "logit_soft_cap", logit_cap),
        # Attention logits are divided by its square root.
        Computed(
            "query_pre_attn_scalar",
            256,
            lambda scalar, _: {"attention.scale": scalar**-0.5},
            lambda config: round((config.attention.scale or config.head_size**-0.5) ** -2),
        ),
        Fixed("attention_bias", False),
    )


CAUSAL = Fixed("use_bidirectional_attention", False)
GEMMA = decoder(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    heads=OF_DECODERS,
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
    heads=OF_DECODERS,
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
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(theta=1_000_000.0, max_seq_len=131072), eps=1e-5, kv_heads=8),
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
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(max_seq_len=32768), kv_heads=4, hidden="moe_intermediate_size"),
        OptionalLayerTypes(all_layers=True),
        NumExperts(("num_experts", "num_local_experts"), 128),
        Same("num_experts_per_tok", "experts.per_token", 8),
        *INTERVAL,
        Fixed("attention_bias", False),
    ),
    always={"attention.qk_norm": "per_head"},
    tensors=DENSE | DENSE_MLP | QWEN3_EXPERTS,
)

# Types that the zoo's layers are not like.
REFUSED = {
    "bloom": "attention falls off with the distance (ALiBi)",
    "falcon_h1": "a layer has attention and Mamba-2 side by side",
    "gemma3n_text": "four residual streams predict each other (AltUp), and layers share keys",
    "gemma4_text": "global layers have heads of another size, and values are normed",
    "hunyuan_v1_dense": "queries and keys are normed after their rotation",
    "lfm2": "layers mix positions by short gated convolutions",
    "llama4_text": "the input of experts is weighed, not their output, attention is in chunks, and "
    "only layers with rotary positions norm queries and keys",
    "mpt": "attention falls off with the distance (ALiBi)",
    "nemotron_h": "a layer is a mixer or an MLP alone",
    "phimoe": "an expert's weight is a softmax over the scores near its own (sparsemixer)",
    "siglip2_vision_model": "images of several sizes share a batch, as patches with a mask "
    "(NaFlex; SigLIP 2 of one size is a siglip_vision_model)",
}

# `family_of` prefers the first of the families that fit: those here, then lineage after lineage.
_LINEAGES = gpts, encoders, experts, deepseek, dense, vits, delta_nets, mambas
MODEL_TYPES = {
    family.model_type: family
    for names in ({**globals()}, *map(vars, _LINEAGES))
    for family in names.values()
    if isinstance(family, Family)
}
