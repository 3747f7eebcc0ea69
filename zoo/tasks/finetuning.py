"""Fine-tuning: a published model, whatever its format, on other data, in full or in part."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key, PyTree

from zoo import sharding
from zoo.base.configuration import added, may_differ, require
from zoo.base.files import local_path
from zoo.data import completions, text
from zoo.data.documents import Document, help_topics
from zoo.data.tokenizer import FILE_NAME, Tokenizer, get_tokenizer, load_tokenizer
from zoo.nn.parameters import cast
from zoo.nn.protocols import SequenceModel
from zoo.nn.quantized import Kind, dequantize, is_quantized
from zoo.publishing import models
from zoo.publishing.adapters import save_adapters
from zoo.publishing.folder import hugging_face_config
from zoo.publishing.shelf import find
from zoo.runs import loop
from zoo.runs.callbacks.best import Save
from zoo.runs.callbacks.evaluations import Samples
from zoo.runs.callbacks.flags import Chosen
from zoo.runs.metrics import read_metrics
from zoo.runs.run import Config as RunConfig
from zoo.runs.run import Run
from zoo.sharding.axes import keystr
from zoo.tasks import classification, language
from zoo.training import optimizers
from zoo.training.description import Training
from zoo.training.pretrained import Pretrained
from zoo.training.state import Trainable
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier, Pooling
from zoo.wrappers.lora import Config as LoraConfig


@dataclass(frozen=True)
class Data(text.Source):
    """Text to fine-tune on, in the tokens of the model's own tokenizer."""

    format: Literal["text", "completions", "chats"] = "text"
    """text; or JSON lines of prompts with completions, which alone count in the loss; or of chats,
    by the tokenizer's own template, in which the assistant's answers count."""
    prompt: str = "prompt"
    """Field of a prompt."""
    completion: str = "completion"
    """Field of its completion."""
    messages: str = "messages"
    """Field of a chat's messages, each with a role and a content."""
    tokenizer: str = ""
    """bytes, or a path to tokenizer.json, where the model's folder has none."""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The fields of fine-tuning: those of a run, a model to begin with, text, an optimizer."""

    model: str = "lm-python"
    """Model to begin with: a name on the shelf, a run's folder, a model's, or a hub id."""
    method: Literal["full", "lora"] = "full"
    """Train the parameters themselves, or adapters of low rank beside them."""
    base: Literal["stored", "int8", "int4", "nf4"] = added("stored")
    """Bits of the matrices that adapters are trained beside: those of the files, 8 or 4."""
    freeze: tuple[str, ...] = ()
    """Paths of parameters that stay as they are, such as embedding.* and blocks.mlp.*."""
    label: str | None = None
    """Field of --data that holds a row's label: puts a new head on the model, which classifies."""
    pooling: Pooling = "auto"
    """Input of that head: a row's last token, its first, the mean, or (auto) the last of a
    decoder, which has seen the others, and the mean of an encoder."""
    sample_tokens: int = may_differ(128)
    """Tokens of the samples at the end."""
    sample_every: int | None = may_differ(None)
    """Steps between samples during training, which samples.jsonl keeps."""
    lora: LoraConfig = LoraConfig()
    data: Data = Data()
    optimizer: optimizers.Config = optimizers.Config()

    def __post_init__(self) -> None:
        super().__post_init__()
        local_path(self.model, "model")
        language.check_sample_tokens(self.sample_tokens)
        language.check_sample_every(self.sample_every, label=self.label)
        require(
            self.method != "lora" or not self.freeze,
            f"freeze={self.freeze}: method='lora' trains nothing but adapters",
        )
        require(
            self.method == "lora" or self.base == "stored",
            f"base={self.base!r}: quantised matrices are not trained; take method='lora', which "
            "trains adapters beside them, or base='stored'",
        )

    @property
    def quantize(self) -> Kind | None:
        """The kind that the base's matrices are quantised in."""
        return None if self.base == "stored" else self.base

    @property
    def batch_size(self) -> int:
        """Rows of a global batch."""
        return self.data.batch_size


