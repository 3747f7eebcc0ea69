"""The model type of xLSTM: mLSTM in each layer (Beck et al. 2025 for the one of 7B)."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass
from typing import Any

from zoo.hf.layouts import table
from zoo.hf.llamas import decoder
from zoo.hf.rules import Fields, Fixed, Rule, same, words
from zoo.nn.recurrences import mlstm


@dataclass(frozen=True)
class Factors(Rule):
    """Sizes as factors of the width; the MLP's rounded up to a whole multiple."""

    def read(self, fields: Fields) -> dict[str, Any]:
        width, heads = fields.values["hidden_size"], fields.values["num_heads"]
        for name, other in (("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers")):
            if fields.take(name, None) not in (None, fields.values[other]):
                raise fields.refusal(f"{name} contradicts {other}: remove the wrong one")
        factors = fields.take("qk_dim_factor", 0.5), fields.take("v_dim_factor", 1.0)
        keys, values = (int(width * factor) // heads for factor in factors)
        unit = fields.take("ffn_round_up_to_multiple_of", 64)
        return {
            "mixer.recurrence.key_dim": keys,
            "mixer.recurrence.value_dim": values,
            "d_ff": int((width * fields.take("ffn_proj_factor", 2.667) + unit - 1) // unit * unit),
        }

    def write(self, config: Any) -> dict[str, Any]:
        settings, width = config.mixer.recurrence, config.d_model
        keys, values = (settings.num_heads * size / width for size in settings.sizes(width))
        unit = 64 if config.hidden_size % 64 == 0 else 1
        return {
            "qk_dim_factor": keys,
            "v_dim_factor": values,
            "ffn_proj_factor": config.hidden_size / width,
            "ffn_round_up_to_multiple_of": unit,
        }


XLSTM = decoder(
    model_type="xlstm",
    architecture="xLSTMForCausalLM",
    rules=(
        *same(
            """vocab_size=vocab_size hidden_size=d_model num_hidden_layers=num_layers
            num_heads=mixer.recurrence.num_heads norm_eps=residual.norm_eps:1e-6
            tie_word_embeddings=tie_embeddings:False
            output_logit_soft_cap=logit_soft_cap:30.0"""
        ),
        Factors(),
        Fixed("eps", mlstm.EPS),
        Fixed("gate_soft_cap", mlstm.CAP),
        Fixed("use_bias", False),
        Fixed("add_out_norm", True),
        Fixed("weight_mode", "single"),
    ),
    always={"num_heads": 1, "positions.kind": "none", "mixer.pattern": ("mlstm",)},
    tensors=table(
        """
        embedding.weight                {prefix}embeddings.weight
        final_norm.scale                {prefix}out_norm.weight
        head.weight                     lm_head.weight
        blocks.attention_norm.scale     norm_mlstm.weight
        blocks.mlp_norm.scale           norm_ffn.weight
        blocks.mlp.w_gate               ffn.proj_up_gate.weight
        blocks.mlp.w_up                 ffn.proj_up.weight
        blocks.mlp.w_down               ffn.proj_down.weight
        blocks.recurrence.wq            mlstm_layer.q.weight             heads.head_dim embed
        blocks.recurrence.wk            mlstm_layer.k.weight             heads.head_dim embed
        blocks.recurrence.wv            mlstm_layer.v.weight
        blocks.recurrence.wz            mlstm_layer.ogate_preact.weight
        blocks.recurrence.wf            mlstm_layer.fgate_preact.weight  heads embed
        blocks.recurrence.wi            mlstm_layer.igate_preact.weight  heads embed
        blocks.recurrence.gates.forget  mlstm_layer.fgate_preact.bias
        blocks.recurrence.gates.input   mlstm_layer.igate_preact.bias
        blocks.recurrence.norm_scale    mlstm_layer.multihead_norm.weight
        blocks.recurrence.wo            mlstm_layer.out_proj.weight
        """,
        layer="{prefix}blocks.{layer}.",
    ),
    prefixes=("backbone.", ""),
    marker="{prefix}embeddings.weight",
    # How a program runs, and in what precision.
    ignored=words(
        "autocast_kernel_dtype chunk_size chunkwise_kernel inference_state_dtype "
        "max_inference_chunksize mode norm_reduction_force_float32 return_last_states "
        "sequence_kernel step_kernel"
    ),
)
