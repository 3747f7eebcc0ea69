"""The model types with latent attention: DeepSeek-V2, V3 and Kimi K2."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zoo import transformer
from zoo.hf.experts import DEEPSEEK_ROUTER, GROUPS, LOAD_BIAS, SHARED_EXPERTS, deepseek_experts
from zoo.hf.llamas import DENSE, QWEN3_EXPERTS, SILU, decoder, layer, sizes
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Fields, Fixed, Rule, Same, words


@dataclass(frozen=True)
class Latent(Rule):
    """The sizes of latent attention; a head has features that rotate, and others."""

    def read(self, fields: Fields) -> dict[str, Any]:
        rotary, plain = fields.take("qk_rope_head_dim", 64), fields.take("qk_nope_head_dim", 128)
        return {
            "attention.head_dim": rotary + plain,
            "attention.latent.rotary_dim": rotary,
            "attention.latent.kv_rank": fields.take("kv_lora_rank", 512),
            "attention.latent.q_rank": fields.take("q_lora_rank", 1536),
            "attention.latent.value_dim": fields.take("v_head_dim", 128),
        }

    def write(self, config: Any) -> dict[str, Any]:
        latent = config.attention.latent
        return {
            "qk_rope_head_dim": latent.rotary_dim,
            "qk_nope_head_dim": config.head_size - latent.rotary_dim,
            "kv_lora_rank": latent.kv_rank,
            "q_lora_rank": latent.q_rank,
            "v_head_dim": config.value_size,
        }


@dataclass(frozen=True)
class ScaledRotary(Rotary):
    """Rotary positions whose YaRN has a factor of the attention logits: `mscale_all_dim`."""

    def read(self, fields: Fields) -> dict[str, Any]:
        given = {**(fields.values.get("rope_scaling") or {})}
        given |= fields.values.get("rope_parameters") or {}
        found, scale = super().read(fields), given.get("mscale_all_dim") or 0
        factor = found["positions.scaling"].factor
        if scale and factor > 1:
            size = sum(fields.values.get(name, size) for name, size in _SIZES)
            more = 0.1 * scale * math.log(factor) + 1
            found["attention.scale"] = size**-0.5 * more**2
        return found

    def write(self, config: Any) -> dict[str, Any]:
        values, scale = super().write(config), config.attention.scale
        if scale is None or not values["rope_scaling"]:
            return values
        more = math.sqrt(scale * config.head_size**0.5) - 1
        scale = round(more / (0.1 * math.log(config.positions.scaling.factor)), 9)
        for name in ("rope_scaling", "rope_parameters"):
            values[name] = {**values[name], "mscale": scale, "mscale_all_dim": scale}
        return values


@dataclass(frozen=True)
class Greedy(Rule):
    """V2's groups, which it has with `topk_method` group_limited_greedy alone."""

    def read(self, fields: Fields) -> dict[str, Any]:
        method = fields.take("topk_method", "greedy")
        groups, chosen = fields.take("n_group", None), fields.take("topk_group", None)
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.refusal(f"topk_method={method!r} is not supported")
        if method == "greedy":
            return {}
        return {"experts.num_groups": groups, "experts.groups_per_token": chosen}

    def write(self, config: Any) -> dict[str, Any]:
        experts = config.experts
        method = "greedy" if experts.num_groups == 1 else "group_limited_greedy"
        groups = {"n_group": experts.num_groups, "topk_group": experts.groups_per_token}
        return {"topk_method": method, **groups}


_SIZES = (("qk_rope_head_dim", 64), ("qk_nope_head_dim", 128))
LATENT = layer(
    """
    blocks.attention.wq                 self_attn.q_proj.weight              q:
    blocks.attention.wq_down            self_attn.q_a_proj.weight            latent embed
    blocks.attention.q_norm.scale       self_attn.q_a_layernorm.weight
    blocks.attention.wq_up              self_attn.q_b_proj.weight            heads.head_dim latent q:
    blocks.attention.{w_down,w_rotary}  self_attn.kv_a_proj_with_mqa.weight  latent embed          kv:
    blocks.attention.kv_norm.scale      self_attn.kv_a_layernorm.weight
    blocks.attention.{wk,wv}            self_attn.kv_b_proj.weight           heads.head_dim latent of:
    """  # noqa: E501
)


def _apart(rows: np.ndarray) -> np.ndarray:
    """Rows whose rotary pairs lie side by side, with the firsts of all pairs before the seconds."""
    return np.concatenate([rows[..., ::2], rows[..., 1::2]], axis=-1)


def _queries(config: transformer.Config) -> list[np.ndarray]:
    """The rows of each head, the ones that rotate first."""
    rows = np.arange(config.num_heads * config.head_size).reshape(config.num_heads, -1)
    plain, rotary = np.split(rows, [config.head_size - config.rotary_size], axis=1)
    return [np.concatenate([_apart(rotary), plain], axis=1).ravel()]


def _keys(config: transformer.Config) -> list[np.ndarray]:
    """The rows of the latent vector, and of the key that all heads share."""
    rank = config.attention.latent.kv_rank or 0
    return [np.arange(rank), _apart(np.arange(rank, rank + config.rotary_size))]


def _of_heads(config: transformer.Config) -> list[np.ndarray]:
    """The keys of each head, and its values."""
    size = config.head_size - config.rotary_size
    rows = np.arange(config.num_heads * (size + config.value_size)).reshape(config.num_heads, -1)
    return [x.ravel() for x in np.split(rows, [size], axis=1)]


def _rules(length: int) -> tuple[Rule, ...]:
    return (
        *sizes(hidden="moe_intermediate_size")[:-1],  # for the size of a head it has other fields
        SILU,
        ScaledRotary(max_seq_len=length),
        Latent(),
        Fixed("attention_bias", False),
    )


latent = partial(  # a family with DeepSeek's names
    decoder,
    tensors=DENSE | LATENT | SHARED_EXPERTS | QWEN3_EXPERTS | LOAD_BIAS,
    splits={"q": _queries, "kv": _keys, "of": _of_heads},
    # Fields that follow from others, or are for training or for heads that are left out.
    ignored=words(
        "aux_loss_alpha ep_size head_dim num_mtp_layers num_nextn_predict_layers pretraining_tp "
        "qk_head_dim seq_aux"
    ),
    left_out={"model.layers.{num_layers}.": "heads of multi-token prediction"},
)
DEEPSEEK_V3 = latent(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rules=(
        *_rules(4096),
        *deepseek_experts(256, 1, 3, 2.5),
        *GROUPS,
        Same("norm_topk_prob", "experts.normalize", True),
        Fixed("rope_interleave", True),
        Fixed("scoring_func", "sigmoid", written=False),
        Fixed("topk_method", "noaux_tc", written=False),
    ),
    always=DEEPSEEK_ROUTER,
)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
DEEPSEEK_V2 = latent(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    rules=(
        *_rules(2048),
        *deepseek_experts(64, 2, 0, 1.0),
        Greedy(),
        Fixed("norm_topk_prob", False),
        Fixed("mlp_bias", False),
        Fixed("scoring_func", "softmax", written=False),
    ),
    always={"experts.normalize": False, "experts.group_score": 1},
)
