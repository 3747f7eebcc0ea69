"""One canonical form for configurations of the same model, so that they can be compared."""

import dataclasses
from typing import Any

from zoo import bert, transformer


def of_transformer(config: transformer.Config) -> transformer.Config:
    """Derived sizes filled in, the shortest pattern, and defaults for fields without effect."""
    pattern = config.all_layer_kinds
    changes: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "d_ff": config.hidden_size,
        "window_pattern": shortest(pattern),
    }
    stretched = config.rope_scaling.factor != 1
    if config.attention_scale == config.head_size**-0.5:
        changes["attention_scale"] = None
    if config.local_rope_theta == config.rope_theta and not stretched:
        changes["local_rope_theta"] = None
    without_effect = {
        "window": "local" not in pattern,
        "window_pattern": "local" not in pattern,
        "local_rope_theta": "local" not in pattern or config.positions != "rotary",
        "rope_theta": config.positions != "rotary",
        "rope_scaling": config.positions != "rotary" or not stretched,
        "qk_norm_per_head": not config.qk_norm,
        "qkv_bias": config.bias,
        "experts_per_token": config.num_experts is None,
        "normalize_experts": config.num_experts is None,
    }
    for field in dataclasses.fields(config):
        if without_effect.get(field.name):
            changes[field.name] = field.default
    return dataclasses.replace(config, **changes)


def of_bert(config: bert.Config) -> bert.Config:
    """Derived sizes filled in."""
    return dataclasses.replace(config, d_ff=config.parts.hidden_size)


def shortest(pattern: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest pattern that gives this one when it is repeated and truncated."""
    lengths = range(1, len(pattern) + 1)
    period = next(n for n in lengths if all(x == pattern[i % n] for i, x in enumerate(pattern)))
    return pattern[:period]
