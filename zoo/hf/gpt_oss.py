"""The model type of gpt-oss: sinks, windows in turn, and experts with biases and bounds."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass
from typing import Any

from zoo.hf.llamas import DENSE, NumExperts, decoder, layer, sizes
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Choice, Fields, Fixed, LayerTypes, Same, words


@dataclass(frozen=True)
class GivenRotary(Rotary):
    """Rotary positions that a file has to give, as their default is no plain one."""

    def read(self, fields: Fields) -> dict[str, Any]:
        if not (fields.values.get("rope_scaling") or fields.values.get("rope_parameters")):
            raise fields.refusal("has neither rope_scaling nor rope_parameters: add what was meant")
        return super().read(fields)


NAMES = layer(
    """
    blocks.attention.bo     self_attn.o_proj.bias
    blocks.attention.sinks  self_attn.sinks
    blocks.mlp.router       mlp.router.weight               routes embed
    blocks.mlp.b_router     mlp.router.bias
    blocks.mlp.w_gate       mlp.experts.gate_up_proj        experts embed mlp.part  0/2
    blocks.mlp.w_up         mlp.experts.gate_up_proj        experts embed mlp.part  1/2
    blocks.mlp.w_down       mlp.experts.down_proj
    blocks.mlp.b_gate       mlp.experts.gate_up_proj_bias   experts mlp.part        0/2
    blocks.mlp.b_up         mlp.experts.gate_up_proj_bias   experts mlp.part        1/2
    blocks.mlp.b_down       mlp.experts.down_proj_bias
    """
)
GPT_OSS = decoder(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    rules=(
        *sizes(eps=1e-5, kv_heads=8, head_dim=64),
        Choice("hidden_act", "mlp", {"silu": "swiglu_clamped"}, "silu"),
        GivenRotary(theta=150_000.0, max_seq_len=131072),
        LayerTypes(period=2, default=128),
        NumExperts(("num_local_experts", "num_experts"), 128),
        Same("num_experts_per_tok", "experts.per_token", 4),
        Fixed("attention_bias", True),
        Fixed("swiglu_alpha", 1.702),
        Fixed("swiglu_limit", 7.0),
    ),
    always={"bias": True, "attention.sinks": True},
    tensors=DENSE | NAMES,
    ignored=words("experts_per_token initial_context_length"),  # said a second time
)
