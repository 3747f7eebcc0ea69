"""Fine-tuning: the model to begin with, its text, the training, and what is saved and shown."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.common import configuration
from zoo.common.configuration import require
from zoo.data import rows, text
from zoo.data.chats import ChatTemplate, with_chat_template, writes_time
from zoo.data.documents import help_topics
from zoo.data.prepared.opening import Prepared, check_tokenizer
from zoo.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from zoo.nn.products import dequantize, is_quantized
from zoo.nn.protocols import SequenceModel
from zoo.nn.stateful import cast, is_kept
from zoo.publishing import formats, models
from zoo.publishing.families import choose_eos_ids, reconfigured, with_more_ends
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest, whole
from zoo.runs import loop
from zoo.runs.callbacks.evaluations import Samples, Save
from zoo.runs.metrics import read_metrics
from zoo.runs.run import Run
from zoo.sharding.axes import keystr
from zoo.tasks import classification, language
from zoo.tasks.finetuning.config import Config, Data
from zoo.training import optimizers
from zoo.training.description import Training
from zoo.training.state import Pretrained, Trainable, frozen_leaves, standard_promotion
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier

# From a run, an optimizer, text, and how the model is made of its base, to the training of it.
Describe = Callable[[Run[Config], optimizers.Config, text.Text, Callable[..., PyTree]], Training]


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
        is_sequence = isinstance(self.skeleton, SequenceModel)
        size = self.skeleton.config.vocab_size if is_sequence else None
        if size is None:
            raise ValueError(
                f"model={config.model!r} is a {type(self.skeleton).__name__} that reads no tokens: "
                "begin with a transformer, or an RNN with a vocab_size"
            )
        language.check_row_lengths(config.row_lengths, self.skeleton.config, config.model)
        # Patterns that match nothing, and adapters that cannot be saved, before the text is read.
        num_classes = 2 if config.label else 0  # or more
        prepared = eqx.filter_eval_shape(
            lambda model: prepare(config, model, jax.random.key(0), num_classes), self.skeleton
        )
        frozen_leaves(prepared, trainable(config))
        if config.method == "lora" and not num_classes:  # whose adapters are not saved alone
            formats.for_adapters().check(self.skeleton, lora.config_of(prepared))
        given, folder = config.data.tokenizer, nearest(self.folder, FILE_NAME)
        require(
            bool(given) or (folder / FILE_NAME).is_file(),
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


def merge(run: Run[Config], model: PyTree) -> PyTree:
    """The plain model that computes the same, on the run's mesh as the model was.

    It is of one dtype, as sampling needs: trained parameters are float32, and frozen ones may not.
    What was quantised is dequantised.
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


# --- Its text ---------------------------------------------------------------------------------


