"""The model types of decoders whose layers are recurrences, most beside a few of attention."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.family import consecutive, table
from zoo.hf.llamas import DENSE, QWEN3_EXPERTS, SILU, NumExperts, decoder, layer, sizes
from zoo.hf.rules import Fields, Fixed, Rotary, Rule, Same, shortest, words
from zoo.nn.recurrences import mlstm


@dataclass(frozen=True)
class Mixers(Rule):
    """`layer_types`: which layers have a recurrence and which attention, the first two `kinds`.

    In older files the last of each `full_attention_interval` layers has attention.
    """

    kinds: Mapping[str, str]
    interval: int = 4

    def read(self, fields: Fields) -> dict[str, Any]:
        count = fields.values.get("num_hidden_layers", 0)
        interval = fields.take("full_attention_interval", self.interval)
        types = fields.take("layer_types", None)
        if types is None:
            recurrent, attention, *_ = self.kinds
            types = [recurrent if (i + 1) % interval else attention for i in range(count)]
        if set(types) - self.kinds.keys() or len(types) != count:
            known = ", ".join(self.kinds)
            raise fields.refusal(f"layer_types={types!r}: must be one of {known} for each layer")
        return {"mixer.pattern": shortest(tuple(self.kinds[kind] for kind in types))}

    def write(self, config: Any) -> dict[str, Any]:
        recurrent, attention, *_ = self.kinds
        types = {"recurrence": recurrent, "attention": attention}
        return {"layer_types": [types[mixer] for mixer in config.mixers]}


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


_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


@dataclass(frozen=True)
class Mamba(Rule):
    """The sizes of Mamba-2 layers: heads times their size are `expand` times the width."""

    prefix: str = "mamba_"
    head_dim: str = "d_head"
    heads: str = "n_heads"
    expand: str = "expand"

    def read(self, fields: Fields) -> dict[str, Any]:
        heads = fields.take(self.prefix + self.heads, 128)
        width = fields.take(self.prefix + self.expand, 2) * fields.values.get("hidden_size", 0)
        size = fields.take(self.prefix + self.head_dim, "auto")
        size = width // heads if size == "auto" else size
        if heads * size != width:
            raise fields.refusal(
                f"{self.prefix}{self.heads}={heads} times {self.prefix}{self.head_dim}={size} is "
                f"not {self.prefix}{self.expand} times hidden_size, {width}"
            )
        limits = fields.take("time_step_limit", None)
        if limits is not None and [*limits] not in _NO_LIMITS:
            raise fields.refusal(f"time_step_limit={limits!r} is not supported, only no limit")
        return {"mixer.recurrence.num_heads": heads, "mixer.recurrence.value_dim": size}

    def write(self, config: Any) -> dict[str, Any]:
        settings = config.mixer.recurrence
        size = settings.sizes(config.d_model)[1]
        values = {self.heads: settings.num_heads, self.head_dim: size}
        values[self.expand] = settings.num_heads * size // config.d_model
        return {self.prefix + name: x for name, x in values.items()}


@dataclass(frozen=True)
class Inverse(Rule):
    """A divisor there, and a factor here."""

    theirs: str
    ours: str

    def read(self, fields: Fields) -> dict[str, Any]:
        return {self.ours: 1 / fields.take(self.theirs, 1.0)}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: 1 / getattr(config, self.ours)}


@dataclass(frozen=True)
class Positions(Rule):
    """Rotary positions, or with `position_embedding_type` null none."""

    rotary: Rotary

    def read(self, fields: Fields) -> dict[str, Any]:
        kind = fields.take("position_embedding_type", None)
        if kind not in (None, "rope", "nope"):
            raise fields.refusal(f"position_embedding_type={kind!r} is not supported, only 'rope'")
        found = self.rotary.read(fields)
        if kind == "rope":
            return found
        return {"max_seq_len": found["max_seq_len"], "positions.kind": "none"}

    def write(self, config: Any) -> dict[str, Any]:
        kind = "rope" if config.positions.kind == "rotary" else None
        return {**self.rotary.write(config), "position_embedding_type": kind}


@dataclass(frozen=True)
class GraniteExperts(Rule):
    """Experts beside a shared MLP, or with none of them that MLP alone."""

    def read(self, fields: Fields) -> dict[str, Any]:
        count = fields.take("num_local_experts", 8)
        per_token = fields.take("num_experts_per_tok", 2)
        width, shared = fields.take("intermediate_size"), fields.take("shared_intermediate_size")
        if not count:
            return {"d_ff": shared}
        if shared % width:
            raise fields.refusal(
                f"shared_intermediate_size={shared} is no multiple of intermediate_size={width}"
            )
        return {
            "d_ff": width,
            "experts.num_experts": count,
            "experts.per_token": per_token,
            "experts.num_shared": shared // width,
        }

    def write(self, config: Any) -> dict[str, Any]:
        experts, width = config.experts, config.hidden_size
        return {
            "num_local_experts": experts.num_experts or 0,
            "num_experts_per_tok": experts.per_token if experts.num_experts else 0,
            "intermediate_size": width,
            "shared_intermediate_size": width * max(experts.num_shared, 1),
        }


@dataclass(frozen=True)
class Indices(Rule):
    """The layers that have attention, by their numbers."""

    def read(self, fields: Fields) -> dict[str, Any]:
        chosen = fields.take("attn_layer_indices", None) or ()
        count = fields.values.get("num_hidden_layers", 0)
        pattern = ("attention" if i in chosen else "mamba2" for i in range(count))
        return {"mixer.pattern": shortest(tuple(pattern))}

    def write(self, config: Any) -> dict[str, Any]:
        mixers = enumerate(config.mixers)  # fields of a block
        return {"attn_layer_indices": [i for i, mixer in mixers if mixer == "attention"]}


MAMBA_LINES = """
    blocks.recurrence.wz              {m}.in_proj.weight   heads.head_dim embed    zxbcdt:0
    blocks.recurrence.wx              {m}.in_proj.weight   heads.head_dim embed    zxbcdt:1
    blocks.recurrence.wb              {m}.in_proj.weight   groups.head_dim embed   zxbcdt:2
    blocks.recurrence.wc              {m}.in_proj.weight   groups.head_dim embed   zxbcdt:3
    blocks.recurrence.wdt             {m}.in_proj.weight   heads embed             zxbcdt:4
    blocks.recurrence.conv_x.weight   {m}.conv1d.weight    heads.head_dim 1 taps   xbc:0
    blocks.recurrence.conv_b.weight   {m}.conv1d.weight    groups.head_dim 1 taps  xbc:1
    blocks.recurrence.conv_c.weight   {m}.conv1d.weight    groups.head_dim 1 taps  xbc:2
    blocks.recurrence.conv_x.bias     {m}.conv1d.bias      heads.head_dim          xbc:0
    blocks.recurrence.conv_b.bias     {m}.conv1d.bias      groups.head_dim         xbc:1
    blocks.recurrence.conv_c.bias     {m}.conv1d.bias      groups.head_dim         xbc:2
    blocks.recurrence.gates.log_rate  {m}.A_log
    blocks.recurrence.gates.bias      {m}.dt_bias
    blocks.recurrence.gates.skip      {m}.D
    blocks.recurrence.norm_scale      {m}.norm.weight      heads.head_dim
    blocks.recurrence.wo              {m}.out_proj.weight  embed heads.head_dim
