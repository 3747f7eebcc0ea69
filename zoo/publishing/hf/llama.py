"""Llama, and families with its tensor names: Mistral, Qwen 2 and 3, OLMo 2."""

from collections.abc import Mapping
from functools import partial

from zoo import transformer
from zoo.publishing.hf.canonical import of_transformer
from zoo.publishing.hf.family import Choice, Family, Fixed, Rule, Same
from zoo.publishing.hf.names import Tensor
from zoo.publishing.hf.rules import OptionalLayerTypes, Rotary

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
    canonical=of_transformer,
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