def read_text(run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code."""
    config = run.config.data
    text.check_label(config, label)
    if config.format == "text":
        prepared = text.open_text(config, Data(), tokenizer, built_in=help_topics, label=label)
    else:
        prepared = _open_rows(run, config.format, tokenizer, label)
    check_tokenizer(
        prepared,
        tokenizer,
        "the model to fine-tune",
        "prepare the text again, with --tokenizer and the model's folder",
    )
    data = text.prepared_text(config, prepared, seed=run.config.seed)
    language.say_what_there_is(run, data)
    return data


def _open_rows(run: Run[Config], format: Any, tokenizer: Tokenizer, label: str | None) -> Prepared:
    """The text of rows, whose form is said."""
    config = run.config.data
    if label is not None or not config.files:
        raise ValueError(
            f"data.format={format!r} takes data.files (now {config.files!r}) and no label "
            f"(now {label!r})"
        )
    if format == "chats":
        ChatTemplate(tokenizer)  # a tokenizer without one is refused before any file is read
    given: rows.RowOptions = {
        "format": format,
        "names": {name: getattr(config, name) for name in ("prompt", "completion", "messages")},
        "now": _first_start(run) if writes_time(tokenizer) else None,
    }
    prepared = text.open_text(config, Data(), tokenizer, rows=given)
    manifest = prepared.manifest
    count = sum(manifest.total(part).documents for part in ("train", "held_out"))
    count //= 2 if format == "preferences" else 1
    run.say(f"{count:,} examples of {format}: {manifest.form}")
    return prepared


def _first_start(run: Run[Config]) -> str:
    """The time of the run's first start, so that one that goes on another day reads the same."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "time.txt").write_text(datetime.now().isoformat())

    return (run.once("first_start", write) / "time.txt").read_text()


# --- The training -----------------------------------------------------------------------------


def train(
    run: Run[Config], base: Base, data: text.Text, describe: Describe = language.training
) -> None:
    """Fine-tune a language model; save it; show it and its held-out loss, before and after.

    `describe` says what is trained: by default the next token.
    """
    config, format = run.config, run.config.data.format
    require(
        format != "preferences" or describe is not language.training,
        "data.format='preferences': the next token of pairs is no preference; give `describe` the "
        "training on pairs, as recipes.finetune does",
    )
    is_chat = format != "text" and data.train.corpus.framed
    turns = ChatTemplate(base.tokenizer).ends_of_turn if is_chat else ()
    ends = (*choose_eos_ids(base.skeleton.config, base.tokenizer), *turns)
    prompt = _sample_prompt(data)
    make_model = lambda key, model: prepare(config, model, key)  # noqa: E731
    training = from_base(describe(run, config.optimizer, data, make_model), config, base)
    language.check(training, data, sample_tokens=config.sample_tokens, prompt=len(prompt))
    sample_of = lambda model: language.sample(  # noqa: E731
        model,
        data.tokenizer,
        num_tokens=config.sample_tokens,
        seed=config.seed,
        prompt=prompt,
        stop_tokens=None if format == "text" else ends,
        on_new_line=is_chat,
    )
    more = []
    if config.sample_every is not None:
        more.append(Samples(lambda x: sample_of(merge(run, x)), every=config.sample_every))
    new_ends = ends if is_chat else ()
    trained = loop.fit(run, training, more, save=saver(run, base, new_ends))
    after, steps = trained.model_metrics, int(trained.state.step)
    model = save(run, base, trained.model, {**after, "steps": steps}, new_ends)
    del trained, more  # and the optimizer's state, whose room the model of before takes
    say_before_and_after(run, after)
    published = base.load()
    for when, shown in (("before", published), ("after", model)):
        run.say(f"\n--- a sample {when} ---\n{sample_of(shown)}")


def say_before_and_after(run: Run[Config], after: Mapping[str, float]) -> None:
    """Show the held-out metrics of a run's end beside those before its first step."""
    records = read_metrics(run.folder / "metrics.jsonl")
    before = next((x for x in records if x["step"] == 0), {})  # none where the file was lost
    width = max(18, *(len(name) + 1 for name in after))
    run.say(f"{'held out':{width}}{'before':>16}{'after':>16}")
    for name, x in after.items():
        run.say(f"{name:{width}}{before.get(name, nan):16.4f}{x:16.4f}")


def _sample_prompt(data: text.Text) -> list[int]:
    """The beginning of a sample: that of a document, or the first held-out prompt."""
    corpus, begin = data.held_out.corpus, language.document_begin(data.tokenizer)
    if (counted := corpus.counted(0)) is None:
        return begin
    first = corpus[0][: int(np.argmax(counted))].tolist()
    return first if first and corpus.framed else [*begin, *first]


def train_classifier(run: Run[Config], base: Base, data: text.Text) -> None:
    """Fine-tune a model under a head for the classes of labelled rows; judge and save it."""
    config = run.config
    make_model = lambda key, model: prepare(config, model, key, len(data.classes))  # noqa: E731
    training = classification.training(run, config.optimizer, data, make_model)

    def save(folder: Path, model: PyTree, metrics: dict[str, Any]) -> None:
        # No format but the zoo's has this head, and without it adapters are of no use.
        plain = base.as_stored(merge(run, model))
        models.save(folder, plain, tokenizer=base.tokenizer, metrics=metrics)

    classification.train(run, from_base(training, config, base), save=save)


def save(
    run: Run[Config],
    base: Base,
    model: PyTree,
    metrics: dict[str, Any],
    new_ends: tuple[int, ...],
) -> PyTree:
    """Save a model in its base's format, and its adapters alone if it has any; return it merged."""
    if lora.has_adapters(model):
        models.save_adapters(
            run.folder / "adapters",
            with_more_ends(model, new_ends),
            base=run.config.model,
            tokenizer=base.tokenizer,
        )
        run.say(f"the adapters alone are in {run.address}/adapters")
    if run.config.quantize is not None:
        run.say(
            f"the merged model has the {run.config.base} base's matrices as they were trained "
            "beside, dequantised: it is as large as without --base"
        )
    merged = merge(run, model)
    saver(run, base, new_ends)(run.folder / "model", merged, metrics)
    run.say(f"the model is in {run.address}/model")
    return merged


def saver(run: Run[Config], base: Base, new_ends: tuple[int, ...]) -> Save:
    """A function that saves a model, merged, in its base's format with its metrics.

    Its texts end at `new_ends` as well, such as the end of a turn in a chat; () adds none.
    """
    return lambda folder, model, metrics: models.save(
        folder,
        with_more_ends(base.as_stored(merge(run, model)), new_ends),
        format=base.format,
        tokenizer=base.tokenizer,
        metrics=metrics,
        like=base.folder,
    )


AnyTraining = TypeVar("AnyTraining", bound=Training)


def from_base(training: AnyTraining, config: Config, base: Base) -> AnyTraining:
    """The same training, of an existing model, in full or in part."""
    return dataclasses.replace(
        training,
        pretrained=base.pretrained,
        trainable=trainable(config),
        remat=getattr(base.skeleton.config, "remat", None),
        remat_flag="--remat",
    )
