"""Mixtures of experts: Mixtral and Qwen 3."""

from dataclasses import dataclass
from typing import Any

from zoo import transformer
from zoo.base import configuration
from zoo.publishing.hf import llama
from zoo.publishing.hf.family import Fixed, Rule, Same
from zoo.publishing.hf.names import Tensor
from zoo.publishing.hf.rules import OptionalLayerTypes, Rotary


def _tensors(part: str, gate: str, up: str, down: str) -> Any:
    expert = llama.LAYER + part + ".experts.{experts}."

    def tensors(config: transformer.Config) -> dict[str, Tensor]:
        experts = {
            "blocks.mlp.router": Tensor(f"{llama.LAYER}{part}.gate.weight", "routes embed"),
            "blocks.mlp.w_gate": Tensor(f"{expert}{gate}.weight", "mlp embed"),
            "blocks.mlp.w_up": Tensor(f"{expert}{up}.weight", "mlp embed"),
            "blocks.mlp.w_down": Tensor(f"{expert}{down}.weight", "embed mlp"),
        }
        others = llama.attention(config) | llama.norms(llama.PRE_NORMS)
        return llama.outside(config) | others | experts

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


MIXTRAL = llama.decoder(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=(
        *llama.sizes(eps=1e-5, kv_heads=8),
        llama.SILU,
        Rotary(theta=1_000_000.0, max_seq_len=131072),
        Same("sliding_window", "attention.window", None),
        _NumExperts(("num_local_experts",), 8),
        Same("num_experts_per_tok", "experts.per_token", 2),
    ),
    always={"experts.normalize": True},
    tensors=_tensors("block_sparse_moe", "w1", "w3", "w2"),
)
QWEN3_MOE = llama.decoder(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=(
        *llama.sizes(kv_heads=4, hidden="moe_intermediate_size"),
        llama.SILU,
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
    tensors=_tensors("mlp", "gate_proj", "up_proj", "down_proj"),
    ignored=frozenset({"intermediate_size"}),  # of layers without experts, which it does not have
)
