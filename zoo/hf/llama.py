"""Llama, and families with its tensor names: Mistral, Qwen, OLMo, Gemma, mixtures of experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from zoo import transformer
from zoo.common import configuration
from zoo.hf.family import Family, canonical, table
from zoo.hf.rules import (
    Choice,
    Fixed,
    LayerTypes,
    OptionalLayerTypes,
    QueryScale,
    Rotary,
    Rule,
    Same,
)

SILU = Choice("hidden_act", "mlp", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}, "silu")


def sizes(
    *,
    tied: bool = False,
    eps: float = 1e-6,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden: str = "intermediate_size",
) -> tuple[Rule, ...]:
    """The fields that all these families have, given the defaults that differ."""
    return (
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same(hidden, "d_ff"),
        Same("num_hidden_layers", "num_layers"),
        Same("num_attention_heads", "num_heads"),
        Same("num_key_value_heads", "attention.num_kv_heads", kv_heads),
        Same("rms_norm_eps", "residual.norm_eps", eps),
        Same("tie_word_embeddings", "tie_embeddings", tied),
        Same("head_dim", "attention.head_dim", head_dim),
    )


layer = partial(table, layer="{prefix}layers.{layer}.")
DENSE = layer(
    """
    embedding.weight               {prefix}embed_tokens.weight
    final_norm.scale               {prefix}norm.weight
    head.weight                    lm_head.weight                   vocab embed
    blocks.attention_norm.scale    input_layernorm.weight
    blocks.attention.wq            self_attn.q_proj.weight          heads.head_dim embed
    blocks.attention.wk            self_attn.k_proj.weight          kv_heads.head_dim embed
    blocks.attention.wv            self_attn.v_proj.weight          kv_heads.head_dim embed
    blocks.attention.wo            self_attn.o_proj.weight          embed heads.head_dim
    blocks.attention.bq            self_attn.q_proj.bias            heads.head_dim
    blocks.attention.bk            self_attn.k_proj.bias            kv_heads.head_dim
    blocks.attention.bv            self_attn.v_proj.bias            kv_heads.head_dim
    blocks.attention.q_norm.scale  self_attn.q_norm.weight
    blocks.attention.k_norm.scale  self_attn.k_norm.weight
    blocks.mlp_norm.scale          post_attention_layernorm.weight
    blocks.mlp.w_gate              mlp.gate_proj.weight             mlp embed
    blocks.mlp.w_up                mlp.up_proj.weight               mlp embed
    blocks.mlp.w_down              mlp.down_proj.weight             embed mlp
    """
)
POST_NORMS = layer(
    """
    blocks.attention_out_norm.scale  post_attention_layernorm.weight
    blocks.mlp_out_norm.scale        post_feedforward_layernorm.weight
    """
)
BOTH_NORMS = POST_NORMS | layer("blocks.mlp_norm.scale  pre_feedforward_layernorm.weight")
MIXTRAL_EXPERTS = layer(
    """
    blocks.mlp.router  block_sparse_moe.gate.weight                 routes embed
    blocks.mlp.w_gate  block_sparse_moe.experts.{experts}.w1.weight mlp embed
    blocks.mlp.w_up    block_sparse_moe.experts.{experts}.w3.weight mlp embed
    blocks.mlp.w_down  block_sparse_moe.experts.{experts}.w2.weight embed mlp
    """
)
QWEN3_EXPERTS = layer(
    """
    blocks.mlp.router  mlp.gate.weight                        routes embed
    blocks.mlp.w_gate  mlp.experts.{experts}.gate_proj.weight mlp embed
    blocks.mlp.w_up    mlp.experts.{experts}.up_proj.weight   mlp embed
    blocks.mlp.w_down  mlp.experts.{experts}.down_proj.weight embed mlp
    """
)

decoder = partial(  # a family with Llama's names
    Family,
    model=transformer.Transformer,
    config=transformer.Config,
    canonical=canonical,
    tensors=DENSE,
    prefixes=("model.", ""),
    marker="{prefix}embed_tokens.weight",
    buffers=("rotary_emb.inv_freq",),
)
LLAMA = decoder(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rules=(
        *sizes(),
        SILU,
        Rotary(),
        Fixed("attention_bias", False),
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


def _gemma_rules(attention_cap: float | None, logit_cap: float | None) -> tuple[Rule, ...]:
    return (
        *sizes(tied=True, head_dim=256),
        Choice("hidden_activation", "mlp", GEMMA_MLPS, "gelu_pytorch_tanh"),
        Same("attn_logit_softcapping", "attention.soft_cap", attention_cap),
        Same("final_logit_softcapping", "logit_soft_cap", logit_cap),
        QueryScale(),
        Fixed("attention_bias", False),
    )


CAUSAL = Fixed("use_bidirectional_attention", False)
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
        *_gemma_rules(None, None),
        Rotary(theta=1_000_000.0, local=10_000.0, max_seq_len=131072),
        LayerTypes(period=6),
        CAUSAL,
    ),
    always={**GEMMA_ALWAYS, "attention.qk_norm": "per_head"},
    tensors=DENSE | BOTH_NORMS,
)


@dataclass(frozen=True)
class _NumExperts(Rule):
    """The number of experts, under one of several names; the first is written."""

    names: tuple[str, ...]
    default: int

    def read(self, fields: Any) -> dict[str, Any]:
        count = self.default
        for name in self.names:
            count = fields.take(name, count)
            configuration.check_value(name, count, int)
        return {"experts.num_experts": count}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.names[0]: config.experts.num_experts}


MIXTRAL = decoder(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=(
        *sizes(eps=1e-5, kv_heads=8),
        SILU,
        Rotary(theta=1_000_000.0, max_seq_len=131072),
        Same("sliding_window", "attention.window", None),
        _NumExperts(("num_local_experts",), 8),
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
        _NumExperts(("num_experts", "num_local_experts"), 128),
        Same("num_experts_per_tok", "experts.per_token", 8),
        Same("norm_topk_prob", "experts.normalize", False),
        Fixed("attention_bias", False),
        Fixed("decoder_sparse_step", 1),
        Fixed("mlp_only_layers", []),
    ),
    always={"attention.qk_norm": "per_head"},
    tensors=DENSE | QWEN3_EXPERTS,
    ignored=frozenset({"intermediate_size"}),  # of layers without experts, which it does not have
)