class Base:
    """The model that a run begins with: its folder and format, its skeleton, its tokenizer."""

    def __init__(self, run: Run[Config]):
        config = run.config
        weights = not config.plan  # which fetches none
        self.folder = find(config.model, weights=weights)
        self.is_hugging_face = hugging_face_config(self.folder) is not None
        stored = models.skeleton(self.folder, quantize=config.quantize, weights=weights)
        if config.quantize is not None and lora.has_adapters(stored):
            raise ValueError(
                f"base={config.base!r}: {config.model} has adapters, and merged with them its "
                "matrices would be whole: give the model that they adapt, or base='stored'"
            )
        self.skeleton: Any = eqx.filter_eval_shape(lora.merge, stored)
        self._run = run
        is_sequence = isinstance(self.skeleton, SequenceModel)
        size = self.skeleton.config.vocab_size if is_sequence else None
        if size is None:
            raise ValueError(
                f"model={config.model!r} is a {type(self.skeleton).__name__} that reads no tokens: "
                "begin with a transformer, a BERT, or an RNN with a vocab_size"
            )
        self.tokenizer = _load_tokenizer(run, self)
        if self.tokenizer.vocab_size > size:
            raise ValueError(
                f"the tokenizer has ids up to {self.tokenizer.vocab_size}, and {config.model} a "
                f"vocab_size of {size}: they do not go together"
            )

    def load(self) -> PyTree:
        """The model on the run's mesh, whole and in the dtypes that it is stored in.

        Raises:
            ValueError: a parameter that is not finite.
        """
        quantize = self._run.config.quantize
        model = models.load(self.folder, mesh=self._run.mesh, quantize=quantize)
        model = model if quantize else _merged(self._run, model)
        check_finite(model, self.folder, self._run.mesh)
        return model

    @property
    def pretrained(self) -> Pretrained:
        """The model for a training, which loads it when it begins."""
        is_planned = bool(self._run.config.plan)
        checksum = "" if is_planned else models.weights_checksum(self.folder)
        return Pretrained(self.skeleton, self.load, checksum)


def check_finite(model: PyTree, folder: Path, mesh: Mesh) -> None:
    """Raise a ValueError that names the first parameter with a NaN or an infinity."""
    floats = eqx.filter(model, eqx.is_inexact_array)
    check = jax.jit(
        lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree),
        out_shardings=sharding.replicated(mesh),
    )
    finite = check(floats)
    for path, is_finite in jtu.tree_leaves_with_path(jax.device_get(finite)):
        if not is_finite:
            raise ValueError(
                f"{folder}: {keystr(path)} has a NaN or an infinity: the model is damaged, or its "
                "training diverged; get it again, or begin with another --model"
            )


def _load_tokenizer(run: Run[Config], base: Base) -> Tokenizer:
    """The model's own, in a copy that the run keeps."""
    given = run.config.data.tokenizer
    if not given and not (base.folder / FILE_NAME).is_file():
        raise ValueError(
            f"{base.folder} has no {FILE_NAME}: name one by --data.tokenizer, or 'bytes'"
        )
    tokenizer = get_tokenizer(given) if given else load_tokenizer(base.folder)
    return load_tokenizer(run.once("tokenizer", tokenizer.save))


