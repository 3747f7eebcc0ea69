"""The model types of GPT-2 and its first open followers: GPT-NeoX, GPT-J, OPT, and others.

GPT-2 has weights as [in, out], and queries, keys and values side by side.
"""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.layouts import table
from zoo.hf.llamas import PAIRS, Derived, decoder, side_by_side
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Choice, Computed, Each, Fields, Fixed, Rule, same, shortest, words

GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
NORMS = {"residual.norm": "layer", "residual.norm_bias": True}
_OF_GPT2 = """vocab_size=vocab_size n_embd=d_model n_layer=num_layers n_head=num_heads
    n_inner=d_ff:None layer_norm_epsilon=residual.norm_eps:1e-5"""
_SHORT = same(f"{_OF_GPT2} n_positions=max_seq_len:1024 tie_word_embeddings=tie_embeddings:True")
SUMMARY = """summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj"""


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


layer = partial(table, layer="{prefix}h.{layer}.")
_OF_GPT = """
    embedding.weight             {prefix}wte.weight
    position_embedding.weight    {prefix}wpe.weight
    final_norm.scale             {prefix}ln_f.*
    head.weight                  lm_head.*
    blocks.attention_norm.scale  ln_1.*
    blocks.mlp_norm.scale        ln_2.*
"""
_C_MLP = """
    blocks.mlp.w_up    mlp.c_fc.*
    blocks.mlp.w_down  mlp.c_proj.*
"""
_WIDE_MLP = """
    blocks.mlp.w_up    mlp.dense_h_to_4h.*
    blocks.mlp.w_down  mlp.dense_4h_to_h.*
"""
of_gpt = partial(
    decoder,
    prefixes=("transformer.", ""),
    marker="{prefix}wte.weight",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
GPT2 = of_gpt(
    "gpt2",
    "GPT2LMHeadModel",
    rules=(
        *_SHORT,
        Choice("activation_function", "mlp", GELUS, "gelu_new"),
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Fixed("add_cross_attention", False),
    ),
    always={"residual.norm": "layer", "positions.kind": "learned", "bias": True},
    tensors=layer(
        f"""{_OF_GPT}
        blocks.attention.{{wq,wk,wv}}  attn.c_attn.*  T /
        blocks.attention.wo            attn.c_proj.*  T
        blocks.mlp.w_up                mlp.c_fc.*     T
        blocks.mlp.w_down              mlp.c_proj.*   T
        """
    ),
    # The length a second time, a matter of precision, and fields of a head that is not used.
    ignored=words(f"n_ctx reorder_and_upcast_attn {SUMMARY}"),
)
GPT_NEOX = decoder(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    rules=(
        *same(
            """vocab_size=vocab_size hidden_size=d_model num_hidden_layers=num_layers
            num_attention_heads=num_heads intermediate_size=d_ff
            layer_norm_eps=residual.norm_eps:1e-5 tie_word_embeddings=tie_embeddings:False"""
        ),
        Choice("hidden_act", "mlp", {**GELUS, "relu": "relu"}, "gelu"),
        Rotary(fraction=0.25, theta_name="rotary_emb_base", fraction_name="rotary_pct"),
        Each("attention_bias", "attention.qkv_bias attention.out_bias", True),
        Choice(
            "use_parallel_residual", "residual.parallel", {True: "two_norms", False: "none"}, True
        ),
    ),
    always={**NORMS, "mlp_bias": True},
    tensors=table(
        f"""{_WIDE_MLP}
        embedding.weight               {{prefix}}embed_in.weight
        final_norm.scale               {{prefix}}final_layer_norm.*
        head.weight                    embed_out.weight
        blocks.attention_norm.scale    input_layernorm.*
        blocks.attention.{{wq,wk,wv}}  attention.query_key_value.*  qkv:
        blocks.attention.wo            attention.dense.*
        blocks.mlp_norm.scale          post_attention_layernorm.*
        """,
        layer="{prefix}layers.{layer}.",
    ),
    prefixes=("gpt_neox.", ""),
    marker="{prefix}embed_in.weight",
    splits={"qkv": _by_head},
    ignored=words("classifier_dropout hidden_dropout"),
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
_OF_GPTJ = f"""{_OF_GPT}
    blocks.attention.wo  attn.out_proj.*
    blocks.mlp.w_up      mlp.fc_in.*
    blocks.mlp.w_down    mlp.fc_out.*
"""
GPTJ = of_gpt(
    "gptj",
    "GPTJForCausalLM",
    rules=(
        *same(_OF_GPT2 + " n_positions=max_seq_len:2048 tie_word_embeddings=tie_embeddings:False"),
        Choice("activation_function", "mlp", GELUS, "gelu_new"),
        Computed(  # how many features of a head rotate; null for all
            "rotary_dim",
            64,
            lambda size, values: {
                "positions.rotary_fraction": size * values["n_head"] / values["n_embd"]
                if size
                else 1.0
            },
            lambda config: config.rotary_size,
        ),
    ),
    always={**NORMS, "mlp_bias": True, "head_bias": True, "residual.parallel": "one_norm"},
    tensors=layer(
        f"""{_OF_GPTJ}
        blocks.attention.wq  attn.q_proj.weight  pairs_q:
        blocks.attention.wk  attn.k_proj.weight  pairs_k:
        blocks.attention.wv  attn.v_proj.weight
        """
    ),
    splits=PAIRS,
    ignored=words(f"{SUMMARY} rotary scale_attn_weights gradient_checkpointing"),
)
CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    tensors=layer(_OF_GPTJ + "blocks.attention.{wq,wk,wv} attn.qkv_proj.* qkv:"),
    splits={"qkv": _codegen},
    ignored=words(f"{SUMMARY} n_ctx rotary scale_attn_weights"),
    buffers=(".attn.causal_mask", ".attn.bias", ".attn.masked_bias"),
)
GPT_NEO = of_gpt(
    "gpt_neo",
    "GPTNeoForCausalLM",
    rules=(
        *same(
            """vocab_size=vocab_size hidden_size=d_model num_layers=num_layers num_heads=num_heads
            intermediate_size=d_ff:None max_position_embeddings=max_seq_len:2048
            layer_norm_epsilon=residual.norm_eps:1e-5 tie_word_embeddings=tie_embeddings:True"""
        ),
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
    tensors=layer(
        f"""{_OF_GPT}{_C_MLP}
        blocks.attention.wq  attn.attention.q_proj.weight
        blocks.attention.wk  attn.attention.k_proj.weight
        blocks.attention.wv  attn.attention.v_proj.weight
        blocks.attention.wo  attn.attention.out_proj.*
        """
    ),
    ignored=words(f"{SUMMARY} embed_dropout resid_dropout classifier_dropout"),
    buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
)
GPT_BIGCODE = of_gpt(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    rules=(
        *_SHORT,
        Choice("activation_function", "mlp", GELUS, "gelu_pytorch_tanh"),
        Fixed("multi_query", True),
        Fixed("scale_attn_weights", True),
        Fixed("add_cross_attention", False),
    ),
    always={**GPT2.always, "attention.num_kv_heads": 1},
    tensors=layer(
        f"""{_OF_GPT}{_C_MLP}
        blocks.attention.{{wq,wk,wv}}  attn.c_attn.*  qkv:
        blocks.attention.wo            attn.c_proj.*
        """
    ),
    splits={"qkv": side_by_side},
    # How sums are made, and old fields of inference.
    ignored=words(
        f"""{SUMMARY} attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner
        max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache
        num_key_value_heads validate_runner_input"""
    ),
)
FALCON = decoder(
    "falcon",
    "FalconForCausalLM",
    rules=(
        *same(
            """vocab_size=vocab_size hidden_size=d_model num_hidden_layers=num_layers
            num_attention_heads=num_heads ffn_hidden_size=d_ff:None
            layer_norm_epsilon=residual.norm_eps:1e-5 tie_word_embeddings=tie_embeddings:True"""
        ),
        Choice("activation", "mlp", GELUS, "gelu"),
        Rotary(),
        Each("bias", "attention.qkv_bias attention.out_bias mlp_bias", False),
        Fixed("alibi", False),
        Fixed("multi_query", True),
        Fixed("new_decoder_architecture", False),
        Fixed("parallel_attn", True),
    ),
    always={**NORMS, "residual.parallel": "one_norm", "attention.num_kv_heads": 1},
    tensors=layer(
        f"""{_WIDE_MLP}
        embedding.weight               {{prefix}}word_embeddings.weight
        final_norm.scale               {{prefix}}ln_f.*
        head.weight                    lm_head.weight
        blocks.attention_norm.scale    input_layernorm.*
        blocks.attention.{{wq,wk,wv}}  self_attention.query_key_value.*  qkv:
        blocks.attention.wo            self_attention.dense.*
        """
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
OPT = decoder(
    "opt",
    "OPTForCausalLM",
    rules=(
        *same(
            """vocab_size=vocab_size hidden_size=d_model num_hidden_layers=num_layers ffn_dim=d_ff
            num_attention_heads=num_heads max_position_embeddings=max_seq_len:2048
            tie_word_embeddings=tie_embeddings:True"""
        ),
        Choice("activation_function", "mlp", {"relu": "relu", **GELUS}, "relu"),
        Each("enable_bias", "attention.qkv_bias attention.out_bias mlp_bias", True),
        Derived("word_embed_proj_dim", over=""),
        Fixed("do_layer_norm_before", True),
        Fixed("_remove_final_layer_norm", False),
        Fixed("layer_norm_elementwise_affine", True),
    ),
    # The first two rows of the table are no position's.
    always={
        **NORMS,
        "residual.norm_eps": 1e-5,
        "positions.kind": "learned",
        "encoder.position_offset": 2,
    },
    tensors=table(
        """
        embedding.weight             {prefix}embed_tokens.weight
        position_embedding.weight    {prefix}embed_positions.weight
        final_norm.scale             {prefix}final_layer_norm.*
        head.weight                  lm_head.weight
        blocks.attention_norm.scale  self_attn_layer_norm.*
        blocks.attention.wq          self_attn.q_proj.*
        blocks.attention.wk          self_attn.k_proj.*
        blocks.attention.wv          self_attn.v_proj.*
        blocks.attention.wo          self_attn.out_proj.*
        blocks.mlp_norm.scale        final_layer_norm.*
        blocks.mlp.w_up              fc1.*
        blocks.mlp.w_down            fc2.*
        """,
        layer="{prefix}layers.{layer}.",
    ),
    prefixes=("model.decoder.", "decoder.", ""),
    ignored=words("dropout init_std layerdrop"),
)
