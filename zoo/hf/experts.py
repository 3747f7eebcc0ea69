"""The model types with experts in the MLP: of Qwen, OLMo, Granite, GLM, Ernie and gpt-oss."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass
from typing import Any

from zoo.hf.delta_nets import SHARED_EXPERT, SharedExperts
from zoo.hf.family import LOAD_BIAS_RATE
from zoo.hf.llamas import (
    DENSE,
    INTERLEAVED,
    PAIRS,
    QWEN3_EXPERTS,
    NumExperts,
    common,
    decoder,
    layer,
)
from zoo.hf.mambas import FACTORS, GRANITE_EXPERTS
from zoo.hf.rotary import GivenRotary, Rotary
from zoo.hf.rules import (
    Choice,
    Fields,
    Fixed,
    LayerTypes,
    OptionalLayerTypes,
    Rule,
    Same,
    same,
    words,
)


@dataclass(frozen=True)
class FirstDense(Rule):
    """How many layers come before those with experts; their MLP has `intermediate_size`."""

    theirs: str = "first_k_dense_replace"
    default: int = 0

    def read(self, fields: Fields) -> dict[str, Any]:
        width = fields.take("intermediate_size", None)
        return {"experts.first_dense": fields.take(self.theirs, self.default)} | (
            {} if width is None else {"experts.dense_d_ff": width}
        )

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: config.experts.first_dense, "intermediate_size": config.dense_size}


@dataclass(frozen=True)
class Interval(FirstDense):
    """Qwen's: experts in each `decoder_sparse_step`-th layer, except in `mlp_only_layers`."""

    def read(self, fields: Fields) -> dict[str, Any]:
        dense = fields.take("mlp_only_layers", None) or []
        if sorted(dense) != [*range(len(dense))]:
            raise fields.refusal(f"mlp_only_layers={dense!r} is not supported, only first layers")
        found = {"experts.interval": fields.take("decoder_sparse_step", 1)}
        return super().read(fields) | found | {"experts.first_dense": len(dense)}

    def write(self, config: Any) -> dict[str, Any]:
        return {
            "mlp_only_layers": [*range(config.experts.first_dense)],
            "decoder_sparse_step": config.experts.interval,
            "intermediate_size": config.dense_size,
        }


@dataclass(frozen=True)
class Span(FirstDense):
    """Ernie's: experts in each `moe_layer_interval`-th layer from the first such layer to a last.

    The last one has to be that of the model.
    """

    theirs: str = "moe_layer_start_index"
    default: int = 1

    def read(self, fields: Fields) -> dict[str, Any]:
        last = fields.take("moe_layer_end_index", -1)
        if last not in (-1, fields.values.get("num_hidden_layers", 0) - 1):
            raise fields.refusal(f"moe_layer_end_index={last!r} is not supported, only the last")
        return super().read(fields) | {"experts.interval": fields.take("moe_layer_interval", 1)}

    def write(self, config: Any) -> dict[str, Any]:
        span = {"moe_layer_interval": config.experts.interval}
        return super().write(config) | span | {"moe_layer_end_index": config.num_layers - 1}


DENSE_MLP = layer(
    """
    blocks.dense_mlp.w_gate  mlp.gate_proj.weight
    blocks.dense_mlp.w_up    mlp.up_proj.weight
    blocks.dense_mlp.w_down  mlp.down_proj.weight
    """
)
SHARED_EXPERTS = DENSE_MLP | layer(
    """
    blocks.shared_mlp.w_gate  mlp.shared_experts.gate_proj.weight
    blocks.shared_mlp.w_up    mlp.shared_experts.up_proj.weight
    blocks.shared_mlp.w_down  mlp.shared_experts.down_proj.weight
    """
)
LOAD_BIAS = layer("blocks.mlp.bias.value  mlp.gate.e_score_correction_bias")
ERNIE_BIAS = layer("blocks.mlp.bias.value  mlp.moe_statics.e_score_correction_bias  1 routes")
INTERVAL = (
    Same("norm_topk_prob", "experts.normalize", False),
    Interval(),
)
# DeepSeek-V3's router: sigmoids, a bias for the choice, and groups.
GROUPS = same("n_group=experts.num_groups:8 topk_group=experts.groups_per_token:4")
DEEPSEEK_ROUTER = {"experts.router": "sigmoid", "experts.bias_rate": LOAD_BIAS_RATE}


def deepseek_experts(experts: int, shared: int, dense: int, scale: float) -> tuple[Rule, ...]:
    """The fields of DeepSeek's experts, given the defaults that differ."""
    return (
        NumExperts(("n_routed_experts", "num_local_experts", "num_experts"), experts),
        Same("num_experts_per_tok", "experts.per_token", 8),
        Same("n_shared_experts", "experts.num_shared", shared),
        Same("routed_scaling_factor", "experts.scale", scale),
        FirstDense(default=dense),
        Fixed("moe_layer_freq", 1, written=False),
    )


