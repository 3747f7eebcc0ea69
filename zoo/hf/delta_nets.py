"""The model types with gated delta nets beside attention: Qwen3-Next, Qwen3.5, Olmo-Hybrid."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.layouts import consecutive
from zoo.hf.llamas import (
    DENSE,
    ONLY_SILU,
    POST_NORMS,
    QWEN3_EXPERTS,
    Mixers,
    NumExperts,
    decoder,
    layer,
    sizes,
)
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Fields, Fixed, Rule, Same, words
from zoo.hf.weights import Derived, Made, Read, Stored, Weights


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


@dataclass(frozen=True)
class HeadSizes(Rule):
    """The heads of delta nets, by default as many as attention's, and keys of 3/4 of the width."""

    def read(self, fields: Fields) -> dict[str, Any]:
        count = fields.values.get("num_attention_heads", 30)
        keys = fields.take("linear_num_key_heads", None) or count
        size = int(0.75 * fields.values.get("hidden_size", 3840) / keys)
        size = fields.take("linear_key_head_dim", None) or size
        return {
            "mixer.recurrence.num_heads": fields.take("linear_num_value_heads", None) or count,
            "mixer.recurrence.num_key_heads": keys,
            "mixer.recurrence.key_dim": size,
            "mixer.recurrence.value_dim": fields.take("linear_value_head_dim", None) or 2 * size,
        }

    def write(self, config: Any) -> dict[str, Any]:
        key_heads, times, key_dim, value_dim = _sizes(config)
        return {
            "linear_num_value_heads": key_heads * times,
            "linear_num_key_heads": key_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim,
        }


@dataclass(frozen=True)
class PositionsOrNone(Rule):
    """Rotary positions, or none where `rope_theta` in `rope_parameters` is null."""

    rotary: Rotary

    def read(self, fields: Fields) -> dict[str, Any]:
        parameters = fields.values.get("rope_parameters")
        if not isinstance(parameters, dict) or "rope_theta" not in parameters:
            raise fields.refusal(
                f"rope_parameters={parameters!r} rotates in some versions of transformers and not "
                'in others: write {"rope_theta": null} for no rotary positions, or a number'
            )
        if parameters["rope_theta"] is not None:
            return self.rotary.read(fields)
        for name in ("rope_parameters", "rope_theta", "rope_scaling"):
            fields.take(name, None)
        length = fields.take("max_position_embeddings", self.rotary.max_seq_len)
        return {"max_seq_len": length, "positions.kind": "none"}

    def write(self, config: Any) -> dict[str, Any]:
        if config.positions.kind == "rotary":
            return self.rotary.write(config)
        parameters = {"rope_theta": None, "rope_type": "default"}
        return {"max_position_embeddings": config.max_seq_len, "rope_parameters": parameters}


