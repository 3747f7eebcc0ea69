"""Rules for fields that do not map one to one, and the canonical form of a configuration."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo import transformer
from zoo.common import configuration
from zoo.hf.family import Fields, Rule
from zoo.transformer.config import RopeScaling

_LENGTH = "original_max_position_embeddings"
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
_FACTORS = ("attention_factor", "factor", "partial_rotary_factor")  # of no effect if they are 1
_KINDS = {"sliding_attention": "local", "full_attention": "global"}
_TYPES = {ours: theirs for theirs, ours in _KINDS.items()}


def _take_scaling(fields: Fields, given: dict[str, Any] | None, max_seq_len: int) -> RopeScaling:
    """The zoo's `RopeScaling` from a dictionary of rotary parameters."""
    given = {name: x for name, x in (given or {}).items() if x is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    given.pop("rope_theta", None)
    if kind not in _SCALINGS:
        raise fields.refusal(
            f"rotary positions of type {kind!r} are not supported, only default, linear and llama3"
        )
    if kind == "llama3":
        given.setdefault(_LENGTH, max_seq_len)
    try:
        found: dict[str, Any] = {name: float(given.pop(name)) for name in _SCALINGS[kind]}
    except KeyError as error:
        raise fields.refusal(f"rotary positions of type {kind!r} need {error}") from None
    if any(name not in _FACTORS or x != 1 for name, x in given.items()):
        raise fields.refusal(f"unknown rotary parameters, which may change the maths: {given}")
    length = found.pop(_LENGTH, None)
    if length is not None:
        found["original_max_seq_len"] = int(length) if length.is_integer() else length
    return RopeScaling(**found)


def _take_theta(fields: Fields, name: str, default: float, *given: Mapping[str, Any]) -> Any:
    """The base of the wavelengths, of the field `name` and of rotary parameters, which agree."""
    theta = fields.take(name, default)
    found = [theta] if name in fields.values else []
    found += [parameters.get("rope_theta", theta) for parameters in given]
    return _agreed(fields, f"{name} and rope_theta of the rotary parameters", found)


def _agreed(fields: Fields, names: str, values: Sequence[Any]) -> Any:
    """The one value; versions of transformers differ in which of several they read."""
    if any(value != values[0] for value in values):
        listed = " and ".join(dict.fromkeys(map(repr, values)))
        raise fields.refusal(f"{names} contradict each other, {listed}: remove the wrong one")
    return values[0]


def _write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.factor == 1:
        return None
    if scaling.original_max_seq_len is None:
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        _LENGTH: scaling.original_max_seq_len,
    }


