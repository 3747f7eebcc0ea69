"""The model types with gated delta nets beside attention: Qwen3-Next and Qwen3.5."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.family import consecutive
from zoo.hf.llamas import DENSE, QWEN3_EXPERTS, SILU, Mixers, NumExperts, decoder, layer, sizes
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Fields, Fixed, Rule, Same


@dataclass(frozen=True)
class SharedExperts(Rule):
    """The width of the shared experts, a multiple of an expert's."""

    theirs: str
    default: int

    def read(self, fields: Fields) -> dict[str, Any]:
        width = fields.take(self.theirs, self.default)
        one = fields.values.get("moe_intermediate_size", self.default)
        if width % one:
            raise fields.refusal(f"{self.theirs}={width} is no multiple of an expert's {one}")
        return {"experts.num_shared": width // one}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: config.experts.num_shared * config.hidden_size}


DELTA_NET = (
    Mixers({"linear_attention": "gated_deltanet", "full_attention": "attention"}),
    Same("linear_num_value_heads", "mixer.recurrence.num_heads", 32),
    Same("linear_num_key_heads", "mixer.recurrence.num_key_heads", 16),
    Same("linear_key_head_dim", "mixer.recurrence.key_dim", 128),
    Same("linear_value_head_dim", "mixer.recurrence.value_dim", 128),
    Same("linear_conv_kernel_dim", "mixer.recurrence.taps", 4),
)
QWEN = {
    "attention.qk_norm": "per_head",
    "attention.output_gate": True,
    "residual.norm": "rms_offset",
}
GATED = layer(
    """
    blocks.attention.wq               self_attn.q_proj.weight      heads.head_dim embed      gated:0
    blocks.attention.wg               self_attn.q_proj.weight      heads.head_dim embed      gated:1
    blocks.recurrence.conv_q.weight   linear_attn.conv1d.weight     kv_heads.head_dim 1 taps  qkv:0
    blocks.recurrence.conv_k.weight   linear_attn.conv1d.weight     kv_heads.head_dim 1 taps  qkv:1
    blocks.recurrence.conv_v.weight   linear_attn.conv1d.weight     heads.head_dim 1 taps     qkv:2
    blocks.recurrence.gates.log_rate  linear_attn.A_log
    blocks.recurrence.gates.bias      linear_attn.dt_bias
    blocks.recurrence.norm.scale      linear_attn.norm.weight
    blocks.recurrence.wo              linear_attn.out_proj.weight   embed heads.head_dim
    """
)
BY_KEY_HEAD = layer(
    """
    blocks.recurrence.wq  linear_attn.in_proj_qkvz.weight  kv_heads.head_dim embed  qkvz:0
    blocks.recurrence.wk  linear_attn.in_proj_qkvz.weight  kv_heads.head_dim embed  qkvz:1
    blocks.recurrence.wv  linear_attn.in_proj_qkvz.weight  heads.head_dim embed     qkvz:2
    blocks.recurrence.wz  linear_attn.in_proj_qkvz.weight  heads.head_dim embed     qkvz:3
    blocks.recurrence.wb  linear_attn.in_proj_ba.weight    heads embed              ba:0
    blocks.recurrence.wa  linear_attn.in_proj_ba.weight    heads embed              ba:1
    """
)
SIDE_BY_SIDE = layer(
    """
    blocks.recurrence.wq  linear_attn.in_proj_qkv.weight  kv_heads.head_dim embed  qkv:0
    blocks.recurrence.wk  linear_attn.in_proj_qkv.weight  kv_heads.head_dim embed  qkv:1
    blocks.recurrence.wv  linear_attn.in_proj_qkv.weight  heads.head_dim embed     qkv:2
    blocks.recurrence.wz  linear_attn.in_proj_z.weight    heads.head_dim embed
    blocks.recurrence.wb  linear_attn.in_proj_b.weight    heads embed
    blocks.recurrence.wa  linear_attn.in_proj_a.weight    heads embed
    """
)
SHARED_EXPERT = layer(
    """
    blocks.shared_mlp.w_gate  mlp.shared_expert.gate_proj.weight  mlp embed
    blocks.shared_mlp.w_up    mlp.shared_expert.up_proj.weight    mlp embed
    blocks.shared_mlp.w_down  mlp.shared_expert.down_proj.weight  embed mlp
    blocks.shared_gate        mlp.shared_expert_gate.weight       routes embed
    """
)


def _sizes(config: transformer.Config) -> tuple[int, int, int, int]:
    """Key heads of a delta net, value heads for each, and the sizes of both."""
    settings = config.mixer.recurrence
    key_heads = settings.num_key_heads or settings.num_heads
    return key_heads, settings.num_heads // key_heads, *settings.sizes(config.d_model)


def _gated(config: transformer.Config) -> list[np.ndarray]:
    """Head by head, its queries and the gates of its output."""
    rows = np.arange(2 * config.num_heads * config.head_size)
    return [x.ravel() for x in np.moveaxis(rows.reshape(-1, 2, config.head_size), 1, 0)]


def _qkv(config: transformer.Config) -> list[np.ndarray]:
    heads, times, key_dim, value_dim = _sizes(config)
    return consecutive(heads * key_dim, heads * key_dim, heads * times * value_dim)


def _by_key_head(config: transformer.Config, *of_head: int) -> list[np.ndarray]:
    """Key head by key head, so many rows of each parameter."""
    rows = np.arange(_sizes(config)[0] * sum(of_head)).reshape(-1, sum(of_head))
    return [x.ravel() for x in np.split(rows, np.cumsum(of_head)[:-1], 1)]


def _qkvz(config: transformer.Config) -> list[np.ndarray]:
    _, times, key_dim, value_dim = _sizes(config)
    return _by_key_head(config, key_dim, key_dim, times * value_dim, times * value_dim)


def _ba(config: transformer.Config) -> list[np.ndarray]:
    return _by_key_head(config, *2 * (_sizes(config)[1],))


def _moe(experts: int, per_token: int) -> tuple[Rule, ...]:
    return (
        NumExperts(("num_experts",), experts),
        Same("num_experts_per_tok", "experts.per_token", per_token),
        SharedExperts("shared_expert_intermediate_size", 512),
    )


QWEN3_NEXT = decoder(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rules=(
        *sizes(kv_heads=2, head_dim=256, hidden="moe_intermediate_size"),
        SILU,
        Rotary(max_seq_len=32768, fraction=0.25),
        *DELTA_NET,
        *_moe(512, 10),
        Same("norm_topk_prob", "experts.normalize", True),
        Fixed("attention_bias", False),
        Fixed("decoder_sparse_step", 1),
        Fixed("mlp_only_layers", []),
    ),
    always={**QWEN, "experts.shared_gate": True},
    tensors=DENSE | GATED | BY_KEY_HEAD | QWEN3_EXPERTS | SHARED_EXPERT,
    splits={"gated": _gated, "qkv": _qkv, "qkvz": _qkvz, "ba": _ba},
    ignored=frozenset({"intermediate_size"}),  # of layers without experts
    left_out={"mtp.": "heads of multi-token prediction"},
)
OF_WHOLE = {"mtp.": "heads of multi-token prediction", "model.visual.": "a vision tower"}
QWEN3_5 = decoder(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    rules=(
        *sizes(kv_heads=4, head_dim=256),
        SILU,
        Rotary(max_seq_len=32768, fraction=0.25),
        *DELTA_NET,
        Fixed("attention_bias", False),
    ),
    always=QWEN,
    tensors=DENSE | GATED | SIDE_BY_SIDE,
    prefixes=("model.", "", "model.language_model."),
    splits={"gated": _gated, "qkv": _qkv},
    within="qwen3_5",
    left_out=OF_WHOLE,
)
QWEN3_5_MOE = decoder(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    rules=(
        *sizes(kv_heads=2, head_dim=256, hidden="moe_intermediate_size"),
        SILU,
        Rotary(max_seq_len=32768, fraction=0.25),
        *DELTA_NET,
        *_moe(256, 8),
        Fixed("attention_bias", False),
    ),
    always={**QWEN, "experts.shared_gate": True, "experts.normalize": True},
    tensors=DENSE | GATED | SIDE_BY_SIDE | QWEN3_EXPERTS | SHARED_EXPERT,
    prefixes=("model.", "", "model.language_model."),
    splits={"gated": _gated, "qkv": _qkv},
    ignored=frozenset({"intermediate_size"}),
    within="qwen3_5_moe",
    left_out=OF_WHOLE,
)