QWEN2_MOE = decoder(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=32768), hidden="moe_intermediate_size"),
        Fixed("use_sliding_window", False),
        OptionalLayerTypes(),
        NumExperts(("num_experts", "num_local_experts"), 60),
        Same("num_experts_per_tok", "experts.per_token", 4),
        SharedExperts("shared_expert_intermediate_size", 5632),
        *INTERVAL,
        Same("qkv_bias", "attention.qkv_bias", True),
    ),
    always={"experts.shared_gate": True},
    tensors=DENSE | DENSE_MLP | QWEN3_EXPERTS | SHARED_EXPERT,
)
OLMOE = decoder(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=4096), eps=1e-5),
        NumExperts(("num_experts", "num_local_experts"), 64),
        *same("num_experts_per_tok=experts.per_token:8 norm_topk_prob=experts.normalize:False"),
        Fixed("clip_qkv", None),
        Fixed("attention_bias", False),
    ),
    always={"attention.qk_norm": "across_heads"},
    tensors=DENSE | QWEN3_EXPERTS,
)
GRANITE_MOE = decoder(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    rules=(
        *common(Rotary()),
        NumExperts(("num_local_experts",), 8),
        Same("num_experts_per_tok", "experts.per_token", 2),
        *FACTORS,
        Fixed("attention_bias", False),
    ),
    tensors=DENSE | GRANITE_EXPERTS,
)
GLM4_MOE = decoder(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rules=(
        *common(
            Rotary(max_seq_len=131072, fraction=0.5),
            eps=1e-5,
            kv_heads=8,
            hidden="moe_intermediate_size",
        ),
        *deepseek_experts(128, 1, 1, 1.0),
        Same("n_group", "experts.num_groups", 1),
        Same("topk_group", "experts.groups_per_token", 1),
        Same("norm_topk_prob", "experts.normalize", True),
        Same("attention_bias", "attention.qkv_bias", False),
        Choice("use_qk_norm", "attention.qk_norm", {False: "none", True: "per_head"}, False),
    ),
    always=DEEPSEEK_ROUTER,
    tensors=DENSE | SHARED_EXPERTS | QWEN3_EXPERTS | LOAD_BIAS,
    ignored=words("num_nextn_predict_layers num_mtp_layers"),
    left_out={"model.layers.{num_layers}.": "heads of multi-token prediction"},
)
ERNIE4_5_MOE = decoder(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    rules=(
        *common(
            Rotary(theta=500_000.0, max_seq_len=131072),
            tied=True,
            eps=1e-5,
            kv_heads=4,
            hidden="moe_intermediate_size",
        ),
        NumExperts(("moe_num_experts", "num_experts"), 64),
        *same("moe_k=experts.per_token:6 moe_num_shared_experts=experts.num_shared:2"),
        Span(),
        Fixed("moe_norm_min", 1e-12),
        Fixed("moe_gate", "topk", written=False),
        Fixed("moe_use_aux_free", True, written=False),
        Fixed("use_bias", False),
    ),
    always={"experts.bias_rate": LOAD_BIAS_RATE},
    tensors=DENSE | INTERLEAVED | SHARED_EXPERTS | QWEN3_EXPERTS | ERNIE_BIAS,
    splits=PAIRS,
    ignored=words("moe_capacity num_nextn_predict_layers"),
    left_out={"model.mtp_": "heads of multi-token prediction"},
)
# Gates take turns with what they multiply, and matrices are [in, out].
GPT_OSS_NAMES = layer(
    """
    blocks.attention.bo         self_attn.o_proj.bias
    blocks.attention.sinks      self_attn.sinks
    blocks.mlp.router           mlp.router.*
    blocks.mlp.{w_gate,w_up}    mlp.experts.gate_up_proj       experts embed mlp.part  /
    blocks.mlp.w_down           mlp.experts.down_proj          experts mlp embed
    blocks.mlp.{b_gate,b_up}    mlp.experts.gate_up_proj_bias  experts mlp.part        /
    blocks.mlp.b_down           mlp.experts.down_proj_bias
    """
)
GPT_OSS = decoder(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    rules=(
        *common(
            GivenRotary(theta=150_000.0, max_seq_len=131072),
            Choice("hidden_act", "mlp", {"silu": "swiglu_clamped"}, "silu"),
            eps=1e-5,
            kv_heads=8,
            head_dim=64,
        ),
        LayerTypes(period=2, default=128),
        NumExperts(("num_local_experts", "num_experts"), 128),
        Same("num_experts_per_tok", "experts.per_token", 4),
        Fixed("attention_bias", True),
        Fixed("swiglu_alpha", 1.702),
        Fixed("swiglu_limit", 7.0),
    ),
    always={"bias": True, "attention.sinks": True},
    tensors=DENSE | GPT_OSS_NAMES,
    ignored=words("experts_per_token initial_context_length"),  # said a second time
)
