"""The model types of GPT's first open followers: GPT-NeoX, GPT-J, CodeGen, GPT-Neo, and others."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.family import table
from zoo.hf.llamas import PAIRS, decoder, side_by_side
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Choice, Each, Fields, Fixed, Rule, Same, shortest, words

GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
NORMS = {"residual.norm": "layer", "residual.norm_bias": True}
OF_GPT2 = (
    Same("vocab_size", "vocab_size"),
    Same("n_embd", "d_model"),
    Same("n_layer", "num_layers"),
    Same("n_head", "num_heads"),
    Same("n_inner", "d_ff", None),
    Same("layer_norm_epsilon", "residual.norm_eps", 1e-5),
)
SUMMARY = """summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj"""


@dataclass(frozen=True)
class RotaryDim(Rule):
    """How many features of a head rotate; null for all."""

    def read(self, fields: Fields) -> dict[str, Any]:
        size = fields.values["n_embd"] // fields.values["n_head"]
        return {"positions.rotary_fraction": (fields.take("rotary_dim", 64) or size) / size}

    def write(self, config: Any) -> dict[str, Any]:
        return {"rotary_dim": config.rotary_size}


@dataclass(frozen=True)
class WindowGroups(Rule):
    """GPT-Neo's: which layers have a window, in groups that repeat."""

    def read(self, fields: Fields) -> dict[str, Any]:
        groups = fields.take("attention_types", None) or [[["global", "local"], 12]]
        pattern = tuple(x for kinds, count in groups for x in tuple(kinds) * count)
        layers = fields.take("attention_layers", None)
        if layers is not None and tuple(layers) != pattern:
            raise fields.refusal("attention_layers contradicts attention_types: remove the former")
        if len(pattern) != fields.values.get("num_layers"):
            raise fields.refusal(f"attention_types={groups!r}: must have a kind for each layer")
        return {
            "attention.window": fields.take("window_size", 256),
            "attention.window_pattern": shortest(pattern),
        }

    def write(self, config: Any) -> dict[str, Any]:
        window = config.attention.window or 256
        return {"attention_types": [[[*config.all_layer_kinds], 1]], "window_size": window}


def _by_head(config: transformer.Config) -> list[np.ndarray]:
    """Head by head, its queries, keys and values."""
    rows = np.arange(3 * config.num_heads * config.head_size)
    return [x.ravel() for x in np.moveaxis(rows.reshape(-1, 3, config.head_size), 1, 0)]


def _codegen(config: transformer.Config) -> list[np.ndarray]:
    """For each of four devices of a TPU, the queries, values and keys of its heads."""
    rows = np.arange(3 * config.num_heads * config.head_size)
    queries, values, keys = np.moveaxis(rows.reshape(4, 3, -1), 1, 0).reshape(3, -1)
    [paired] = PAIRS["pairs_q"](config)
    return [queries[paired], keys[paired], values]


def fused(name: str) -> str:
    """The places of queries, keys and values in one module, by the split `qkv`."""
    rows = [
        f"blocks.attention.{kind}{x} {name}.{end} {axes} qkv:{i}"
        for i, (x, heads) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")))
        for kind, end, axes in (
            ("w", "weight", f"{heads}.head_dim embed"),
            ("b", "bias", f"{heads}.head_dim"),
        )
    ]
    return "\n".join([*rows, ""])


