"""Gemma 2 and the text models of Gemma 3: norms on both sides, windows on some layers."""

from functools import partial

from zoo.publishing.hf import llama
from zoo.publishing.hf.family import Choice, Fixed, Rule, Same
from zoo.publishing.hf.rules import LayerTypes, QueryScale, Rotary

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
ALWAYS = {
    "residual.norm": "rms_offset",
    "residual.norm_placement": "both",
    "residual.scale_embedding": True,
}
MLPS = {"gelu_pytorch_tanh": "geglu", "silu": "swiglu"}


def _rules(attention_cap: float | None, logit_cap: float | None) -> tuple[Rule, ...]:
    return (
        *llama.sizes(tied=True, head_dim=256),
        Choice("hidden_activation", "mlp", MLPS, "gelu_pytorch_tanh"),
        Same("attn_logit_softcapping", "attention.soft_cap", attention_cap),
        Same("final_logit_softcapping", "logit_soft_cap", logit_cap),
        QueryScale(),
        Fixed("attention_bias", False),
    )


TENSORS = partial(llama.dense, names=NORMS)
CAUSAL = Fixed("use_bidirectional_attention", False)
GEMMA2 = llama.decoder(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    rules=(*_rules(50.0, 30.0), Rotary(max_seq_len=8192), LayerTypes(period=2), CAUSAL),
    always=ALWAYS,
    tensors=TENSORS,
    # transformers uses hidden_activation instead.
    ignored=frozenset({"hidden_act"}),
)
GEMMA3 = llama.decoder(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rules=(
        *_rules(None, None),
        Rotary(theta=1_000_000.0, local=10_000.0, max_seq_len=131072),
        LayerTypes(period=6),
        CAUSAL,
    ),
    always={**ALWAYS, "attention.qk_norm": "per_head"},
    tensors=TENSORS,
)
