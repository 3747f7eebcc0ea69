"""Llama, and families with its tensor names: Mistral, Qwen, OLMo, Gemma, mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zoo import transformer
from zoo.base import configuration
from zoo.hf.family import Choice, Family, Fixed, Rule, Same
from zoo.hf.names import Tensor
from zoo.hf.rules import LayerTypes, OptionalLayerTypes, QueryScale, Rotary, canonical

LAYER = "{prefix}layers.{layer}."
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


def outside(config: transformer.Config) -> dict[str, Tensor]:
    """The embedding, the last norm and the head."""
    found = {
        "embedding.weight": Tensor("{prefix}embed_tokens.weight"),
        "final_norm.scale": Tensor("{prefix}norm.weight"),
    }
    if not config.tie_embeddings:
        found["head.weight"] = Tensor("lm_head.weight", "vocab embed")
    return found


def attention(config: transformer.Config) -> dict[str, Tensor]:
    """The parameters of the attention."""
    part = LAYER + "self_attn."
    found = {
        "blocks.attention.wq": Tensor(part + "q_proj.weight", "heads.head_dim embed"),
        "blocks.attention.wk": Tensor(part + "k_proj.weight", "kv_heads.head_dim embed"),
        "blocks.attention.wv": Tensor(part + "v_proj.weight", "kv_heads.head_dim embed"),
        "blocks.attention.wo": Tensor(part + "o_proj.weight", "embed heads.head_dim"),
    }
    if config.attention.qkv_bias:
        found |= {
            "blocks.attention.bq": Tensor(part + "q_proj.bias", "heads.head_dim"),
            "blocks.attention.bk": Tensor(part + "k_proj.bias", "kv_heads.head_dim"),
            "blocks.attention.bv": Tensor(part + "v_proj.bias", "kv_heads.head_dim"),
        }
    if config.attention.qk_norm != "none":
        found["blocks.attention.q_norm.scale"] = Tensor(part + "q_norm.weight")
        found["blocks.attention.k_norm.scale"] = Tensor(part + "k_norm.weight")
    return found


def mlp() -> dict[str, Tensor]:
    """The parameters of the gated MLP."""
    return {
        "blocks.mlp.w_gate": Tensor(LAYER + "mlp.gate_proj.weight", "mlp embed"),
        "blocks.mlp.w_up": Tensor(LAYER + "mlp.up_proj.weight", "mlp embed"),
        "blocks.mlp.w_down": Tensor(LAYER + "mlp.down_proj.weight", "embed mlp"),
    }


def norms(names: Mapping[str, str]) -> dict[str, Tensor]:
    """The norms of a layer, given the zoo's names and Hugging Face's."""
    return {f"blocks.{ours}.scale": Tensor(f"{LAYER}{name}.weight") for ours, name in names.items()}


PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def dense(config: transformer.Config, names: Mapping[str, str] = PRE_NORMS) -> dict[str, Tensor]:
    """All parameters of a model without experts, with the norms of these names."""
    return outside(config) | attention(config) | mlp() | norms(names)


decoder = partial(  # a family with Llama's names
    Family,
    model=transformer.Transformer,
    config=transformer.Config,
    canonical=canonical,
    tensors=dense,
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
    tensors=partial(dense, names=POST_NORMS),
)

# Gemma has norms on both sides, and windows on some layers.
GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
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


GEMMA_TENSORS = partial(dense, names=GEMMA_NORMS)
CAUSAL = Fixed("use_bidirectional_attention", False)
GEMMA2 = decoder(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    rules=(*_gemma_rules(50.0, 30.0), Rotary(max_seq_len=8192), LayerTypes(period=2), CAUSAL),
    always=GEMMA_ALWAYS,
    tensors=GEMMA_TENSORS,
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
    tensors=GEMMA_TENSORS,
)


def _with_experts(part: str, gate: str, up: str, down: str) -> Any:
    expert = LAYER + part + ".experts.{experts}."

    def tensors(config: transformer.Config) -> dict[str, Tensor]:
        experts = {
            "blocks.mlp.router": Tensor(f"{LAYER}{part}.gate.weight", "routes embed"),
            "blocks.mlp.w_gate": Tensor(f"{expert}{gate}.weight", "mlp embed"),
            "blocks.mlp.w_up": Tensor(f"{expert}{up}.weight", "mlp embed"),
            "blocks.mlp.w_down": Tensor(f"{expert}{down}.weight", "embed mlp"),
        }
        others = attention(config) | norms(PRE_NORMS)
        return outside(config) | others | experts

    return tensors


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
    tensors=_with_experts("block_sparse_moe", "w1", "w3", "w2"),
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
    tensors=_with_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ignored=frozenset({"intermediate_size"}),  # of layers without experts, which it does not have
)
