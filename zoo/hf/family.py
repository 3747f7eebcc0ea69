"""A family in Hugging Face's format: rules for configuration fields, and a map of tensor names.

Both work in both directions.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.common import configuration
from zoo.hf.layouts import Layout, Split, Tensor, layers_of
from zoo.hf.rules import Fields, Rule
from zoo.hf.weights import Weights
from zoo.publishing import PublishError
from zoo.publishing.families import check_counts
from zoo.sharding.axes import keystr, map_parameters

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
    """The type of a model of which this is the part for text, described by its `text_config`."""
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

    def skeleton(self, config: Any) -> PyTree:
        """The model of a configuration, without its arrays."""
        return eqx.filter_eval_shape(lambda key: self.model(config, key=key), jax.random.key(0))

    def places(self, config: Any) -> Mapping[str, Tensor]:
        """The place of each parameter of a model."""
        experts = getattr(config, "experts", None)
        if experts is None or experts.num_experts is not None:
            return self.tensors
        return {**self.tensors, **self.without_experts}

    def layouts(self, skeleton: PyTree, prefix: str) -> dict[str, Layout]:
        """The layout of each parameter of a model (or of its skeleton), by its path."""
        found: dict[str, Layout] = {}
        config = skeleton.config
        places = self.places(config)
        splits = {name: split(config) for name, split in self.splits.items()}

        def add(path: tuple, axes: tuple[str | None, ...], leaf: Any) -> None:
            key = keystr(path)
            tensor = places[key]
            split = splits[tensor.rows[0]] if tensor.rows else ()
            layers = layers_of(config, key)
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
            fields.finish(self.ignored, allowed)
            config = configuration.from_json(self.config, configuration.nested(found))
            check_counts(config)
            return self.canonical(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PublishError(f"{where}: {error}") from error

    def is_bare(self, config: Any) -> bool:
        """Whether a model is one without the family's output head."""
        return bool(self.bare) and config.encoder.head == "none"

    def prefix(self, config: Any) -> str:
        """The prefix of the names of tensors that are written."""
        if self.head_prefix and config.num_classes:
            return self.head_prefix
        return "" if self.is_bare(config) else self.prefixes[0]

    def write(self, config: Any) -> dict[str, Any]:
        """The content of `config.json` for a configuration without a `difference`."""
        config = self.canonical(config)  # all sizes: other programs have other defaults
        architecture = self.bare if self.is_bare(config) else self.architecture
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
