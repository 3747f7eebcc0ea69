"""Fine-tuning: the text of a run, the training, and what is saved and shown."""

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from zoo.common.configuration import require
from zoo.data import rows, text
from zoo.data.chats import ChatTemplate, writes_time
from zoo.data.documents import help_topics
from zoo.data.prepared.opening import Prepared, check_tokenizer, open_text
from zoo.data.tokenizer import Tokenizer
from zoo.publishing import models
from zoo.publishing.families import choose_eos_ids, with_more_ends
from zoo.runs import loop
from zoo.runs.callbacks.evaluations import Samples, Save
from zoo.runs.metrics import read_metrics
from zoo.runs.run import Run
from zoo.tasks import classification, language
from zoo.tasks.finetuning.base import Base, merge, prepare
from zoo.tasks.finetuning.config import PREFERENCES, Config, Data
from zoo.training import optimizers
from zoo.training.description import Training
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier

# From a run, an optimizer, text, and how the model is made of its base, to the training of it.
Describe = Callable[[Run[Config], optimizers.Config, text.Text, Callable[..., PyTree]], Training]


# --- Its text ---------------------------------------------------------------------------------


def read_text(
    run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None, closed: bool = False
) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code.

    Rows with a `label` have their end too where they are `closed`, as for encoders.
    """
    config = run.config.data
    text.check_label(config, label)
    if config.format == "text":
        prepared = open_text(config, Data(), tokenizer, built_in=help_topics, label=label)
    else:
        prepared = _open_rows(run, config.format, tokenizer, label)
    check_tokenizer(
        prepared,
        tokenizer,
        "the model to fine-tune",
        "prepare the text again, with --tokenizer and the model's folder",
    )
    data = text.prepared_text(config, prepared, seed=run.config.seed, closed=closed)
    language.say_what_there_is(run, data)
    return data


def _open_rows(run: Run[Config], format: Any, tokenizer: Tokenizer, label: str | None) -> Prepared:
    """The text of rows; it says their form."""
    config = run.config.data
    if (label is not None and format != "tags") or not config.files:
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
    if label is not None:
        given["names"] = {"text": config.field, "tags": label}
        given["classes"] = rows.tags_in(config.files, given["names"])
    if format == "unpaired":
        given["classes"] = rows.LABELS
    prepared = open_text(config, Data(), tokenizer, rows=given)
    manifest = prepared.manifest
    count = sum(manifest.total(part).documents for part in ("train", "held_out"))
    count //= 2 if format in PREFERENCES else 1
    run.say(f"{count:,} examples of {format}: {manifest.form}")
    return prepared


def _first_start(run: Run[Config]) -> str:
    """The time of the run's first start, so that a resume on another day reads the same."""

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
        format not in PREFERENCES or describe is not language.training,
        f"data.format={format!r}: the next token is no preference; give `describe` the training on "
        "preferences, as recipes.finetune does",
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


def train_classifier(
    run: Run[Config], base: Base, data: classification.Labelled, processor: Any = None
) -> None:
    """Fine-tune a model under a head for the classes of labelled rows; judge and save it.

    The base's tokenizer is saved with it, or the `processor` that makes its inputs.
    """
    config = run.config
    make_model = lambda key, model: prepare(config, model, key, len(data.classes))  # noqa: E731
    training = classification.training(run, config.optimizer, data, make_model)

    def save(folder: Path, model: PyTree, metrics: dict[str, Any]) -> None:
        # The zoo's format has every head, and Hugging Face's only some.
        plain = base.as_stored(merge(run, model))
        models.save(folder, plain, tokenizer=processor or base.tokenizer, metrics=metrics)

    model = classification.train(run, from_base(training, config, base), save=save)
    if isinstance(model, Classifier) and lora.has_adapters(model):
        body = eqx.combine(model.body, base.prepared())  # with its own head, which is left out here
        _save_adapters(run, base, body)


def save(
    run: Run[Config],
    base: Base,
    model: PyTree,
    metrics: dict[str, Any],
    new_ends: tuple[int, ...],
) -> PyTree:
    """Save a model in its base's format, and its adapters alone if it has any; return it merged."""
    if lora.has_adapters(model):
        _save_adapters(run, base, with_more_ends(model, new_ends))
    if run.config.quantize is not None:
        run.say(
            f"the merged model has the {run.config.base} base's matrices as they were trained "
            "beside, dequantised: it is as large as without --base"
        )
    merged = merge(run, model)
    saver(run, base, new_ends)(run.folder / "model", merged, metrics)
    run.say(f"the model is in {run.address}/model")
    return merged


def _save_adapters(run: Run[Config], base: Base, model: PyTree) -> None:
    to = run.folder / "adapters"
    models.save_adapters(to, model, base=run.config.model, tokenizer=base.tokenizer)
    run.say(f"the adapters alone are in {run.address}/adapters")


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
        trainable=base.trainable,
        remat=getattr(base.skeleton.config, "remat", None),
        remat_flag="--remat",
    )
