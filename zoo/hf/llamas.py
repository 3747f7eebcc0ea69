"""Shared by the model types that have Llama's names: fields, and the places of tensors."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zoo import transformer
from zoo.common import configuration
from zoo.hf.family import Family, canonical
from zoo.hf.layouts import consecutive, table
from zoo.hf.rules import Choice, Fields, Rule, same, shortest

SILU = Choice("hidden_act", "mlp", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}, "silu")
# For hybrids, whose convolutions have the same activation: SiLU here.
ONLY_SILU = Choice("hidden_act", "mlp", {"silu": "swiglu"}, "silu")


@dataclass(frozen=True)
class Derived(Rule):
    """A size that has to be the residual stream's divided by a number."""

    theirs: str = "head_dim"
    over: str = "num_attention_heads"

    def read(self, fields: Fields) -> dict[str, Any]:
        size = fields.values.get("hidden_size", 0) // (fields.values.get(self.over) or 1)
        if (given := fields.take(self.theirs, None)) not in (None, size):
            raise fields.refusal(f"{self.theirs}={given!r} is not supported, only {size}")
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        return {}


def sizes(
    *,
    tied: bool = False,
    eps: float | None = 1e-6,
    eps_name: str = "rms_norm_eps",
    kv_heads: int | None = None,
    head_dim: int | str | None = None,
    hidden: str | None = "intermediate_size",
    vocab_size: str = "",
    num_heads: str = "",
) -> tuple[Rule, ...]:
    """The fields that all these families have, given the defaults that differ.

    With `head_dim="derived"` a head has its share of the width. `vocab_size` and `num_heads` have
    no default, but for those with one such as ":8".
    """
    text = f"{hidden}=d_ff " * bool(hidden)
    text += f"{eps_name}=residual.norm_eps:{eps} " * bool(eps)
    text += f"""vocab_size=vocab_size{vocab_size} hidden_size=d_model num_hidden_layers=num_layers
        num_attention_heads=num_heads{num_heads} tie_word_embeddings=tie_embeddings:{tied}
        num_key_value_heads=attention.num_kv_heads:{kv_heads}"""
    of_head = same(f"head_dim=attention.head_dim:{head_dim}") if head_dim != "derived" else ()
    return (*same(text), *(of_head or (Derived(),)))


def common(rotary: Rule, activation: Rule = SILU, **of_sizes: Any) -> tuple[Rule, ...]:
    """The sizes, the activation and the rotary positions."""
    return (*sizes(**of_sizes), activation, rotary)


layer = partial(table, layer="{prefix}layers.{layer}.")
DENSE = layer(
    """
    embedding.weight               {prefix}embed_tokens.weight
    final_norm.scale               {prefix}norm.*
    head.weight                    {root}lm_head.*
    blocks.attention_norm.scale    input_layernorm.*
    blocks.attention.wq            self_attn.q_proj.*
    blocks.attention.wk            self_attn.k_proj.*
    blocks.attention.wv            self_attn.v_proj.*
    blocks.attention.wo            self_attn.o_proj.*
    blocks.attention.q_norm.scale  self_attn.q_norm.weight
    blocks.attention.k_norm.scale  self_attn.k_norm.weight
    blocks.mlp_norm.scale          post_attention_layernorm.*
    blocks.mlp.w_gate              mlp.gate_proj.weight
    blocks.mlp.w_up                mlp.up_proj.*
    blocks.mlp.w_down              mlp.down_proj.*
    """
)
GATE_UP = layer("blocks.mlp.{w_gate,w_up}  mlp.gate_up_proj.weight  /")
POST_NORMS = layer(
    """
    blocks.attention_out_norm.scale  post_attention_layernorm.weight
    blocks.mlp_out_norm.scale        post_feedforward_layernorm.weight
    """
)
BOTH_NORMS = POST_NORMS | layer("blocks.mlp_norm.scale  pre_feedforward_layernorm.weight")
MIXTRAL_EXPERTS = layer(
    """
    blocks.mlp.router  block_sparse_moe.gate.weight
    blocks.mlp.w_gate  block_sparse_moe.experts.{experts}.w1.weight
    blocks.mlp.w_up    block_sparse_moe.experts.{experts}.w3.weight
    blocks.mlp.w_down  block_sparse_moe.experts.{experts}.w2.weight
    """
)
QWEN3_EXPERTS = layer(
    """
    blocks.mlp.router  mlp.gate.weight
    blocks.mlp.w_gate  mlp.experts.{experts}.gate_proj.weight
    blocks.mlp.w_up    mlp.experts.{experts}.up_proj.weight
    blocks.mlp.w_down  mlp.experts.{experts}.down_proj.weight
    """
)


def side_by_side(config: transformer.Config) -> list[np.ndarray]:
    """Rows of all queries, then all keys, then all values."""
    keys = config.kv_heads * config.head_size
    return consecutive(config.num_heads * config.head_size, keys, keys)


def _paired(config: transformer.Config, heads: int) -> list[np.ndarray]:
    """Rows of heads whose rotary pairs lie side by side there, and half a head apart here."""
    rows, size = np.arange(heads * config.head_size).reshape(heads, -1), config.rotary_size
    pairs = rows[:, :size].reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, -1)
    return [np.concatenate([pairs, rows[:, size:]], axis=1).ravel()]


# Interleaved rotary positions: the checkpoint's rows in the order of the zoo's.
INTERLEAVED = layer(
    """
    blocks.attention.wq  self_attn.q_proj.*  pairs_q:
    blocks.attention.wk  self_attn.k_proj.*  pairs_k:
    """
)
PAIRS = {
    "pairs_q": lambda config: _paired(config, config.num_heads),
    "pairs_k": lambda config: _paired(config, config.kv_heads),
}

decoder = partial(  # a family with Llama's names
    Family,
    model=transformer.Transformer,
    config=transformer.Config,
    canonical=canonical,
    tensors=DENSE,
    prefixes=("model.", ""),
    marker="{prefix}embed_tokens.weight",
    buffers=("rotary_emb.inv_freq",),
)


@dataclass(frozen=True)
class NumExperts(Rule):
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
        if not isinstance(interval, int) or interval < 1:
            raise fields.refusal(f"full_attention_interval={interval!r}: must be a positive number")
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
