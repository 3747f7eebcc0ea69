"""One canonical form for configurations of the same model, so that they can be compared."""

import dataclasses
import functools
from typing import Any

from zoo import bert, transformer
from zoo.base import configuration


def of_transformer(config: transformer.Config) -> transformer.Config:
    """Derived sizes filled in, the shortest pattern, and defaults for fields without effect."""
    pattern = config.all_layer_kinds
    changes: dict[str, Any] = {
        "attention.num_kv_heads": config.kv_heads,
        "attention.head_dim": config.head_size,
        "d_ff": config.hidden_size,
        "attention.window_pattern": shortest(pattern),
    }
    stretched = config.positions.scaling.factor != 1
    if config.attention.scale == config.head_size**-0.5:
        changes["attention.scale"] = None
    if config.positions.local_theta == config.positions.theta and not stretched:
        changes["positions.local_theta"] = None
    without_effect = {
        "attention.window": "local" not in pattern,
        "attention.window_pattern": "local" not in pattern,
        "positions.local_theta": "local" not in pattern or config.positions.kind != "rotary",
        "positions.theta": config.positions.kind != "rotary",
        "positions.scaling": config.positions.kind != "rotary" or not stretched,
        "attention.qkv_bias": config.bias,
        "experts.per_token": config.experts.num_experts is None,
        "experts.normalize": config.experts.num_experts is None,
    }
    defaults = type(config)(vocab_size=1)
    for name, has_none in without_effect.items():
        if has_none:
            changes[name] = functools.reduce(getattr, name.split("."), defaults)
    return configuration.replaced(config, changes)


def of_bert(config: bert.Config) -> bert.Config:
    """Derived sizes filled in."""
    return dataclasses.replace(config, d_ff=config.parts.hidden_size)


def shortest(pattern: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest pattern that gives this one when it is repeated and truncated."""
    lengths = range(1, len(pattern) + 1)
    period = next(n for n in lengths if all(x == pattern[i % n] for i, x in enumerate(pattern)))
    return pattern[:period]