@dataclass(frozen=True)
class Rotary(Rule):
    """`max_position_embeddings` and the rotary wavelengths, in the old and the new format.

    `local` is the base of layers with a window, if they have their own, as in Gemma 3. Both formats
    are written: version 5 of transformers keeps to the new one, and those before know only the old.
    """

    theta: float = 10_000.0
    local: float | None = None
    max_seq_len: int = 2048

    def read(self, fields: Fields) -> dict[str, Any]:
        length = fields.take("max_position_embeddings", self.max_seq_len)
        old, new = (fields.take(name, None) or {} for name in ("rope_scaling", "rope_parameters"))
        configuration.check_value("rope_scaling", old, dict)
        configuration.check_value("rope_parameters", new, dict)
        found = {"max_seq_len": length}
        if self.local is not None:
            local = new.get("sliding_attention") or {}
            if _take_scaling(fields, local, length) != RopeScaling():
                raise fields.refusal("scaled rotary positions in windowed layers are not supported")
            base = _take_theta(fields, "rope_local_base_freq", self.local, local)
            found["positions.local_theta"] = base
            if new and not new.keys() <= {"sliding_attention", "full_attention"}:
                raise fields.refusal(f"rope_parameters={new!r}: have to be given per kind of layer")
            new = new.get("full_attention") or {}
        given = (old or new, new or old)
        found["positions.theta"] = _take_theta(fields, "rope_theta", self.theta, *given)
        scalings = [_take_scaling(fields, parameters, length) for parameters in given]
        found["positions.scaling"] = _agreed(fields, "rope_scaling and rope_parameters", scalings)
        return found

    def write(self, config: Any) -> dict[str, Any]:
        theta, scaling = config.positions.theta, _write_scaling(config.positions.scaling)
        new = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
        values = {
            "max_position_embeddings": config.max_seq_len,
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
        if self.local is None:
            return values | {"rope_parameters": new}
        local = theta if config.positions.local_theta is None else config.positions.local_theta
        kinds = {
            "full_attention": new,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        return values | {"rope_local_base_freq": local, "rope_parameters": kinds}


@dataclass(frozen=True)
class LayerTypes(Rule):
    """A sliding window on some layers, by `layer_types` or, in older files, by a period.

    The last of each `period` layers has no window.
    """

    period: int
    default: int = 4096

    def read(self, fields: Fields) -> dict[str, Any]:
        period = fields.take("sliding_window_pattern", self.period)
        period = fields.take("_sliding_window_pattern", period)
        given = fields.take("layer_types", None)
        configuration.check_value("sliding_window_pattern", period, int)
        if period < 1:
            raise fields.refusal(f"sliding_window_pattern={period}: must be positive")
        # A damaged file can name any number: a period longer than the model makes no difference.
        period = min(period, fields.values.get("num_hidden_layers", 0) + 1)
        pattern: tuple[str, ...] = ("local",) * (period - 1) + ("global",)
        if given is not None:
            pattern = _kinds(fields, given)
        window = fields.take("sliding_window", self.default)
        return {"attention.window": window, "attention.window_pattern": shortest(pattern)}

    def write(self, config: Any) -> dict[str, Any]:
        window = config.attention.window or self.default
        return {"sliding_window": window, "layer_types": _layer_types(config)}


@dataclass(frozen=True)
class OptionalLayerTypes(Rule):
    """Qwen's: a window only if `use_sliding_window`, from layer `max_window_layers` on.

    With `all_layers`, as in its mixture of experts, on every layer.
    """

    all_layers: bool = False

    def read(self, fields: Fields) -> dict[str, Any]:
        used = fields.take("use_sliding_window", False)
        window = fields.take("sliding_window", 4096)
        first = fields.take("max_window_layers", 0 if self.all_layers else 28)
        given = fields.take("layer_types", None)
        if not used or window is None:
            if given and "sliding_attention" in given:
                raise fields.refusal("layer_types has a window, but use_sliding_window is false")
            return {"attention.window": None}
        if self.all_layers:
            return {"attention.window": window}
        num_layers = fields.values.get("num_hidden_layers", 0)
        first = min(first, num_layers)
        pattern = ("global",) * first + ("local",) * (num_layers - first)
        if given is not None:
            pattern = _kinds(fields, given)
        return {"attention.window": window, "attention.window_pattern": shortest(pattern)}

    def write(self, config: Any) -> dict[str, Any]:
        used = config.attention.window is not None
        window = config.attention.window
        values: dict[str, Any] = {"use_sliding_window": used, "sliding_window": window}
        if not self.all_layers:
            types = _layer_types(config)
            values |= {"layer_types": types, "max_window_layers": config.num_layers}
        return values


def _kinds(fields: Fields, given: Any) -> tuple[str, ...]:
    if set(given) - _KINDS.keys() or len(given) != fields.values.get("num_hidden_layers"):
        known = ", ".join(_KINDS)
        raise fields.refusal(f"layer_types={given!r}: must be one of {known} for each layer")
    return tuple(_KINDS[kind] for kind in given)


def _layer_types(config: Any) -> list[str]:
    return [_TYPES[kind] for kind in config.all_layer_kinds]


@dataclass(frozen=True)
class QueryScale(Rule):
    """`query_pre_attn_scalar`: attention logits are divided by its square root."""

    default: int = 256

    def read(self, fields: Fields) -> dict[str, Any]:
        return {"attention.scale": fields.take("query_pre_attn_scalar", self.default) ** -0.5}

    def write(self, config: Any) -> dict[str, Any]:
        scale = config.attention.scale
        return {"query_pre_attn_scalar": config.head_size if scale is None else round(scale**-2)}


def canonical(config: transformer.Config) -> transformer.Config:
    """The one form of all configurations of the same model, by which they are compared.

    Derived sizes are filled in, the pattern is the shortest, fields without effect are defaults.
    """
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


def shortest(pattern: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest pattern that gives this one when it is repeated and truncated."""
    lengths = range(1, len(pattern) + 1)
    period = next(n for n in lengths if all(x == pattern[i % n] for i, x in enumerate(pattern)))
    return pattern[:period]
