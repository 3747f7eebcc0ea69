"""Rules: maps between fields of a `config.json` and fields of the zoo's `Config`, both ways.

A field that no rule of a family knows, or a value that the zoo's model does not support, is an
error: nothing that changes the maths is ignored.
"""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import abc
import functools
from ast import literal_eval
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.common import configuration
from zoo.publishing import PublishError


def words(text: str) -> frozenset[str]:
    """The words of a text, such as names of fields."""
    return frozenset(text.split())


# Fields without effect on what a model computes from its tokens.
IGNORED = words(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attn_pdrop
    attention_dropout attention_probs_dropout_prob auto_map bad_words_ids begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout_prob id2label
    initializer_range keys_to_ignore_at_inference label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_router_logits output_scores
    pad_token_id prefix problem_type remove_invalid_values repetition_penalty resid_pdrop
    return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_return_dict
    """
)
# Fields of other families, or of none, with the value that switches them off, as null does.
_NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "embedding_multiplier": 1,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "logits_scaling": 1,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "residual_multiplier": 1,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
_ABSENT = object()


class Fields:
    """The fields of a `config.json`; each is taken once."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self._left = dict(values)
        self.where = where

    def take(self, name: str, default: Any = _ABSENT) -> Any:
        """A field's value, or the default if it is absent."""
        value = self._left.pop(name, default)
        if value is _ABSENT:
            raise PublishError(f"{self.where} has no field {name}")
        return value

    def refusal(self, reason: str) -> PublishError:
        """An error that names the file."""
        return PublishError(f"{self.where}: {reason}")

    def finish(self, ignored: Collection[str], allowed: Collection[str] | None = ()) -> None:
        """Refuse the fields that no rule took, but for those `allowed`; None allows all."""
        left = {
            name: x
            for name, x in self._left.items()
            if name not in IGNORED | set(ignored) and x not in (None, _NEUTRAL.get(name))
        }
        if surplus := sorted(set(allowed or ()) - self._left.keys()):
            raise self.refusal(
                f"ignore={surplus}: no unknown fields of the file; it has {sorted(left) or 'none'}"
            )
        if allowed is not None and (unknown := sorted(left.keys() - set(allowed))):
            fields = ", ".join(f"{name}={left[name]!r}" for name in unknown)
            raise self.refusal(
                f"unknown fields, which may change the maths: {fields}. If they do not, open it by "
                f"zoo.load(..., ignore={tuple(unknown)}), or remove them from the file"
            )


class Rule(abc.ABC):
    """A map between some fields of a `config.json` and some of a `Config`, in both directions."""

    @abc.abstractmethod
    def read(self, fields: Fields) -> dict[str, Any]:
        """The fields of the `Config`."""

    @abc.abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """The fields of `config.json`."""


@dataclass(frozen=True)
class Same(Rule):
    """The same value under another name; `default` is Hugging Face's, for an absent field."""

    theirs: str
    ours: str
    default: Any = _ABSENT

    def read(self, fields: Fields) -> dict[str, Any]:
        return {self.ours: fields.take(self.theirs, self.default)}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: functools.reduce(getattr, self.ours.split("."), config)}


def same(text: str) -> tuple[Same, ...]:
    """A rule for each "theirs=ours" or "theirs=ours:default" of a text."""
    found = []
    for theirs, rest in (pair.split("=") for pair in text.split()):
        ours, has_default, default = rest.partition(":")
        found.append(Same(theirs, ours, literal_eval(default) if has_default else _ABSENT))
    return tuple(found)


@dataclass(frozen=True)
class Fixed(Rule):
    """A field with one supported value, which is Hugging Face's default too.

    A field that transformers does not know itself is not `written`. Where the value switches
    something off, null does too.
    """

    theirs: str
    value: Any
    written: bool = True

    def read(self, fields: Fields) -> dict[str, Any]:
        found = fields.take(self.theirs, self.value)
        if found != self.value and not (found is None and not self.value):
            raise fields.refusal(f"{self.theirs}={found!r} is not supported, only {self.value!r}")
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: self.value} if self.written else {}


@dataclass(frozen=True)
class Choice(Rule):
    """A field whose values have other names in the zoo; of several, the first is written."""

    theirs: str
    ours: str
    values: Mapping[Any, Any]
    default: Any

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, self.default)
        if value not in self.values:
            known = ", ".join(map(str, self.values))
            raise fields.refusal(f"{self.theirs}={value!r} is not supported, only {known}")
        return {self.ours: self.values[value]}

    def write(self, config: Any) -> dict[str, Any]:
        value = functools.reduce(getattr, self.ours.split("."), config)
        return {self.theirs: next((k for k, v in self.values.items() if v == value), value)}