layer = "{prefix}h.{layer}."
GPT_NEOX = decoder(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "num_layers"),
        Same("num_attention_heads", "num_heads"),
        Same("intermediate_size", "d_ff"),
        Same("layer_norm_eps", "residual.norm_eps", 1e-5),
        Same("tie_word_embeddings", "tie_embeddings", False),
        Choice("hidden_act", "mlp", {**GELUS, "relu": "relu"}, "gelu"),
        Rotary(fraction=0.25, theta_name="rotary_emb_base", fraction_name="rotary_pct"),
        Each("attention_bias", "attention.qkv_bias attention.out_bias", True),
        Choice(
            "use_parallel_residual", "residual.parallel", {True: "two_norms", False: "none"}, True
        ),
    ),
    always={**NORMS, "mlp_bias": True},
    tensors=table(
        fused("attention.query_key_value")
        + """
        embedding.weight             {prefix}embed_in.weight
        final_norm.scale             {prefix}final_layer_norm.weight
        final_norm.bias              {prefix}final_layer_norm.bias
        head.weight                  embed_out.weight                  vocab embed
        blocks.attention_norm.scale  input_layernorm.weight
        blocks.attention_norm.bias   input_layernorm.bias
        blocks.attention.wo          attention.dense.weight            embed heads.head_dim
        blocks.attention.bo          attention.dense.bias
        blocks.mlp_norm.scale        post_attention_layernorm.weight
        blocks.mlp_norm.bias         post_attention_layernorm.bias
        blocks.mlp.w_up              mlp.dense_h_to_4h.weight          mlp embed
        blocks.mlp.b_up              mlp.dense_h_to_4h.bias
        blocks.mlp.w_down            mlp.dense_4h_to_h.weight          embed mlp
        blocks.mlp.b_down            mlp.dense_4h_to_h.bias
        """,
        layer="{prefix}layers.{layer}.",
    ),
    prefixes=("gpt_neox.", ""),
    marker="{prefix}embed_in.weight",
    splits={"qkv": _by_head},
    ignored=words("classifier_dropout hidden_dropout"),
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
_OF_GPT = """
    embedding.weight             {prefix}wte.weight
    position_embedding.weight    {prefix}wpe.weight
    final_norm.scale             {prefix}ln_f.weight
    final_norm.bias              {prefix}ln_f.bias
    head.weight                  lm_head.weight         vocab embed
    head.bias                    lm_head.bias
    blocks.attention_norm.scale  ln_1.weight
    blocks.attention_norm.bias   ln_1.bias
    blocks.mlp_norm.scale        ln_2.weight
    blocks.mlp_norm.bias         ln_2.bias
"""
_OF_GPTJ = f"""{_OF_GPT}
    blocks.attention.wo          attn.out_proj.weight   embed heads.head_dim
    blocks.attention.bo          attn.out_proj.bias
    blocks.mlp.w_up              mlp.fc_in.weight       mlp embed
    blocks.mlp.b_up              mlp.fc_in.bias
    blocks.mlp.w_down            mlp.fc_out.weight      embed mlp
    blocks.mlp.b_down            mlp.fc_out.bias
"""
_C_MLP = """
    blocks.mlp.w_up              mlp.c_fc.weight        mlp embed
    blocks.mlp.b_up              mlp.c_fc.bias
    blocks.mlp.w_down            mlp.c_proj.weight      embed mlp
    blocks.mlp.b_down            mlp.c_proj.bias
"""
_GPTJ_RULES = (
    *OF_GPT2,
    Same("n_positions", "max_seq_len", 2048),
    Same("tie_word_embeddings", "tie_embeddings", False),
    Choice("activation_function", "mlp", GELUS, "gelu_new"),
    RotaryDim(),
)
_GPTJ_ALWAYS = {
    **NORMS,
    "mlp_bias": True,
    "head_bias": True,
    "residual.parallel": "one_norm",
}
of_gpt = partial(decoder, prefixes=("transformer.", ""), marker="{prefix}wte.weight")
GPTJ = of_gpt(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    rules=_GPTJ_RULES,
    always=_GPTJ_ALWAYS,
    tensors=table(
        f"""{_OF_GPTJ}
        blocks.attention.wq  attn.q_proj.weight  heads.head_dim embed     pairs_q:0
        blocks.attention.wk  attn.k_proj.weight  kv_heads.head_dim embed  pairs_k:0
        blocks.attention.wv  attn.v_proj.weight  kv_heads.head_dim embed
        """,
        layer=layer,
    ),
    splits=PAIRS,
    ignored=words(f"{SUMMARY} rotary scale_attn_weights gradient_checkpointing"),
    buffers=(".attn.bias", ".attn.masked_bias"),
)
CODEGEN = of_gpt(
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    rules=_GPTJ_RULES,
    always=_GPTJ_ALWAYS,
    tensors=table(
        _OF_GPTJ + fused("attn.qkv_proj"),
        layer=layer,
    ),
    splits={"qkv": _codegen},
    ignored=words(f"{SUMMARY} n_ctx rotary scale_attn_weights"),
    buffers=(".attn.causal_mask", ".attn.bias", ".attn.masked_bias"),
)
GPT_NEO = of_gpt(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_layers", "num_layers"),
        Same("num_heads", "num_heads"),
        Same("intermediate_size", "d_ff", None),
        Same("max_position_embeddings", "max_seq_len", 2048),
        Same("layer_norm_epsilon", "residual.norm_eps", 1e-5),
        Same("tie_word_embeddings", "tie_embeddings", True),
        Choice("activation_function", "mlp", GELUS, "gelu_new"),
        WindowGroups(),
    ),
    always={
        **NORMS,
        "positions.kind": "learned",
        "attention.scale": 1.0,
        "attention.out_bias": True,
        "mlp_bias": True,
    },
    tensors=table(
        f"""{_OF_GPT}{_C_MLP}
        blocks.attention.wq  attn.attention.q_proj.weight    heads.head_dim embed
        blocks.attention.wk  attn.attention.k_proj.weight    kv_heads.head_dim embed
        blocks.attention.wv  attn.attention.v_proj.weight    kv_heads.head_dim embed
        blocks.attention.wo  attn.attention.out_proj.weight  embed heads.head_dim
        blocks.attention.bo  attn.attention.out_proj.bias
        """,
        layer=layer,
    ),
    ignored=words(f"{SUMMARY} embed_dropout resid_dropout classifier_dropout"),
    buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
)
GPT_BIGCODE = of_gpt(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    rules=(
        *OF_GPT2,
        Same("n_positions", "max_seq_len", 1024),
        Same("tie_word_embeddings", "tie_embeddings", True),
        Choice("activation_function", "mlp", GELUS, "gelu_pytorch_tanh"),
        Fixed("multi_query", True),
        Fixed("scale_attn_weights", True),
        Fixed("add_cross_attention", False),
    ),
    always={
        "residual.norm": "layer",
        "bias": True,
        "positions.kind": "learned",
        "attention.num_kv_heads": 1,
    },
    tensors=table(
        f"""{_OF_GPT}{_C_MLP}{fused("attn.c_attn")}
        blocks.attention.wo  attn.c_proj.weight  embed heads.head_dim
        blocks.attention.bo  attn.c_proj.bias
        """,
        layer=layer,
    ),
    splits={"qkv": side_by_side},
    # How sums are made, and old fields of inference.
    ignored=words(
        f"""{SUMMARY} attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner
        max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache
        num_key_value_heads validate_runner_input"""
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
)
FALCON = decoder(
    model_type="falcon",
    architecture="FalconForCausalLM",
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "num_layers"),
        Same("num_attention_heads", "num_heads"),
        Same("ffn_hidden_size", "d_ff", None),
        Same("layer_norm_epsilon", "residual.norm_eps", 1e-5),
        Same("tie_word_embeddings", "tie_embeddings", True),
        Choice("activation", "mlp", GELUS, "gelu"),
        Rotary(),
        Each("bias", "attention.qkv_bias attention.out_bias mlp_bias", False),
        Fixed("alibi", False),
        Fixed("multi_query", True),
        Fixed("new_decoder_architecture", False),
        Fixed("parallel_attn", True),
    ),
    always={**NORMS, "residual.parallel": "one_norm", "attention.num_kv_heads": 1},
    tensors=table(
        fused("self_attention.query_key_value")
        + """
        embedding.weight             {prefix}word_embeddings.weight
        final_norm.scale             {prefix}ln_f.weight
        final_norm.bias              {prefix}ln_f.bias
        head.weight                  lm_head.weight                         vocab embed
        blocks.attention_norm.scale  input_layernorm.weight
        blocks.attention_norm.bias   input_layernorm.bias
        blocks.attention.wo          self_attention.dense.weight            embed heads.head_dim
        blocks.attention.bo          self_attention.dense.bias
        blocks.mlp.w_up              mlp.dense_h_to_4h.weight               mlp embed
        blocks.mlp.b_up              mlp.dense_h_to_4h.bias
        blocks.mlp.w_down            mlp.dense_4h_to_h.weight               embed mlp
        blocks.mlp.b_down            mlp.dense_4h_to_h.bias
        """,
        layer=layer,
    ),
    prefixes=("transformer.", ""),
    marker="{prefix}word_embeddings.weight",
    splits={"qkv": side_by_side},
    # The last three are of the other architecture.
    ignored=words(
        "apply_residual_connection_post_layernorm hidden_dropout num_kv_heads "
        "num_ln_in_parallel_attn"
    ),
)
