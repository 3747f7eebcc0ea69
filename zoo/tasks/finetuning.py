"""Fine-tuning: a published model, whatever its format, on other data, in full or in part."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.base.configuration import added, may_differ, require
from zoo.base.files import local_path
from zoo.data import completions, text
from zoo.data.documents import Document, help_topics
from zoo.data.tokenizer import FILE_NAME, Tokenizer, get_tokenizer, load_tokenizer
from zoo.nn.attention import Implementation
from zoo.nn.parameters import cast
from zoo.nn.protocols import SequenceModel
from zoo.nn.quantized import Kind, dequantize, is_quantized
from zoo.nn.remat import Policy
from zoo.publishing import adapters, models, token_ids
from zoo.publishing.families import reconfigured
from zoo.publishing.folder import hugging_face_config
from zoo.publishing.hf.linears import with_paths
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
from zoo.tasks.generation import Chat
from zoo.training import optimizers
from zoo.training.description import Training
from zoo.training.pretrained import Pretrained
from zoo.training.state import Trainable, frozen_leaves
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


# Rates and decays per method: adapters begin at zero, and the parameters at what they learned.
LEARNING_RATES = {"full": 3e-4, "lora": 1e-3}
WEIGHT_DECAYS = {"full": 0.01, "lora": 0.0}


@dataclass(frozen=True)
class Optimizer(optimizers.Config):
    """An optimizer whose rate and decay are those of the method, where none are given."""

    learning_rate: float | None = None  # type: ignore[assignment]
    """Peak learning rate; if not given, 3e-4 for method full, and 1e-3 for lora."""
    weight_decay: float | None = None  # type: ignore[assignment]
    """Decoupled weight decay, on matrices only; if not given, 0.01 for full, and 0 for lora."""

    def __post_init__(self) -> None:
        if self.learning_rate is None or self.weight_decay is None:
            self.completed("full", {})
        else:
            super().__post_init__()

    def completed(self, method: str, stored: Mapping[str, Any]) -> "Optimizer":
        """The same with numbers: those of the stored run, or else those of the method."""
        defaults = {"learning_rate": LEARNING_RATES, "weight_decay": WEIGHT_DECAYS}
        missing = {name: x for name, x in defaults.items() if getattr(self, name) is None}
        numbers = {name: stored.get(name, x[method]) for name, x in missing.items()}
        return dataclasses.replace(self, **numbers)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The fields of fine-tuning: those of a run, a model to begin with, text, an optimizer."""

    model: str = "lm-python"
    """Model to begin with: a name on the shelf, a run's folder, a model's or one of adapters, which
    are merged, or a hub id."""
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
    remat: Policy | None = may_differ(None)
    """Rematerialisation in the backward pass, to save memory: none, dots, dots_no_batch, full; that
    of the stored model if not given."""
    dropout: float | None = added(None)
    """Rate of dropout in training; that of the stored model if not given."""
    attention: Implementation | None = may_differ(None)
    """Attention kernel: auto, chunked, xla, or cudnn; that of the stored model if not given."""
    scan_layers: bool | None = may_differ(None)
    """Run the layers by lax.scan, or unrolled; as the stored model does if not given."""
    lora: LoraConfig = LoraConfig()
    adapter_format: adapters.Format = added("zoo")
    """Format in which the trained adapters are saved; PEFT's is peft."""
    data: Data = Data()
    optimizer: optimizers.Config = Optimizer()

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
            self.method == "lora" or self.lora == type(self).lora,
            f"lora={self.lora}: method={self.method!r} has no adapters; give --method lora too",
        )
        require(
            self.method == "lora" or self.base == "stored",
            f"base={self.base!r}: quantised matrices are not trained; take method='lora', which "
            "trains adapters beside them, or base='stored'",
        )

    def completed(self, stored: Mapping[str, Any]) -> "Config":
        """The configuration with the numbers of its optimizer."""
        if not isinstance(self.optimizer, Optimizer):
            return self
        optimizer = self.optimizer.completed(self.method, stored.get("optimizer", {}))
        return dataclasses.replace(self, optimizer=optimizer)

    @property
    def overrides(self) -> dict[str, Any]:
        """The given values of fields of the model's own configuration."""
        names = ("remat", "dropout", "attention", "scan_layers")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

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
        self.is_hugging_face = hugging_face_config(adapters.whole(self.folder)) is not None
        stored = models.skeleton(self.folder, quantize=config.quantize, weights=weights)
        if config.quantize is not None and lora.has_adapters(stored):
            raise ValueError(
                f"base={config.base!r}: {config.model} has adapters, and merged with them its "
                "matrices would be whole: give the model that they adapt, or base='stored'"
            )
        merged = eqx.filter_eval_shape(lora.merge, stored)
        self.skeleton: Any = reconfigured(merged, config.overrides)
        self._stored_config, self._run = getattr(merged, "config", None), run
        leaves = jax.tree.leaves(stored, is_leaf=is_quantized)
        if config.method != "lora" and any(map(is_quantized, leaves)):
            raise ValueError(
                f"model={config.model!r} is stored quantised, and quantised matrices are not "
                "trained: take method='lora', which trains adapters beside them, or the model that "
                "it was made of"
            )
        is_sequence = isinstance(self.skeleton, SequenceModel)
        size = self.skeleton.config.vocab_size if is_sequence else None
        if size is None:
            raise ValueError(
                f"model={config.model!r} is a {type(self.skeleton).__name__} that reads no tokens: "
                "begin with a transformer, a BERT, or an RNN with a vocab_size"
            )
        _check_lengths(config, self.skeleton.config)
        _check_trainable(config, self.skeleton)
        if config.method == "lora":  # before the text is read
            adapted = eqx.filter_eval_shape(
                lambda model: prepare(config, model, jax.random.key(0)), self.skeleton
            )
            chosen = lora.config_of(adapted)
            adapters.check_format(config.adapter_format, self.skeleton, chosen, self.folder)
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
        return reconfigured(model, self._run.config.overrides)

    def as_stored(self, model: PyTree) -> PyTree:
        """A model of this run with the fields of the base that the run had other values for."""
        names = self._run.config.overrides
        return reconfigured(model, {name: getattr(self._stored_config, name) for name in names})

    @property
    def pretrained(self) -> Pretrained:
        """The model for a training, which loads it when it begins."""
        is_planned = bool(self._run.config.plan)
        checksum = "" if is_planned else models.weights_checksum(self.folder)
        return Pretrained(self.skeleton, self.load, checksum)


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


