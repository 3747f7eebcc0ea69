"""The model that a fine-tuning begins with, and its checks before anything is computed."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.common import configuration
from zoo.common.configuration import require
from zoo.data.chats import with_chat_template
from zoo.data.tokenizer import FILE_NAME, get_tokenizer, load_tokenizer
from zoo.nn.products import dequantize, is_quantized
from zoo.nn.protocols import SequenceModel
from zoo.nn.stateful import cast, is_kept
from zoo.publishing import formats, models
from zoo.publishing.families import reconfigured
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest, whole
from zoo.runs.run import Run
from zoo.sharding.axes import keystr
from zoo.tasks import language
from zoo.tasks.finetuning.config import Config
from zoo.training.pretrained import Pretrained
from zoo.training.state import Trainable, frozen_leaves, standard_promotion
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier


class Base:
    """The model that a run begins with: its folder and format, its skeleton, its tokenizer."""

    def __init__(self, run: Run[Config]):
        config = run.config
        weights = not config.plan  # which fetches none
        self.folder = find(config.model, weights=weights)
        self.format = formats.name_of(whole(self.folder))
        stored = models.skeleton(self.folder, quantize=config.quantize, weights=weights)
        _check_quantized(config, stored)
        merged = eqx.filter_eval_shape(lora.merge, stored)
        self._stored_config: Any = getattr(merged, "config", None)
        self._overrides, self._run = config.overrides(self._stored_config), run
        self.skeleton: Any = reconfigured(merged, self._overrides)
        is_sequence = isinstance(self.skeleton, SequenceModel)
        size = self.skeleton.config.vocab_size if is_sequence else None
        if size is None:
            raise ValueError(
                f"model={config.model!r} is a {type(self.skeleton).__name__} that reads no tokens: "
                "begin with a transformer, a BERT, or an RNN with a vocab_size"
            )
        language.check_row_lengths(config.data, self.skeleton.config, config.model)
        # Patterns that match nothing, and adapters that cannot be saved, before the text is read.
        num_classes = 2 if config.label else 0  # or more
        prepared = eqx.filter_eval_shape(
            lambda model: prepare(config, model, jax.random.key(0), num_classes), self.skeleton
        )
        frozen_leaves(prepared, trainable(config))
        if config.method == "lora" and not num_classes:  # whose adapters are not saved alone
            models.check_adapters(self.skeleton, lora.config_of(prepared))
        given, folder = config.data.tokenizer, nearest(self.folder, FILE_NAME)
        require(
            bool(given) or (folder / FILE_NAME).is_file(),
            f"{folder} has no {FILE_NAME}: name one by --data.tokenizer, or 'bytes'",
        )
        tokenizer = with_chat_template(
            get_tokenizer(given or str(folder)), config.data.chat_template
        )
        self.tokenizer = load_tokenizer(run.once("tokenizer", tokenizer.save))
        if self.tokenizer.vocab_size > size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, and {config.model} a "
                f"vocab_size of {size}: they do not go together; name the model's own by "
                "--data.tokenizer"
            )

    def load(self) -> PyTree:
        """The model on the run's mesh, whole and in the dtypes that it is stored in.

        Raises:
            ValueError: a parameter that is not finite.
        """
        quantize = self._run.config.quantize
        model = models.load(self.folder, mesh=self._run.mesh, quantize=quantize)
        if lora.has_adapters(model):  # what else is quantised, or of another dtype, stays so
            model = _placed(self._run, lora.merge, model)
        check_finite(model, self.folder)
        return reconfigured(model, self._overrides)

    def as_stored(self, model: PyTree) -> PyTree:
        """A model of this run with the fields of the base that the run had other values for."""
        stored = configuration.flat(self._stored_config)
        return reconfigured(model, {name: stored[name] for name in self._overrides})

    @property
    def pretrained(self) -> Pretrained:
        """The model for a training, which loads it when it begins."""
        is_planned = bool(self._run.config.plan)
        checksum = "" if is_planned else models.weights_checksum(self.folder)
        return Pretrained(self.skeleton, self.load, checksum)


def _check_quantized(config: Config, stored: PyTree) -> None:
    """Refuse to merge adapters into quantised matrices, and to train those."""
    if config.quantize is not None and lora.has_adapters(stored):
        raise ValueError(
            f"base={config.base!r}: {config.model} has adapters, and merged with them its "
            "matrices would be whole: give the model that they adapt, or base='stored'"
        )
    leaves = jax.tree.leaves(stored, is_leaf=is_quantized)
    if config.method != "lora" and any(map(is_quantized, leaves)):
        raise ValueError(
            f"model={config.model!r} is stored quantised, and quantised matrices are not trained: "
            "take method='lora', which trains adapters beside them, or the model that it was made "
            "of"
        )


def merge(run: Run[Config], model: PyTree) -> PyTree:
    """The plain model that computes the same, on the run's mesh as the model was.

    It is of one dtype, as sampling needs: trained parameters are float32, and frozen ones may not.
    What was quantised is dequantised.
    """
    quantized = any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized)))
    if not lora.has_adapters(model) and len(_dtypes(model)) == 1 and not quantized:
        return model

    def plain(model: PyTree) -> PyTree:
        model = dequantize(lora.merge(model))
        with standard_promotion():
            return cast(model, jnp.result_type(*_dtypes(model)))

    return _placed(run, plain, model)


def _placed(run: Run[Config], make: Callable[[PyTree], PyTree], model: PyTree) -> PyTree:
    """`make` of a model, on the run's mesh."""

    @eqx.filter_jit
    def placed(model: PyTree) -> PyTree:
        model = make(model)
        return eqx.filter_shard(model, sharding.shardings(model, run.layout))

    return placed(model)


def _dtypes(model: PyTree) -> set[Any]:
    """Those of a model's parameters, without what is kept in a dtype of its own."""
    return {x.dtype for x in jax.tree.leaves(model, is_leaf=is_kept) if eqx.is_inexact_array(x)}


# --- The part of it that is trained -----------------------------------------------------------


def prepare(config: Config, model: PyTree, key: Key[Array, ""], num_classes: int = 0) -> PyTree:
    """A model as training begins with it: with adapters and a head, if it trains those."""
    adapters_key, head_key = jax.random.split(key)
    if config.method == "lora":
        model = lora.adapt(model, models.with_paths(config.lora, model), key=adapters_key)
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
        paths = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
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
