"""The model that fine-tuning begins with, and the part of it that is trained."""

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.common import configuration
from zoo.common.configuration import require
from zoo.data.chats import with_chat_template
from zoo.data.prepared.opening import prepared_folder
from zoo.data.tokenizer import FILE_NAME, has_tokenizer, load_tokenizer
from zoo.nn.products import dequantize, is_quantized
from zoo.nn.protocols import ImageModel, SequenceModel
from zoo.nn.stateful import cast, is_kept
from zoo.publishing import formats, models
from zoo.publishing.families import reconfigured
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest, whole
from zoo.runs.run import Run
from zoo.sharding.axes import keystr
from zoo.tasks import language
from zoo.tasks.finetuning.config import Config
from zoo.training.state import Pretrained, Trainable, frozen_leaves, standard_promotion
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier, TokenClassifier


class Base:
    """The model that a run begins with: its folder and format, its skeleton, its tokenizer."""

    def __init__(self, run: Run[Config]):
        config = run.config
        weights = not config.plan  # which fetches none
        self.folder = find(config.model, weights=weights)
        self.format = formats.name_of(whole(self.folder))
        stored = models.skeleton(self.folder, quantize=config.quantize, weights=weights)
        if config.quantize is not None and lora.has_adapters(stored):
            raise ValueError(
                f"base={config.base!r}: {config.model} has adapters, and merged with them its "
                "matrices would be whole: give the model that they adapt, or base='stored'"
            )
        if config.method != "lora" and _has_quantized(stored):
            raise ValueError(
                f"model={config.model!r} is stored quantised, and quantised matrices are not "
                "trained: take method='lora', which trains adapters beside them, or the model "
                "that it was made of"
            )
        merged = eqx.filter_eval_shape(lora.merge, stored)
        self._stored_config: Any = getattr(merged, "config", None)
        self._overrides, self._run = config.overrides(self._stored_config), run
        self.skeleton: Any = reconfigured(merged, self._overrides)
        self.reads_pictures = isinstance(self.skeleton, ImageModel)
        is_sequence = isinstance(self.skeleton, SequenceModel) and not self.reads_pictures
        size = self.skeleton.config.vocab_size if is_sequence else None
        if self.reads_pictures:
            _check_pictures(config)
        elif size is None:
            raise ValueError(
                f"model={config.model!r} is a {type(self.skeleton).__name__} that reads no tokens: "
                "begin with a transformer, or an RNN with a vocab_size"
            )
        else:
            _check_text(config)
            language.check_row_lengths(config.row_lengths, self.skeleton.config, config.model)
        # Patterns that match nothing, and adapters that cannot be saved, before the data is read.
        num_classes = 2 if config.label or self.reads_pictures else 0  # or more
        prepared = self.prepared(num_classes)
        self.trainable = trainable(config, new_head=num_classes > 0)
        frozen_leaves(prepared, self.trainable)
        if config.method == "lora" and not self.reads_pictures:  # which are saved whole alone
            formats.for_adapters().check(self.skeleton, lora.config_of(self.prepared()))
        if size is None:
            return
        given, folder = config.data.tokenizer, nearest(self.folder, FILE_NAME)
        require(
            bool(given) or has_tokenizer(folder),
            f"{folder} has no {FILE_NAME}: name one by --data.tokenizer, or 'bytes'",
        )
        tokenizer = with_chat_template(
            load_tokenizer(given or str(folder)), config.data.chat_template
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

    def prepared(self, num_classes: int = 0) -> PyTree:
        """The skeleton of the model as training begins with it."""
        make = lambda model: prepare(self._run.config, model, jax.random.key(0), num_classes)  # noqa: E731
        return eqx.filter_eval_shape(make, self.skeleton)

    def as_stored(self, model: PyTree) -> PyTree:
        """A model of this run with the base's own values of the fields that the run changed."""
        stored = configuration.flat(self._stored_config)
        return reconfigured(model, {name: stored[name] for name in self._overrides})

    @property
    def pretrained(self) -> Pretrained:
        """The model for a training, which loads it when it begins."""
        is_planned = bool(self._run.config.plan)
        checksum = "" if is_planned else models.weights_checksum(self.folder)
        return Pretrained(self.skeleton, self.load, checksum)


def merge(run: Run[Config], model: PyTree) -> PyTree:
    """The plain model that computes the same, on the run's mesh as the model was.

    It is of one dtype, as sampling needs: trained parameters are float32, and frozen ones may not
    be. What was quantised is dequantised.
    """
    if not lora.has_adapters(model) and len(_dtypes(model)) == 1 and not _has_quantized(model):
        return model

    def plain(model: PyTree) -> PyTree:
        model = dequantize(lora.merge(model))  # an adapted matrix is in its base's dtype again
        with standard_promotion():
            return cast(model, jnp.result_type(*_dtypes(model)))

    return _placed(run, plain, model)


def _dtypes(model: PyTree) -> set[Any]:
    """The dtypes of a model's parameters, but for what is kept in one of its own."""
    leaves = jax.tree.leaves(model, is_leaf=is_kept)
    return {x.dtype for x in leaves if eqx.is_inexact_array(x)}


def _placed(run: Run[Config], make: Callable[[PyTree], PyTree], model: PyTree) -> PyTree:
    """`make` of a model, on the run's mesh."""

    @eqx.filter_jit
    def placed(model: PyTree) -> PyTree:
        model = make(model)
        return eqx.filter_shard(model, sharding.shardings(model, run.layout))

    return placed(model)


def _has_quantized(model: PyTree) -> bool:
    return any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized)))


# --- The part of it that is trained -----------------------------------------------------------


def prepare(config: Config, model: PyTree, key: Key[Array, ""], num_classes: int = 0) -> PyTree:
    """A model as training begins with it: with adapters and a head, if it trains them."""
    adapters_key, head_key = jax.random.split(key)
    if config.method == "lora":
        model = lora.adapt(model, models.with_paths(config.lora, model), key=adapters_key)
    if num_classes and isinstance(model, ImageModel):
        return model.with_head(num_classes, key=head_key)
    if num_classes and config.data.format == "tags":
        return TokenClassifier(model, num_classes, key=head_key)
    if num_classes:
        bias = not model.is_causal  # as transformers has it, which opens such a model
        pooling = config.pooling
        return Classifier(model, num_classes, pooling=pooling, bias=bias, key=head_key)
    return model


def _check_text(config: Config) -> None:
    """Refuse a folder, such as one of pictures, before it is searched for text."""
    files = config.data.files
    is_folder = Path(files).is_dir() and prepared_folder(files) is None
    require(
        not (files and is_folder),
        f"data.files={files!r} is a folder, and model={config.model!r} reads text: add '/**/*.txt' "
        "or the like; for a folder of pictures per class give --model a vision transformer",
    )


def _check_pictures(config: Config) -> None:
    """Refuse what is for text alone."""
    given = {"label": config.label, "data.format": config.data.format}
    wrong = [f"{name}={x!r}" for name, x in given.items() if x not in (None, "text")]
    require(
        not wrong and config.data.files != "",
        f"model={config.model!r} reads pictures: give --data a folder with one folder of pictures "
        f"per class, whose name is their label{''.join(f', and no {x}' for x in wrong)}",
    )


def trainable(config: Config, *, new_head: bool) -> Trainable | None:
    """The part of the model that is trained; a new head always is."""
    if config.method == "lora":
        return _adapters_and_head if new_head else lora.trainable
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
    return eqx.tree_at(lambda x: x.head, chosen, jax.tree.map(lambda _: True, model.head))
