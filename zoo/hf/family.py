"""A family in Hugging Face's format: rules for configuration fields, and a map of tensor names.

Both work in both directions. A transformer's family is found by the canonical form of its
configuration, which all configurations of the same model share.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo import transformer
from zoo.common import configuration
from zoo.hf.layouts import Layout, Split, Tensor, layers_of
from zoo.hf.rules import Fields, Rule, shortest
from zoo.hf.weights import Weights
from zoo.publishing import PublishError
from zoo.publishing.families import check_counts
from zoo.sharding.axes import keystr, map_parameters
from zoo.transformer.part_configs import AttentionConfig
from zoo.transformer.rotary import PositionsConfig


@dataclass(frozen=True)
class Head:
    """A head for classes in transformers."""

    pooling: str
    """As a `zoo.Classifier` has it, or "none" for a `zoo.TokenClassifier`."""
    bias: bool
    tensors: Mapping[str, Tensor]
    """The places of the head's parameters, and of a pooler that has other names there."""


LOAD_BIAS_RATE = 0.001  # of DeepSeek-V3; config.json has none
HEADLESS = {"encoder.head": "none", "tie_embeddings": False, "head_bias": False}


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
    without_experts: Mapping[str, Tensor] = field(default_factory=dict)
    """The places that differ in a model without experts."""
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
    splits: Mapping[str, Split] = field(default_factory=dict)
    """How the rows of tensors are shared among parameters, by a name in `tensors`."""
    within: str = ""
    """The type of a model of which this is a part."""
    described_by: str = "text_config"
    """The field of that model's `config.json` that describes this part."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The tensors that the zoo's model does not have, by how their names begin, in words.

    `{num_layers}` in such a name is that number."""
    as_published: Callable[[Any, Weights], Weights] | None = None
    """The tensors of a file in the names of `tensors`, where programs write others."""
    bare: str = ""
    """The class in transformers of such a model without an output head, if there are such; its
    tensors have no prefix."""
    of_head: str = ""
    """A part of the names of that head's tensors."""
    head_prefix: str = ""
    """The prefix of a model with classes, if it has another."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may repeat another one."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """The heads for classes that it may be under, by the ends of their classes' names."""

    def skeleton(self, config: Any) -> PyTree:
        """The model of a configuration, without its arrays."""
        return eqx.filter_eval_shape(lambda key: self.model(config, key=key), jax.random.key(0))

    def layouts(self, skeleton: PyTree, prefix: str) -> dict[str, Layout]:
        """The layout of each parameter of a model (or of its skeleton), by its path."""
        found: dict[str, Layout] = {}
        config, places = skeleton.config, dict(self.tensors)
        if getattr(getattr(config, "experts", None), "num_experts", 0) is None:
            places |= self.without_experts
        splits = {name: split(config) for name, split in self.splits.items()}

        def add(path: tuple, axes: tuple[str | None, ...], leaf: Any) -> None:
            key = keystr(path)
            place = key.removeprefix("body.")  # of a model under a head for classes
            tensor = places[place]
            split = splits[tensor.split] if tensor.split else ()
            layers = layers_of(config, place)
            found[key] = Layout(key, leaf.shape, axes, tensor, prefix, layers, split)

        map_parameters(add, skeleton)
        return found

    def read(
        self,
        values: Mapping[str, Any],
        where: str,
        allowed: Collection[str] | None = (),
        names: Collection[str] | None = None,
    ) -> Any:
        """The `Config` of the content of a `config.json`; `allowed` as for `Fields.finish`.

        The names of the file's tensors, if given, tell whether there are a head and a pooler; else
        a bare model has the pooler that its type has.

        Raises:
            PublishError: a field is missing, unknown or not supported.
        """
        fields, found = Fields(values, where), dict(self.always)
        try:
            for rule in self.rules:
                found |= rule.read(fields)
            if self.bare:
                is_bare = values.get("architectures") == [self.bare]
                found["encoder.pooler"] = is_bare and "pooler.weight" in self.tensors
                if names is not None:
                    is_bare = not any(self.of_head in name for name in names)
                    found["encoder.pooler"] = any("pooler." in name for name in names)
                found |= HEADLESS if is_bare else {}
            elif values.get("architectures") == [self.without_head]:
                found |= HEADLESS
            fields.finish(self.ignored, allowed)
            config = configuration.from_json(self.config, configuration.nested(found))
            check_counts(config)
            return self.canonical(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PublishError(f"{where}: {error}") from error

    @property
    def without_head(self) -> str:
        """The class of such a model without an output head, "" if there is none."""
        of_decoder = self.architecture.replace("ForCausalLM", "Model")
        return self.bare or of_decoder * (of_decoder != self.architecture)

    def is_bare(self, config: Any) -> bool:
        """Whether a model is one without the family's output head."""
        return bool(self.without_head) and config.encoder.head == "none"

    def prefix(self, config: Any) -> str:
        """The prefix of the names of tensors that are written."""
        if self.head_prefix and config.num_classes:
            return self.head_prefix
        return "" if self.is_bare(config) else self.prefixes[0]

    def write(self, config: Any) -> dict[str, Any]:
        """The content of `config.json` for a configuration without a `difference`."""
        config = self.canonical(config)  # all sizes: other programs have other defaults
        architecture = self.without_head if self.is_bare(config) else self.architecture
        values = {"architectures": [architecture], "model_type": self.model_type}
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
        ignored = {*configuration.names_that_may_differ(config), "dropout"}
        ignored |= {"encoder.pooler"} if self.bare else set()
        return [
            f"{name}={value!r}"
            for name, value in mine.items()
            if name not in ignored and value != other[name]
        ]


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