"""
MAMBA = layer(MAMBA_LINES.replace("{m}", "mamba"))
GRANITE_DENSE = layer(
    """
    blocks.mlp.w_gate  shared_mlp.input_linear.weight   part.mlp embed  0/2
    blocks.mlp.w_up    shared_mlp.input_linear.weight   part.mlp embed  1/2
    blocks.mlp.w_down  shared_mlp.output_linear.weight  embed mlp
    """
)
GRANITE_EXPERTS = layer(
    """
    blocks.mlp.router         block_sparse_moe.router.layer.weight   routes embed
    blocks.mlp.w_gate         block_sparse_moe.input_linear.weight   experts part.mlp embed  0/2
    blocks.mlp.w_up           block_sparse_moe.input_linear.weight   experts part.mlp embed  1/2
    blocks.mlp.w_down         block_sparse_moe.output_linear.weight  experts embed mlp
    blocks.shared_mlp.w_gate  shared_mlp.input_linear.weight         part.mlp embed          0/2
    blocks.shared_mlp.w_up    shared_mlp.input_linear.weight         part.mlp embed          1/2
    blocks.shared_mlp.w_down  shared_mlp.output_linear.weight        embed mlp
    """
)
BAMBA_NAMES = layer(
    """
    blocks.mlp_norm.scale  pre_ff_layernorm.weight
    blocks.mlp.w_gate      feed_forward.gate_proj.weight  mlp embed
    blocks.mlp.w_up        feed_forward.up_proj.weight    mlp embed
    blocks.mlp.w_down      feed_forward.down_proj.weight  embed mlp
    final_norm.scale       {prefix}final_layernorm.weight
    """
)
MAMBA2_NAMES = table(
    """
    embedding.weight             {prefix}embeddings.weight
    final_norm.scale             {prefix}norm_f.weight
    head.weight                  lm_head.weight             vocab embed
    blocks.attention_norm.scale  norm.weight
    """
    + MAMBA_LINES.replace("{m}", "mixer"),
    layer="{prefix}layers.{layer}.",
)


def _mamba(config: transformer.Config) -> tuple[int, int, int]:
    """Rows of a Mamba-2 layer's x, of its B, and its heads."""
    settings = config.mixer.recurrence
    state, size = settings.sizes(config.d_model)
    return settings.num_heads * size, (settings.num_key_heads or 1) * state, settings.num_heads


def _zxbcdt(config: transformer.Config) -> list[np.ndarray]:
    inner, state, heads = _mamba(config)
    return consecutive(inner, inner, state, state, heads)


def _xbc(config: transformer.Config) -> list[np.ndarray]:
    inner, state, _ = _mamba(config)
    return consecutive(inner, state, state)