MIXERS = Mixers({"linear_attention": "gated_deltanet", "full_attention": "attention"})
DELTA_NET = (
    MIXERS,
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
    blocks.attention.{wq,wg}               self_attn.q_proj.weight      gated:
    blocks.recurrence.conv_{q,k,v}.weight  linear_attn.conv1d.weight    qkv:
    blocks.recurrence.gates.log_rate       linear_attn.A_log
    blocks.recurrence.gates.bias           linear_attn.dt_bias
    blocks.recurrence.norm.scale           linear_attn.norm.weight
    blocks.recurrence.wo                   linear_attn.out_proj.weight
    """
)
BY_KEY_HEAD = layer(
    """
    blocks.recurrence.{wq,wk,wv,wz}  linear_attn.in_proj_qkvz.weight  qkvz:
    blocks.recurrence.{wb,wa}        linear_attn.in_proj_ba.weight    heads embed  ba:
    """
)
SIDE_BY_SIDE = layer(
    """
    blocks.recurrence.{wq,wk,wv}  linear_attn.in_proj_qkv.weight  qkv:
    blocks.recurrence.wz          linear_attn.in_proj_z.weight
    blocks.recurrence.wb          linear_attn.in_proj_b.weight  heads embed
    blocks.recurrence.wa          linear_attn.in_proj_a.weight  heads embed
    """
)
APART = layer(
    """
    blocks.recurrence.wq              linear_attn.q_proj.weight
    blocks.recurrence.wk              linear_attn.k_proj.weight
    blocks.recurrence.wv              linear_attn.v_proj.weight
    blocks.recurrence.wz              linear_attn.g_proj.weight
    blocks.recurrence.wb              linear_attn.b_proj.weight  heads embed
    blocks.recurrence.wa              linear_attn.a_proj.weight  heads embed
    blocks.recurrence.conv_q.weight   linear_attn.q_conv1d.weight
    blocks.recurrence.conv_k.weight   linear_attn.k_conv1d.weight
    blocks.recurrence.conv_v.weight   linear_attn.v_conv1d.weight
    blocks.recurrence.gates.log_rate  linear_attn.A_log
    blocks.recurrence.gates.bias      linear_attn.dt_bias
    blocks.recurrence.norm.scale      linear_attn.o_norm.weight
    blocks.recurrence.wo              linear_attn.o_proj.weight
    """
)
SHARED_EXPERT = layer(
    """
    blocks.shared_mlp.w_gate  mlp.shared_expert.gate_proj.weight
    blocks.shared_mlp.w_up    mlp.shared_expert.up_proj.weight
    blocks.shared_mlp.w_down  mlp.shared_expert.down_proj.weight
    blocks.shared_gate        mlp.shared_expert_gate.weight
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


_OF_QWEN3_5 = (
    ONLY_SILU,
    Rotary(max_seq_len=32768, fraction=0.25),
    *DELTA_NET,
    Fixed("attention_bias", False),
)
QWEN3_NEXT = decoder(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rules=(
        *sizes(kv_heads=2, head_dim=256, hidden="moe_intermediate_size"),
        *_OF_QWEN3_5,
        *_moe(512, 10),
        Same("norm_topk_prob", "experts.normalize", True),
        Fixed("decoder_sparse_step", 1),
        Fixed("mlp_only_layers", []),
    ),
    always={**QWEN, "experts.shared_gate": True},
    tensors=DENSE | GATED | BY_KEY_HEAD | QWEN3_EXPERTS | SHARED_EXPERT,
    splits={"gated": _gated, "qkv": _qkv, "qkvz": _qkvz, "ba": _ba},
    ignored=frozenset({"intermediate_size"}),  # of layers without experts
    left_out={"mtp.": "heads of multi-token prediction"},
)
QWEN3_5 = decoder(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    rules=(*sizes(kv_heads=4, head_dim=256), *_OF_QWEN3_5),
    always=QWEN,
    tensors=DENSE | GATED | SIDE_BY_SIDE,
    prefixes=("model.", "", "model.language_model."),
    splits={"gated": _gated, "qkv": _qkv},
    within="qwen3_5",
    left_out={"mtp.": "heads of multi-token prediction", "model.visual.": "a vision tower"},
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    rules=(
        *sizes(kv_heads=2, head_dim=256, hidden="moe_intermediate_size"),
        *_OF_QWEN3_5,
        *_moe(256, 8),
    ),
    always={**QWEN, "experts.shared_gate": True, "experts.normalize": True},
    tensors={**QWEN3_5.tensors, **QWEN3_EXPERTS, **SHARED_EXPERT},
    ignored=frozenset({"intermediate_size"}),
    within="qwen3_5_moe",
)

# What version 5 of transformers writes in the place of the published names.
_RENAMED = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def _as_published(config: transformer.Config, weights: Weights) -> Weights:
    """The tensors that transformers writes, in the published names and with each part's channels.

    It writes the three convolutions of a layer as thirds of all channels, whoever has them.
    """
    made: dict[str, Made] = {}
    gone: list[str] = []
    for name, stored in weights.tensors.items():
        *start, part, end = name.split(".")
        if part in _RENAMED:
            read_whole = partial(_channels, (name,), (0, stored.shape[0]), 0)
            made[".".join([*start, _RENAMED[part], end])] = stored, read_whole
            gone.append(name)
        names = tuple(name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv")
        if part != "q_conv1d" or not {*names} <= weights.tensors.keys():
            continue
        starts = np.cumsum([0, *(weights.tensors[x].shape[0] for x in names)]).tolist()
        rows = _qkv(config)
        if starts[-1] != rows[-1][-1] + 1:
            continue  # of another size, and refused as such
        for each, own in zip(names, rows, strict=True):
            shape = (len(own), *stored.shape[1:])
            read_own = partial(_channels, names, tuple(starts), int(own[0]))
            made[each] = Stored(stored.file, shape, stored.dtype), read_own
    return Derived(weights, made, gone)


def _channels(
    names: tuple[str, ...], starts: tuple[int, ...], first: int, at: tuple[slice, ...], read: Read
) -> np.ndarray:
    """Rows, counted from `first`, of tensors whose rows follow each other."""
    start, stop = at[0].start + first, at[0].stop + first
    return np.concatenate(
        [
            read(name, (slice(max(start - low, 0), min(stop, high) - low), *at[1:]))
            for name, low, high in zip(names, starts, starts[1:], strict=False)
            if start < high and stop > low
        ]
    )


OLMO_HYBRID = decoder(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    rules=(
        *sizes(),
        ONLY_SILU,
        PositionsOrNone(Rotary(max_seq_len=65536)),
        MIXERS,
        HeadSizes(),
        Same("linear_conv_kernel_dim", "mixer.recurrence.taps", 4),
        Same("linear_allow_neg_eigval", "mixer.recurrence.negative_eigenvalues", True),
        Fixed("attention_bias", False),
    ),
    always={
        "attention.qk_norm": "across_heads",
        "residual.norm_placement": "post",
        "mixer.norm_placement": "pre",
        "mixer.recurrence.norm_eps": 1e-5,
    },
    tensors=DENSE | POST_NORMS | APART,
    # How a new model is drawn.
    ignored=words(
        "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min"
    ),
    as_published=_as_published,
)
