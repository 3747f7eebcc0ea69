"""The part of a model that is trained: its parameters, adapters beside them, a new head."""

import fnmatch
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import Array, Key, PyTree

from zoo.publishing.models import with_paths
from zoo.sharding.axes import keystr
from zoo.tasks.finetuning.config import Config
from zoo.training.state import Trainable
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier


def prepare(config: Config, model: PyTree, key: Key[Array, ""], num_classes: int = 0) -> PyTree:
    """A model as training begins with it: with adapters and a head, if it trains those."""
    adapters_key, head_key = jax.random.split(key)
    if config.method == "lora":
        model = lora.adapt(model, with_paths(config.lora, model), key=adapters_key)
    if num_classes:
        model = Classifier(model, num_classes, pooling=config.pooling, key=head_key)
    return model


def trainable(config: Config) -> Trainable | None:
    """The part of it that is trained; a new head always is."""
    if config.method == "lora":
        return _adapters_and_head
    return frozen(config.freeze) if config.freeze else None


def frozen(patterns: Sequence[str]) -> Trainable:
    """Train all but the parameters whose dotted paths match, such as `blocks.mlp.*`.

    Raises:
        ValueError: at the call with a model, a pattern that matches none of its parameters.
    """

    def trainable(model: PyTree) -> PyTree:
        paths = [keystr(path) for path, _ in jtu.tree_leaves_with_path(model)]
        for pattern in patterns:
            if not fnmatch.filter(paths, pattern):
                raise ValueError(
                    f"freeze={pattern!r} matches no parameter; those are {', '.join(paths)}"
                )
        kept = [not any(fnmatch.fnmatchcase(path, p) for p in patterns) for path in paths]
        return jax.tree.unflatten(jax.tree.structure(model), kept)

    return trainable


def _adapters_and_head(model: PyTree) -> PyTree:
    chosen = lora.trainable(model)
    if not isinstance(model, Classifier):
        return chosen
    return eqx.tree_at(lambda x: x.head, chosen, jax.tree.map(lambda _: True, model.head))
