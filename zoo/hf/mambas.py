"""The model types with Mamba-2, alone or with attention (Granite 4 H, Bamba), and xLSTM 7B."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.layouts import consecutive, table
from zoo.hf.llamas import DENSE, ONLY_SILU, Mixers, common, decoder, layer, sizes
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Computed, Fields, Fixed, Rule, same, shortest, words
from zoo.nn.recurrences import mlstm

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
class Positions(Rule):
    """Rotary positions, or none where `position_embedding_type` is null."""

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
    """Experts beside a shared MLP, or that MLP alone."""

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


FACTORS = (  # Granite's
    *same(
        """embedding_multiplier=residual.embedding_multiplier:1.0
        residual_multiplier=residual.multiplier:1.0 attention_multiplier=attention.scale:1.0"""
    ),
    # A divisor there, and a factor here.
    Computed(
        "logits_scaling",
        1.0,
        lambda divisor, _: {"logit_multiplier": 1 / divisor},
        lambda config: 1 / config.logit_multiplier,
    ),
)
MAMBA_LINES = """
    blocks.recurrence.{wz,wx,wb,wc,wdt}      {m}.in_proj.weight   zxbcdt:
    blocks.recurrence.conv_{x,b,c}.weight    {m}.conv1d.*         xbc:
    blocks.recurrence.gates.log_rate         {m}.A_log
    blocks.recurrence.gates.bias             {m}.dt_bias
    blocks.recurrence.gates.skip             {m}.D
    blocks.recurrence.norm_scale             {m}.norm.weight
    blocks.recurrence.wo                     {m}.out_proj.weight
"""
MAMBA = layer(MAMBA_LINES.replace("{m}", "mamba"))
GRANITE_DENSE = layer(
    """
    blocks.mlp.{w_gate,w_up}  shared_mlp.input_linear.weight   /
    blocks.mlp.w_down         shared_mlp.output_linear.weight
    """
)
GRANITE_EXPERTS = layer(
    """
    blocks.mlp.router                block_sparse_moe.router.layer.weight
    blocks.mlp.{w_gate,w_up}         block_sparse_moe.input_linear.weight   experts part.mlp embed /
    blocks.mlp.w_down                block_sparse_moe.output_linear.weight  experts embed mlp
    blocks.shared_mlp.{w_gate,w_up}  shared_mlp.input_linear.weight         /
    blocks.shared_mlp.w_down         shared_mlp.output_linear.weight
    """
)
BAMBA_NAMES = layer(
    """
    blocks.mlp_norm.scale  pre_ff_layernorm.weight
    blocks.mlp.w_gate      feed_forward.gate_proj.weight
    blocks.mlp.w_up        feed_forward.up_proj.weight
    blocks.mlp.w_down      feed_forward.down_proj.weight
    final_norm.scale       {prefix}final_layernorm.weight
    """
)
MAMBA2_NAMES = layer(
    """
    embedding.weight             {prefix}embeddings.weight
    final_norm.scale             {prefix}norm_f.weight
    head.weight                  lm_head.weight
    blocks.attention_norm.scale  norm.weight
    """
    + MAMBA_LINES.replace("{m}", "mixer")
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
    *same(
        """mamba_n_groups=mixer.recurrence.num_key_heads:1
        mamba_d_state=mixer.recurrence.key_dim:256 mamba_d_conv=mixer.recurrence.taps:4"""
    ),
    Fixed("mamba_conv_bias", True),
    Fixed("mamba_proj_bias", False),
)
SPLITS = {"zxbcdt": _zxbcdt, "xbc": _xbc}
GRANITE = decoder(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    rules=(
        *sizes(hidden=None),
        ONLY_SILU,
        Positions(Rotary()),
        Mixers({"linear_attention": "mamba2", "full_attention": "attention", **_OLD}),
        *OF_MAMBA,
        GraniteExperts(),
        *FACTORS,
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
        *common(Rotary(max_seq_len=262_144, fraction=0.5), ONLY_SILU, eps=1e-5, kv_heads=8),
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
        *same(
            """vocab_size=vocab_size hidden_size=d_model num_hidden_layers=num_layers
            layer_norm_epsilon=residual.norm_eps:1e-5
            tie_word_embeddings=tie_embeddings:False
            n_groups=mixer.recurrence.num_key_heads:8
            state_size=mixer.recurrence.key_dim:128 conv_kernel=mixer.recurrence.taps:4"""
        ),
        Mamba("", "head_dim", "num_heads"),
        Fixed("hidden_act", "silu"),
        Fixed("use_bias", False),
        Fixed("use_conv_bias", True),
    ),
    always={"num_heads": 1, "mlp": "none", "positions.kind": "none", "mixer.pattern": ("mamba2",)},
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
