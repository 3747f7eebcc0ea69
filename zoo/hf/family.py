"""A family in Hugging Face's format: rules for configuration fields and a map of tensor names.

Both work in both directions. A field of `config.json` that no rule of the family knows, or a value
that the zoo's model does not support, is an error: nothing that changes the maths is ignored.
"""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.common import configuration
from zoo.hf.names import Tensor
from zoo.publishing import PublishError
from zoo.publishing.families import check_counts


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
        self._where = where

    def take(self, name: str, default: Any = _ABSENT) -> Any:
        """A field's value, or the default if it is absent."""
        value = self._left.pop(name, default)
        if value is _ABSENT:
            raise PublishError(f"{self._where} has no field {name}")
        return value

    def refusal(self, reason: str) -> PublishError:
        """An error that names the file."""
        return PublishError(f"{self._where}: {reason}")

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


@dataclass(frozen=True)
class Fixed(Rule):
    """A field with one supported value, which is Hugging Face's default too.

    A field that transformers does not know itself is not `written`; null switches off as False.
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
    values: Mapping[str, Any]
    default: str

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, self.default)
        if value not in self.values:
            known = ", ".join(self.values)
            raise fields.refusal(f"{self.theirs}={value!r} is not supported, only {known}")
        return {self.ours: self.values[value]}

    def write(self, config: Any) -> dict[str, Any]:
        value = getattr(config, self.ours)
        return {self.theirs: next((k for k, v in self.values.items() if v == value), value)}


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    """The class of such a model in transformers."""
    model: type
    """The zoo's class."""
    config: Any
    """The class of its configuration."""
    rules: tuple[Rule, ...]
    canonical: Callable[[Any], Any]
    """The canonical form of a configuration, for comparison."""
    tensors: Mapping[str, Tensor]
    """The place of each parameter that some model of the family has, by its path."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the `Config` that are the same for all models of the family."""
    prefixes: tuple[str, ...] = ("",)
    """Possible prefixes of tensor names; the first is written."""
    marker: str = ""
    """A tensor that every file has, by which the prefix is found."""
    ignored: frozenset[str] = frozenset()
    """Fields of `config.json` without effect in this family."""
    buffers: tuple[str, ...] = ()
    """Suffixes of the names of tensors that may be in a file, but are no parameters."""
    by_tensors: Mapping[str, str] = field(default_factory=dict)
    """Fields of the `Config` that are true where the name of a tensor has this in it."""

    def read(
        self, values: Mapping[str, Any], where: str, allowed: Collection[str] | None = ()
    ) -> Any:
        """The `Config` of the content of a `config.json`; `allowed` as for `Fields.finish`.

        Raises:
            PublishError: a field is missing, unknown or not supported.
        """
        fields, found = Fields(values, where), dict(self.always)
        try:
            for rule in self.rules:
                found |= rule.read(fields)
            fields.finish(self.ignored, allowed)
            config = configuration.from_json(self.config, configuration.nested(found))
            check_counts(config)
            return self.canonical(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PublishError(f"{where}: {error}") from error

    def adapt(self, config: Any, names: Collection[str]) -> Any:
        """The configuration of a model whose file has tensors of these names."""
        found = {x: any(y in name for name in names) for x, y in self.by_tensors.items()}
        return dataclasses.replace(config, **found)

    def write(self, config: Any) -> dict[str, Any]:
        """The content of `config.json` for a configuration without a `difference`."""
        config = self.canonical(config)  # all sizes: other programs have other defaults
        values = {"architectures": [self.architecture], "model_type": self.model_type}
        for rule in self.rules:
            values |= rule.write(config)
        return values

    def difference(self, config: Any) -> list[str]:
        """The fields that a model of this family can't have; none if it can have all."""
        if not isinstance(config, self.config):
            return [f"a configuration of {type(config).__module__}"]
        try:
            again = self.read(self.write(config), self.model_type)
        except (PublishError, ValueError, TypeError) as error:
            return [str(error)]
        mine, other = configuration.flat(self.canonical(config)), configuration.flat(again)
        # Without effect on what a published model computes, and not in Hugging Face's fields.
        ignored = {*configuration.names_that_may_differ(config), "dropout", *self.by_tensors}
        return [
            f"{name}={value!r}"
            for name, value in mine.items()
            if name not in ignored and value != other[name]
        ]