def _check_trainable(config: Config, skeleton: PyTree) -> None:
    """Refuse patterns that match nothing, before the text is read."""
    num_classes = 2 if config.label else 0  # or however many there are
    prepared = eqx.filter_eval_shape(
        lambda key, model: prepare(config, model, key, num_classes), jax.random.key(0), skeleton
    )
    frozen_leaves(prepared, trainable(config))


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
    folder = adapters.nearest(base.folder, FILE_NAME)
    if not given and not (folder / FILE_NAME).is_file():
        raise ValueError(f"{folder} has no {FILE_NAME}: name one by --data.tokenizer, or 'bytes'")
    tokenizer = get_tokenizer(given) if given else load_tokenizer(folder)
    return load_tokenizer(run.once("tokenizer", tokenizer.save))


def read_text(run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code."""
    config = run.config.data
    text.check_label(config, label)
    documents, tokenize = _documents(run, config, tokenizer, label)
    if config.format != "text" and len(documents) < 2:
        raise ValueError(
            f"data.files={config.files!r} has one line of {config.format}: give two or more, one "
            "of which is held out"
        )
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


def _documents(
    run: Run[Config], config: Data, tokenizer: Tokenizer, label: str | None
) -> tuple[list[Document], Any]:
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
        if template.writes_time:  # a run resumed on another day reads the same
            template = completions.chat_template(tokenizer, _first_start(run))
        chats = completions.read_chats(config.files, template, field=config.messages)
        return chats, completions.tokenize_chats
    documents = text.read_documents_of(config, label) if config.files else help_topics()
    return documents, text.tokenize


def _first_start(run: Run[Config]) -> datetime:
    """The time of the run's first start, which the run keeps."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "time.txt").write_text(datetime.now().isoformat())

    return datetime.fromisoformat((run.once("first_start", write) / "time.txt").read_text())


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


def train(run: Run[Config], base: Base, data: text.Text) -> None:
    """Fine-tune a language model; save it; show it and its held-out loss, before and after."""
    config, prompt = run.config, sample_prompt(data)
    ends = answer_ends(config, base) if config.data.format != "text" else None
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
        stop_tokens=ends,
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
    remat = getattr(base.skeleton.config, "remat", None)
    return dataclasses.replace(
        training,
        pretrained=base.pretrained,
        trainable=trainable(config),
        remat=remat,
        remat_flag="--remat",
    )


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
    as_stored = lambda model: base.as_stored(_merged(run, model))  # noqa: E731
    save = lambda folder, model, metrics: plain(folder, as_stored(model), metrics)  # noqa: E731
    classification.train(run, _from_base(training, config, base), save=save)


def save(run: Run[Config], base: Base, model: PyTree, metrics: dict[str, Any]) -> PyTree:
    """Save a model in its base's format, and its adapters alone if it has any; return it merged."""
    if lora.has_adapters(model):
        adapters.save_adapters(
            run.folder / "adapters",
            model,
            base=run.config.model,
            format=run.config.adapter_format,
            tokenizer=base.tokenizer,
        )
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
    """A function that saves a model, merged, in its base's format with its metrics.

    A model of chats ends its texts with the end of a turn as well.
    """
    more = answer_ends(run.config, base) if run.config.data.format == "chats" else ()
    return lambda folder, model, metrics: models.save(
        folder,
        token_ids.with_more_ends(base.as_stored(_merged(run, model)), more),
        format="hf" if base.is_hugging_face else "zoo",
        tokenizer=base.tokenizer,
        metrics=metrics,
        like=base.folder,
    )


def sample_prompt(data: text.Text) -> list[int]:
    """The beginning of a sample: that of a document, or the first held-out prompt."""
    corpus, begin = data.held_out.corpus, language.document_begin(data.tokenizer)
    if corpus.counts is None:
        return begin
    first = corpus[0][: int(np.argmax(corpus.counts))].tolist()
    return first if first and corpus.framed else [*begin, *first]


def answer_ends(config: Config, base: Base) -> tuple[int, ...]:
    """The tokens that end a completion, or in a chat the assistant's turn."""
    ends = token_ids.choose_eos_ids(base.skeleton.config, base.tokenizer)
    turns = Chat(base.tokenizer).end_of_turn() if config.data.format == "chats" else ()
    return tuple(dict.fromkeys([*ends, *turns]))


def _compare(before: Mapping[str, Any], after: Mapping[str, float]) -> str:
    lines = [f"{'held out':18}{'before':>10}{'after':>10}"]
    return "\n".join(
        lines + [f"{name:18}{before[name]:10.4f}{value:10.4f}" for name, value in after.items()]
    )