@dataclass(frozen=True)
class Computed(Rule):
    """A field of another form: what it gives, from its value and all fields, and the reverse."""

    theirs: str
    default: Any
    given: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    taken: Callable[[Any], Any]

    def read(self, fields: Fields) -> dict[str, Any]:
        return self.given(fields.take(self.theirs, self.default), fields.values)

    def write(self, config: Any) -> dict[str, Any]:
        return {self.theirs: self.taken(config)}


@dataclass(frozen=True)
class Each(Rule):
    """The same value of several fields, such as those of biases; `ours` are words."""

    theirs: str
    ours: str
    default: Any

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, self.default)
        return dict.fromkeys(self.ours.split(), False if value is None else value)

    def write(self, config: Any) -> dict[str, Any]:
        return Same(self.theirs, self.ours.split()[0]).write(config)


_KINDS = {"sliding_attention": "local", "full_attention": "global"}
_TYPES = {ours: theirs for theirs, ours in _KINDS.items()}


@dataclass(frozen=True)
class LayerTypes(Rule):
    """A sliding window on some layers, by `layer_types` or, in older files, by a period.

    The last of each `period` layers has no window; without a period all have one.
    """

    period: int | None
    default: int = 4096

    def read(self, fields: Fields) -> dict[str, Any]:
        period = fields.take("sliding_window_pattern", self.period)
        period = fields.take("_sliding_window_pattern", period)
        given = fields.take("layer_types", None)
        pattern: tuple[str, ...] = ("local",)
        in_letters = isinstance(period, str) and {*period} <= {*"LG"} and given  # as "LLLG"
        if period is not None and not in_letters:
            configuration.check_value("sliding_window_pattern", period, int)
            if period < 1:
                raise fields.refusal(f"sliding_window_pattern={period}: must be positive")
            # A damaged file can name any number: a period beyond the layers makes no difference.
            period = min(period, fields.values.get("num_hidden_layers", 0) + 1)
            pattern = ("local",) * (period - 1) + ("global",)
        if given is not None:
            pattern = kinds_of(fields, given)
        window = fields.take("sliding_window", self.default)
        return {"attention.window": window, "attention.window_pattern": shortest(pattern)}

    def write(self, config: Any) -> dict[str, Any]:
        window = config.attention.window or self.default
        return {"sliding_window": window, "layer_types": layer_types(config)}


@dataclass(frozen=True)
class RotaryInWindows(LayerTypes):
    """Rotary positions in layers with a window alone, and with no window in all if `or_all`."""

    or_all: bool = False

    def read(self, fields: Fields) -> dict[str, Any]:
        if self.or_all and fields.values.get("sliding_window", self.default) is None:
            of_windows = ("sliding_window", "sliding_window_pattern", "layer_types")
            if "sliding_attention" in ([fields.take(x, None) for x in of_windows][-1] or ()):
                raise fields.refusal("layer_types has a window, but sliding_window is null")
            return {"attention.window": None}
        found = super().read(fields)
        if found["attention.window"] is None:
            raise fields.refusal("sliding_window=None is not supported, only a number")
        reaches = found["attention.window_pattern"]
        placed = tuple("rotary" if reach == "local" else "none" for reach in reaches)
        return found | {"positions.pattern": placed}

    def write(self, config: Any) -> dict[str, Any]:
        values = super().write(config)
        if self.or_all and config.positions.pattern == ("rotary",):
            values["sliding_window"] = config.attention.window
        return values


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
            pattern = kinds_of(fields, given)
        return {"attention.window": window, "attention.window_pattern": shortest(pattern)}

    def write(self, config: Any) -> dict[str, Any]:
        used = config.attention.window is not None
        window = config.attention.window
        values: dict[str, Any] = {"use_sliding_window": used, "sliding_window": window}
        if not self.all_layers:
            types = layer_types(config)
            values |= {"layer_types": types, "max_window_layers": config.num_layers}
        return values


def kinds_of(fields: Fields, given: Any) -> tuple[str, ...]:
    """The reach of each layer, "local" or "global", from the names in `layer_types`."""
    if set(given) - _KINDS.keys() or len(given) != fields.values.get("num_hidden_layers"):
        known = ", ".join(_KINDS)
        raise fields.refusal(f"layer_types={given!r}: must be one of {known} for each layer")
    return tuple(_KINDS[kind] for kind in given)


def layer_types(config: Any) -> list[str]:
    """The reach of each layer by the names of `layer_types`, such as "sliding_attention"."""
    configuration.require(
        "recurrent" not in config.all_layer_kinds, f"mixer.pattern={config.mixer.pattern}"
    )
    return [_TYPES[kind.removesuffix("_nope")] for kind in config.all_layer_kinds]


def shortest(pattern: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest pattern that gives this one when it is repeated and truncated."""
    lengths = range(1, len(pattern) + 1)
    period = next(n for n in lengths if all(x == pattern[i % n] for i, x in enumerate(pattern)))
    return pattern[:period]
