"""The one form of all configurations of the same transformer, by which its type is found."""

import dataclasses
import functools
from typing import Any

from zoo import transformer
from zoo.common import configuration
from zoo.hf.rules import shortest
from zoo.transformer.part_configs import AttentionConfig
from zoo.transformer.rotary import PositionsConfig

LOAD_BIAS_RATE = 0.001  # of DeepSeek-V3; config.json has none


@functools.lru_cache(256)  # each of the families asks for that of the same model
def canonical(config: transformer.Config) -> transformer.Config:
    """The one form of all configurations of the same model, by which they are compared.

    Derived sizes are filled in, the pattern is the shortest, fields without effect are defaults.
    """
    pattern = config.all_layer_kinds
    if {*pattern} == {"recurrent"} and config.positions.kind != "learned":
        # Nothing of these has an effect.
        config = dataclasses.replace(
            config,
            num_heads=1,
            max_seq_len=type(config).max_seq_len,
            attention=AttentionConfig(),
            positions=PositionsConfig("none"),
        )
    changes: dict[str, Any] = {
        "attention.num_kv_heads": config.kv_heads,
        "attention.head_dim": config.head_size,
        "d_ff": None if config.mlp == "none" else config.hidden_size,
        "experts.dense_d_ff": config.dense_size,
        "attention.latent.value_dim": config.value_size,
    }
    for name in ("norm_placement", "recurrence.norm_eps"):  # the same as elsewhere in the layer
        ours, elsewhere = f"mixer.{name}", f"residual.{name.rpartition('.')[2]}"
        get = lambda path: functools.reduce(getattr, path.split("."), config)  # noqa: E731
        changes |= {ours: None} if get(ours) == get(elsewhere) else {}
    placed = tuple("none" if kind.endswith("nope") else "rotary" for kind in pattern)
    changes["positions.pattern"] = shortest(placed)
    if "recurrent" not in pattern:
        reaches = tuple(kind.removesuffix("_nope") for kind in pattern)
        changes["attention.window_pattern"] = shortest(reaches)
    # Which matrices have a bias, one by one.
    is_layer = config.residual.norm.startswith("layer") and config.residual.norm != "layer_plain"
    changes |= {
        "bias": False,
        "attention.qkv_bias": config.bias or config.attention.qkv_bias,
        "attention.out_bias": config.bias or config.attention.out_bias,
        "mlp_bias": (config.bias or config.mlp_bias) and config.mlp != "none",
        "residual.norm_bias": (config.bias or config.residual.norm_bias) and is_layer,
    }
    stretched = not config.positions.scaling.is_none
    if config.attention.scale == config.head_size**-0.5:
        changes["attention.scale"] = None
    if config.positions.local_theta == config.positions.theta and not stretched:
        changes["positions.local_theta"] = None
    has_windows = any(kind.startswith("local") for kind in pattern)
    without_effect = {
        "attention.window": not has_windows,
        "attention.window_pattern": not has_windows,
        "positions.local_theta": "local" not in pattern or config.positions.kind != "rotary",
        "positions.theta": config.positions.kind != "rotary",
        "positions.scaling": config.positions.kind != "rotary" or not stretched,
        "experts.per_token": config.experts.num_experts is None,
        "experts.normalize": config.experts.num_experts is None,
        "experts.groups_per_token": config.experts.num_groups == 1,
        "experts.group_score": config.experts.num_groups == 1,
        "experts.dense_d_ff": "dense_mlp" not in config.parts,
        "attention.latent.value_dim": config.attention.latent.kv_rank is None,
        "attention.latent.rotary_dim": config.attention.latent.kv_rank is None,
        "encoder.transform_bias": config.encoder.head != "transformed",
    }
    if config.experts.bias_rate is not None:  # a matter of training
        changes["experts.bias_rate"] = LOAD_BIAS_RATE
    defaults = type(config)(vocab_size=1)
    for name, has_none in without_effect.items():
        if has_none:
            changes[name] = functools.reduce(getattr, name.split("."), defaults)
    return configuration.replaced(config, changes)