_OLD = {"mamba": "mamba2", "attention": "attention"}  # names of kinds in older files
OF_MAMBA = (
    Mamba(),
    Same("mamba_n_groups", "mixer.recurrence.num_key_heads", 1),
    Same("mamba_d_state", "mixer.recurrence.key_dim", 256),
    Same("mamba_d_conv", "mixer.recurrence.taps", 4),
    Fixed("mamba_conv_bias", True),
    Fixed("mamba_proj_bias", False),
)
SPLITS = {"zxbcdt": _zxbcdt, "xbc": _xbc}
GRANITE = decoder(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    rules=(
        *sizes(hidden=None),
        SILU,
        Positions(Rotary()),
        Mixers({"linear_attention": "mamba2", "full_attention": "attention", **_OLD}),
        *OF_MAMBA,
        GraniteExperts(),
        Same("embedding_multiplier", "residual.embedding_multiplier", 1.0),
        Same("residual_multiplier", "residual.multiplier", 1.0),
        Same("attention_multiplier", "attention.scale", 1.0),
        Inverse("logits_scaling", "logit_multiplier"),
        Fixed("attention_bias", False),
    ),
    tensors=DENSE | MAMBA | GRANITE_EXPERTS,
    without_experts=GRANITE_DENSE,
    splits=SPLITS,
    ignored=frozenset({"mamba_chunk_size"}),
)
BAMBA = decoder(
    model_type="bamba",
    architecture="BambaForCausalLM",
    rules=(
        *sizes(eps=1e-5, kv_heads=8),
        SILU,
        Rotary(max_seq_len=262_144, fraction=0.5),
        Indices(),
        *OF_MAMBA,
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
    ),
    tensors=DENSE | MAMBA | BAMBA_NAMES,
    splits=SPLITS,
    ignored=frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
)
MAMBA2 = decoder(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "num_layers"),
        Same("layer_norm_epsilon", "residual.norm_eps", 1e-5),
        Same("tie_word_embeddings", "tie_embeddings", False),
        Mamba("", "head_dim", "num_heads"),
        Same("n_groups", "mixer.recurrence.num_key_heads", 8),
        Same("state_size", "mixer.recurrence.key_dim", 128),
        Same("conv_kernel", "mixer.recurrence.taps", 4),
        Fixed("hidden_act", "silu"),
        Fixed("use_bias", False),
        Fixed("use_conv_bias", True),
    ),
    always={
        "num_heads": 1,
        "mlp": "none",
        "positions.kind": "none",
        "mixer.pattern": ("mamba2",),
    },
    tensors=MAMBA2_NAMES,
    prefixes=("backbone.", "model.", ""),
    marker="{prefix}embeddings.weight",
    splits=SPLITS,
    # How a new model is drawn, and the precision of its sums.
    ignored=words(
        "chunk_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max "
        "time_step_min time_step_rank"
    ),
)


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
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "num_layers"),
        Same("num_heads", "mixer.recurrence.num_heads"),
        Same("norm_eps", "residual.norm_eps", 1e-6),
        Same("tie_word_embeddings", "tie_embeddings", False),
        Same("output_logit_soft_cap", "logit_soft_cap", 30.0),
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
        head.weight                     lm_head.weight                  vocab embed
        blocks.attention_norm.scale     norm_mlstm.weight
        blocks.mlp_norm.scale           norm_ffn.weight
        blocks.mlp.w_gate               ffn.proj_up_gate.weight         mlp embed
        blocks.mlp.w_up                 ffn.proj_up.weight              mlp embed
        blocks.mlp.w_down               ffn.proj_down.weight            embed mlp
        blocks.recurrence.wq            mlstm_layer.q.weight            heads.head_dim embed
        blocks.recurrence.wk            mlstm_layer.k.weight            heads.head_dim embed
        blocks.recurrence.wv            mlstm_layer.v.weight            heads.head_dim embed
        blocks.recurrence.wz            mlstm_layer.ogate_preact.weight heads.head_dim embed
        blocks.recurrence.wf            mlstm_layer.fgate_preact.weight heads embed
        blocks.recurrence.wi            mlstm_layer.igate_preact.weight heads embed
        blocks.recurrence.gates.forget  mlstm_layer.fgate_preact.bias
        blocks.recurrence.gates.input   mlstm_layer.igate_preact.bias
        blocks.recurrence.norm_scale    mlstm_layer.multihead_norm.weight heads.head_dim
        blocks.recurrence.wo            mlstm_layer.out_proj.weight     embed heads.head_dim
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
# Hybrids that the zoo's layers are not like.
REFUSED = {
    "falcon_h1": "a layer has attention and Mamba-2 side by side",
    "lfm2": "layers mix positions by short gated convolutions",
    "nemotron_h": "a layer is a mixer or an MLP alone",
    "olmo_hybrid": "layers of attention have norms behind their parts, and others before them",
}
HYBRIDS = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, GRANITE, BAMBA, MAMBA2, XLSTM)