def read_text(run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code."""
    config = run.config.data
    text.check_label(config, label)
    documents, tokenize = _documents(config, tokenizer, label)
    data = text.make_text(
        config,
        text.split(config, documents),
        tokenizer,
        seed=run.config.seed,
        label=label,
        tokenize=tokenize,
    )
    language.say_what_there_is(run, data)
    return data


def _documents(config: Data, tokenizer: Tokenizer, label: str | None) -> tuple[list[Document], Any]:
    """The documents, and the function that makes a corpus of them."""
    if config.format != "text" and (label is not None or not config.files):
        raise ValueError(
            f"data.format={config.format!r} takes data.files (now {config.files!r}) and no label "
            f"(now {label!r})"
        )
    if config.format == "completions":
        fields = {"prompt": config.prompt, "completion": config.completion}
        return completions.read_completions(config.files, **fields), completions.tokenize_parts
    if config.format == "chats":
        template = completions.chat_template(tokenizer)
        chats = completions.read_chats(config.files, template, field=config.messages)
        return chats, completions.tokenize_chats
    documents = text.read_documents_of(config, label) if config.files else help_topics()
    return documents, text.tokenize


def prepare(config: Config, model: PyTree, key: Key[Array, ""], num_classes: int = 0) -> PyTree:
    """A model as training begins with it: with adapters and a head, if it trains those."""
    adapters_key, head_key = jax.random.split(key)
    if config.method == "lora":
        model = lora.adapt(model, config.lora, key=adapters_key)
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


def train(run: Run[Config], base: Base, data: text.Text) -> None:
    """Fine-tune a language model; save it; show it and its held-out loss, before and after."""
    config, prompt = run.config, sample_prompt(data)
    training = _from_base(
        language.training(
            run, config.optimizer, data, lambda key, model: prepare(config, model, key)
        ),
        config,
        base,
    )
    language.check(training, data, sample_tokens=config.sample_tokens, prompt=len(prompt))
    sample_of = lambda model: language.sample(  # noqa: E731
        model,
        data.tokenizer,
        num_tokens=config.sample_tokens,
        seed=config.seed,
        prompt=prompt,
    )
    chosen = Chosen(run, save=saver(run, base))
    more = []
    if config.sample_every is not None:
        more.append(Samples(lambda x: sample_of(_merged(run, x)), every=config.sample_every))
    state, after = loop.fit(run, training, [*chosen.callbacks, *more])
    model, after = chosen.published(state), chosen.metrics(after)
    model = save(run, base, model, {**after, "steps": int(state.step)})
    del state, chosen, more  # and the optimizer's, whose room the model of before takes
    before = read_metrics(run.folder / "metrics.jsonl")[0]
    run.say(_compare(before, after))
    published = base.load()
    for when, shown in (("before", published), ("after", model)):
        run.say(f"\n--- a sample {when} ---\n{sample_of(shown)}")


AnyTraining = TypeVar("AnyTraining", bound=Training)


def _from_base(training: AnyTraining, config: Config, base: Base) -> AnyTraining:
    """The same training, of a model that there is, in full or in part."""
    return dataclasses.replace(training, pretrained=base.pretrained, trainable=trainable(config))


def _merged(run: Run[Config], model: PyTree) -> PyTree:
    """The plain model that computes the same, on the run's mesh as the model was.

    It is of one dtype, as sampling needs: trained parameters are float32, and frozen ones may not.
    What was quantised is dequantised.
    """
    dtypes = {x.dtype for x in jax.tree.leaves(model) if eqx.is_inexact_array(x)}
    quantized = any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized)))
    if not lora.has_adapters(model) and len(dtypes) == 1 and not quantized:
        return model

    @eqx.filter_jit
    def merge(model: PyTree) -> PyTree:
        model = dequantize(lora.merge(model))
        found = {x.dtype for x in jax.tree.leaves(model) if eqx.is_inexact_array(x)}
        model = cast(model, jnp.result_type(*found))
        return eqx.filter_shard(model, sharding.shardings(model, run.mesh, run.rules))

    return merge(model)


def train_classifier(run: Run[Config], base: Base, data: text.Text) -> None:
    """Fine-tune a model under a head for the classes of labelled rows; judge and save it."""
    config = run.config
    make_model = lambda key, model: prepare(config, model, key, len(data.classes))  # noqa: E731
    training = classification.training(run, config.optimizer, data, make_model)
    # No format but the zoo's has this head, and without it adapters are of no use.
    plain = classification.saver(base.tokenizer)
    save = lambda folder, model, metrics: plain(folder, _merged(run, model), metrics)  # noqa: E731
    classification.train(run, _from_base(training, config, base), save=save)


def save(run: Run[Config], base: Base, model: PyTree, metrics: dict[str, Any]) -> PyTree:
    """Save a model in its base's format, and its adapters alone if it has any; return it merged."""
    if lora.has_adapters(model):
        save_adapters(run.folder / "adapters", model, base=run.config.model)
        run.say(f"the adapters alone are in {run.folder / 'adapters'}")
    if run.config.quantize is not None:
        run.say(
            f"the merged model has the {run.config.base} base's matrices as they were trained "
            "beside, dequantised: it is as large as without --base"
        )
    merged = _merged(run, model)
    saver(run, base)(run.folder / "model", merged, metrics)
    run.say(f"the model is in {run.folder / 'model'}")
    return merged


def saver(run: Run[Config], base: Base) -> Save:
    """A function that saves a model, merged, in its base's format with its metrics."""
    return lambda folder, model, metrics: models.save(
        folder,
        _merged(run, model),
        format="hf" if base.is_hugging_face else "zoo",
        tokenizer=base.tokenizer,
        metrics=metrics,
    )


def sample_prompt(data: text.Text) -> Int[np.ndarray, "prompt"]:
    """The beginning of a sample: the first held-out prompt, or nothing."""
    corpus = data.held_out.corpus
    if corpus.counts is None:
        return np.zeros(0, np.int32)
    first = corpus[0].astype(np.int32)
    return first[: int(np.argmax(corpus.counts))]


def _compare(before: Mapping[str, Any], after: Mapping[str, float]) -> str:
    lines = [f"{'held out':18}{'before':>10}{'after':>10}"]
    return "\n".join(
        lines + [f"{name:18}{before[name]:10.4f}{value:10.4f}" for name, value in after.items()]
    )
