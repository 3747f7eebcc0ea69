"""The rule of rotary positions: wavelengths and their stretching, as `config.json` has them."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zoo.common import configuration
from zoo.hf.rules import Fields, Rule
from zoo.transformer.rotary import RopeScaling

_LENGTH = "original_max_position_embeddings"
# The parameters of each type of scaling, and those of the zoo's `RopeScaling`.
_YARN = {"beta_slow": "low_freq_factor", "beta_fast": "high_freq_factor", "truncate": "truncate"}
_WAVES = {name: name for name in ("low_freq_factor", "high_freq_factor")}
_FACTORS_EACH = {"short_factor": "short_factors", "long_factor": "long_factors"}
_ORIGINAL = {_LENGTH: "original_max_seq_len"}
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {"factor": "factor"} | _WAVES | _ORIGINAL,
    "yarn": {"factor": "factor"} | _YARN | _ORIGINAL | {"attention_factor": "attention_factor"},
    "longrope": _FACTORS_EACH | _ORIGINAL | {"attention_factor": "attention_factor"},
}
_OF_TEXT = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
_GROWTH = "llama_4_scaling_beta"
_FACTORS = ("attention_factor", "factor", "partial_rotary_factor")  # of no effect if they are 1


def _take_scaling(fields: Fields, given: dict[str, Any] | None, max_seq_len: int) -> RopeScaling:
    """The zoo's `RopeScaling` from a dictionary of rotary parameters."""
    given = {name: x for name, x in (given or {}).items() if x is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    given.pop("rope_theta", None)
    kind = "longrope" if kind == "su" else kind  # in older files
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise fields.refusal(f"rotary positions of type {kind!r} are not supported, only {known}")
    if kind in ("llama3", "yarn", "longrope"):
        given[_LENGTH] = fields.values.get(_LENGTH, given.get(_LENGTH, max_seq_len))
    if kind in ("yarn", "longrope"):
        given = _with_attention_factor(kind, given, max_seq_len)
    found: dict[str, Any] = {"ramp": "yarn"} if kind == "yarn" else {}
    try:
        found |= {ours: _number(given.pop(name), ours) for name, ours in _SCALINGS[kind].items()}
    except KeyError as error:
        raise fields.refusal(f"rotary positions of type {kind!r} need {error}") from None
    if any(name not in _FACTORS or x != 1 for name, x in given.items()):
        raise fields.refusal(f"unknown rotary parameters, which may change the maths: {given}")
    return RopeScaling(**found)


def _with_attention_factor(kind: str, given: dict[str, Any], max_seq_len: int) -> dict[str, Any]:
    """The parameters with the factor that YaRN or LongRoPE has by default, and its defaults."""
    length = given[_LENGTH]
    factor = given.get("factor", max_seq_len / length)
    if kind == "longrope":
        given = {name: x for name, x in given.items() if name != "factor"}
        default = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    else:
        given = {"beta_slow": 1, "beta_fast": 32, "truncate": True} | given
        scales = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
        of_length = lambda scale: 0.1 * scale * math.log(max(factor, 1)) + 1  # noqa: E731
        default = of_length(scales[0]) / of_length(scales[1]) if all(scales) else of_length(1)
    return {"attention_factor": default} | given


def _number(value: Any, ours: str) -> Any:
    """A parameter in the type that it has here, however it is written."""
    if isinstance(value, list):
        return tuple(map(float, value))
    if ours == "truncate" or (ours == "original_max_seq_len" and not float(value).is_integer()):
        return value
    return int(value) if ours == "original_max_seq_len" else float(value)


def _take_theta(fields: Fields, name: str, default: float, *given: Mapping[str, Any]) -> Any:
    """The base of the wavelengths, from the field `name` and rotary parameters, which agree."""
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
    if scaling.is_none:
        return None
    kind: str = "linear" if scaling.original_max_seq_len is None else scaling.ramp
    kind = "longrope" if scaling.short_factors else kind
    return {"rope_type": kind} | {
        theirs: [*x] if isinstance(x := getattr(scaling, ours), tuple) else x
        for theirs, ours in _SCALINGS[kind].items()
    }


@dataclass(frozen=True)
class Rotary(Rule):
    """`max_position_embeddings` and the rotary wavelengths, in the old and the new format.

    `local` is the base of layers with a window, if they have their own, as in Gemma 3, or the same
    "theta", which is not stretched there (OLMo 3). Both formats are written: version 5 of
    transformers keeps to the new one, and earlier ones know only the old. `fraction` is the default
    of the share of a head's features that rotates, where it may be less than one. Text has one
    position per token, so that fields for three make no difference. With `grows`, queries grow by
    Llama 4's parameter, and the longest text may be given twice.
    """

    theta: float = 10_000.0
    local: float | Literal["theta"] | None = None
    max_seq_len: int = 2048
    fraction: float | None = None
    theta_name: str = "rope_theta"
    fraction_name: str = "partial_rotary_factor"
    local_name: str = "rope_local_base_freq"
    grows: bool = False

    def read(self, fields: Fields) -> dict[str, Any]:
        length = fields.take("max_position_embeddings", self.max_seq_len)
        old, new = (fields.take(name, None) or {} for name in ("rope_scaling", "rope_parameters"))
        configuration.check_value("rope_scaling", old, dict)
        configuration.check_value("rope_parameters", new, dict)
        found: dict[str, Any] = {"max_seq_len": length}
        if self.fraction is not None:
            factors = [fields.take(self.fraction_name, None)]
            factors += [x.get("partial_rotary_factor") for x in (old, new)]
            old, new = ({k: v for k, v in x.items() if k not in _OF_TEXT} for x in (old, new))
            factors = [x for x in factors if x is not None] or [self.fraction]
            found["positions.rotary_fraction"] = _agreed(fields, "partial_rotary_factor", factors)
        growths = [0.0]
        if self.grows:
            again = "max_position_embeddings"
            _agreed(fields, again, [length, *(x[again] for x in (old, new) if again in x)])
            growths = [x.get(_GROWTH, 0.0) for x in (old, new) if x] or growths
            old, new = (
                {k: v for k, v in x.items() if k not in (_GROWTH, again)} for x in (old, new)
            )
        if self.local is not None:
            local = new.get("sliding_attention") or {}
            if _take_scaling(fields, local, length) != RopeScaling():
                raise fields.refusal("scaled rotary positions in windowed layers are not supported")
            default: Any = self.local
            if default == "theta":
                default = fields.values.get("rope_theta", self.theta)
            base = _take_theta(fields, self.local_name, default, local)
            found["positions.local_theta"] = base
            if new and not new.keys() <= {"sliding_attention", "full_attention"}:
                raise fields.refusal(f"rope_parameters={new!r}: have to be given per kind of layer")
            new = new.get("full_attention") or {}
        given = (old or new, new or old)
        found["positions.theta"] = _take_theta(fields, self.theta_name, self.theta, *given)
        scalings = [_take_scaling(fields, parameters, length) for parameters in given]
        scaling = _agreed(fields, "rope_scaling and rope_parameters", scalings)
        growth = float(_agreed(fields, _GROWTH, growths))
        found["positions.scaling"] = replace(scaling, query_growth=growth)
        return found

    def write(self, config: Any) -> dict[str, Any]:
        theta, scaling = config.positions.theta, _write_scaling(config.positions.scaling)
        if self.grows:
            scaling = (scaling or {}) | {_GROWTH: config.positions.scaling.query_growth}
        new = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
        values = {
            "max_position_embeddings": config.max_seq_len,
            self.theta_name: theta,
            "rope_scaling": scaling,
        }
        if self.fraction is not None:
            fraction = config.positions.rotary_fraction
            values |= {self.fraction_name: fraction}
            new |= {"partial_rotary_factor": fraction}
        if self.local is None:
            return values | {"rope_parameters": new}
        local = theta if config.positions.local_theta is None else config.positions.local_theta
        kinds = {
            "full_attention": new,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        if self.local != "theta":
            values[self.local_name] = local
        return values | {"rope_parameters": kinds}


@dataclass(frozen=True)
class GivenRotary(Rotary):
    """Rotary positions that a file has to give, as their default is no plain one."""

    def read(self, fields: Fields) -> dict[str, Any]:
        if not (fields.values.get("rope_scaling") or fields.values.get("rope_parameters")):
            raise fields.refusal("has neither rope_scaling nor rope_parameters: add what was meant")
        return super().read(fields)
