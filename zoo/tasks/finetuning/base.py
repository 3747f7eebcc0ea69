"""The model that a fine-tuning begins with, and its checks before anything is computed."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import configuration
from zoo.data.chats import with_chat_template
from zoo.data.tokenizer import FILE_NAME, Tokenizer, get_tokenizer, load_tokenizer
from zoo.nn.products import dequantize, is_quantized
from zoo.nn.protocols import SequenceModel
from zoo.nn.stateful import cast, is_kept
from zoo.publishing import formats, models
from zoo.publishing.families import reconfigured
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest, whole
from zoo.runs.run import Run
from zoo.tasks.finetuning.config import Config
from zoo.tasks.finetuning.trained import prepare, trainable
from zoo.training.pretrained import Pretrained
from zoo.training.state import frozen_leaves
from zoo.wrappers import lora


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
        _check_lengths(config, self.skeleton.config)
        self._check_trained()  # before the text is read
        self.tokenizer = _load_tokenizer(run, self)
        if self.tokenizer.vocab_size > size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, and {config.model} a "
                f"vocab_size of {size}: they do not go together; name the model's own by "
                "--data.tokenizer"
            )

    def _check_trained(self) -> None:
        """Refuse patterns that match nothing, and adapters that cannot be saved."""
        config, num_classes = self._run.config, 2 if self._run.config.label else 0  # or more
        prepared = eqx.filter_eval_shape(
            lambda model: prepare(config, model, jax.random.key(0), num_classes), self.skeleton
        )
        frozen_leaves(prepared, trainable(config))
        if config.method == "lora" and not num_classes:  # whose adapters are not saved alone
            models.check_adapters(self.skeleton, lora.config_of(prepared))

    def load(self) -> PyTree:
        """The model on the run's mesh, whole and in the dtypes that it is stored in.

        Raises:
            ValueError: a parameter that is not finite.
        """
        quantize = self._run.config.quantize
        model = models.load(self.folder, mesh=self._run.mesh, quantize=quantize)
        if lora.has_adapters(model):  # what else is quantised, or of another dtype, stays so
            model = _without_adapters(self._run, model)
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


def _check_lengths(config: Config, model: Any) -> None:
    """Refuse rows that are longer than any text that the model was made for."""
    limit = getattr(model, "max_seq_len", None)
    flag, longest = "data.seq_len", config.data.seq_len
    if config.data.rows == "bucketed":
        flag, longest = "data.buckets", max(config.data.buckets)
    if limit is not None and longest > limit:
        raise ValueError(
            f"{flag}={longest}: {config.model} has {limit} positions (its max_seq_len); give rows "
            f"of at most {limit} tokens"
        )


def _load_tokenizer(run: Run[Config], base: Base) -> Tokenizer:
    """The model's own, in a copy that the run keeps."""
    given = run.config.data.tokenizer
    folder = nearest(base.folder, FILE_NAME)
    if not given and not (folder / FILE_NAME).is_file():
        raise ValueError(f"{folder} has no {FILE_NAME}: name one by --data.tokenizer, or 'bytes'")
    tokenizer = get_tokenizer(given) if given else load_tokenizer(folder)
    tokenizer = with_chat_template(tokenizer, run.config.data.chat_template)
    return load_tokenizer(run.once("tokenizer", tokenizer.save))


def _without_adapters(run: Run[Config], model: PyTree) -> PyTree:
    """The model that `Base.skeleton` outlines, on the run's mesh."""

    @eqx.filter_jit
    def make(model: PyTree) -> PyTree:
        model = lora.merge(model)
        return eqx.filter_shard(model, sharding.shardings(model, run.layout))

    return make(model)


def merge(run: Run[Config], model: PyTree) -> PyTree:
    """The plain model that computes the same, on the run's mesh as the model was.

    It is of one dtype, as sampling needs: trained parameters are float32, and frozen ones may not.
    What was quantised is dequantised.
    """
    quantized = any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized)))
    if not lora.has_adapters(model) and len(_dtypes(model)) == 1 and not quantized:
        return model

    @eqx.filter_jit
    def make_plain(model: PyTree) -> PyTree:
        model = dequantize(lora.merge(model))
        model = cast(model, jnp.result_type(*_dtypes(model)))
        return eqx.filter_shard(model, sharding.shardings(model, run.layout))

    return make_plain(model)


def _dtypes(model: PyTree) -> set[Any]:
    """Those of a model's parameters, without what is kept in a dtype of its own."""
    return {x.dtype for x in jax.tree.leaves(model, is_leaf=is_kept) if eqx.is_inexact_array(x)}
