"""Fine-tuning itself, and what it saves and shows."""

import dataclasses
from collections.abc import Mapping
from math import nan
from typing import Any, TypeVar

from jaxtyping import PyTree

from zoo.data import text
from zoo.data.chats import ChatTemplate
from zoo.publishing import models
from zoo.publishing.families import choose_eos_ids, with_more_ends
from zoo.runs import loop
from zoo.runs.callbacks.evaluations import Samples, Save
from zoo.runs.metrics import read_metrics
from zoo.runs.run import Run
from zoo.tasks import classification, language
from zoo.tasks.finetuning import preferences
from zoo.tasks.finetuning.base import Base, merge
from zoo.tasks.finetuning.config import Config
from zoo.tasks.finetuning.data import sample_prompt
from zoo.tasks.finetuning.trained import prepare, trainable
from zoo.training.description import Training
from zoo.wrappers import lora


def train(run: Run[Config], base: Base, data: text.Text) -> None:
    """Fine-tune a language model; save it; show it and its held-out loss, before and after."""
    config, prompt = run.config, sample_prompt(data)
    chats = _are_chats(config, data)
    ends = answer_ends(config, base, chats=chats) if config.data.format != "text" else None
    make_model = lambda key, model: prepare(config, model, key)  # noqa: E731
    if config.data.format == "preferences":
        training = preferences.training(run, base, data, make_model)
    else:
        training = language.training(run, config.optimizer, data, make_model)
    training = _from_base(training, config, base)
    language.check(training, data, sample_tokens=config.sample_tokens, prompt=len(prompt))
    sample_of = lambda model: language.sample(  # noqa: E731
        model,
        data.tokenizer,
        num_tokens=config.sample_tokens,
        seed=config.seed,
        prompt=prompt,
        stop_tokens=ends,
        on_new_line=chats,
    )
    more = []
    if config.sample_every is not None:
        more.append(Samples(lambda x: sample_of(merge(run, x)), every=config.sample_every))
    trained = loop.fit(run, training, more, save=saver(run, base, chats=chats))
    after, steps = trained.model_metrics, int(trained.state.step)
    model = save(run, base, trained.model, {**after, "steps": steps}, chats=chats)
    del trained, more  # and the optimizer's state, whose room the model of before takes
    records = read_metrics(run.folder / "metrics.jsonl")
    before = next((x for x in records if x["step"] == 0), {})  # none where the file was lost
    run.say(_compare(before, after))
    published = base.load()
    for when, shown in (("before", published), ("after", model)):
        run.say(f"\n--- a sample {when} ---\n{sample_of(shown)}")


def train_classifier(run: Run[Config], base: Base, data: text.Text) -> None:
    """Fine-tune a model under a head for the classes of labelled rows; judge and save it."""
    config = run.config
    make_model = lambda key, model: prepare(config, model, key, len(data.classes))  # noqa: E731
    training = classification.training(run, config.optimizer, data, make_model)
    # No format but the zoo's has this head, and without it adapters are of no use.
    plain = classification.saver(base.tokenizer)
    as_stored = lambda model: base.as_stored(merge(run, model))  # noqa: E731
    save = lambda folder, model, metrics: plain(folder, as_stored(model), metrics)  # noqa: E731
    classification.train(run, _from_base(training, config, base), save=save)


def _are_chats(config: Config, data: text.Text) -> bool:
    """Whether the data are conversations, which the template frames."""
    return config.data.format != "text" and data.train.corpus.framed


def save(
    run: Run[Config],
    base: Base,
    model: PyTree,
    metrics: dict[str, Any],
    *,
    chats: bool | None = None,
) -> PyTree:
    """Save a model in its base's format, and its adapters alone if it has any; return it merged.

    `chats` is `saver`'s.
    """
    if lora.has_adapters(model):
        models.save_adapters(
            run.folder / "adapters",
            with_more_ends(model, _turn_ends(run, base, chats)),
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
    saver(run, base, chats=chats)(run.folder / "model", merged, metrics)
    run.say(f"the model is in {run.address}/model")
    return merged


def saver(run: Run[Config], base: Base, *, chats: bool | None = None) -> Save:
    """A function that saves a model, merged, in its base's format with its metrics.

    A model of `chats` (by default, of that format) ends its texts with the end of a turn as well.
    """
    more = _turn_ends(run, base, chats)
    return lambda folder, model, metrics: models.save(
        folder,
        with_more_ends(base.as_stored(merge(run, model)), more),
        format=base.format,
        tokenizer=base.tokenizer,
        metrics=metrics,
        like=base.folder,
    )


def _turn_ends(run: Run[Config], base: Base, chats: bool | None) -> tuple[int, ...]:
    """The ends that the run adds to the model's own: of chats, the end of a turn."""
    chats = run.config.data.format == "chats" if chats is None else chats
    return answer_ends(run.config, base, chats=True) if chats else ()


AnyTraining = TypeVar("AnyTraining", bound=Training)


def _from_base(training: AnyTraining, config: Config, base: Base) -> AnyTraining:
    """The same training, of an existing model, in full or in part."""
    remat = getattr(base.skeleton.config, "remat", None)
    return dataclasses.replace(
        training,
        pretrained=base.pretrained,
        trainable=trainable(config),
        remat=remat,
        remat_flag="--remat",
    )


def answer_ends(config: Config, base: Base, *, chats: bool | None = None) -> tuple[int, ...]:
    """The tokens that end a completion, or in `chats` (see `saver`) the assistant's turn."""
    chats = config.data.format == "chats" if chats is None else chats
    ends = choose_eos_ids(base.skeleton.config, base.tokenizer)
    turns = ChatTemplate(base.tokenizer).ends_of_turn if chats else ()
    return tuple(dict.fromkeys([*ends, *turns]))


def _compare(before: Mapping[str, Any], after: Mapping[str, float]) -> str:
    width = max(18, *(len(name) + 1 for name in after))
    lines = [f"{'held out':{width}}{'before':>16}{'after':>16}"]
    return "\n".join(
        lines
        + [f"{name:{width}}{before.get(name, nan):16.4f}{x:16.4f}" for name, x in after.items()]
    )
