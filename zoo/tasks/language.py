"""Language models of any family, from text to a published model, for all of their recipes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from zoo.common.configuration import may_differ, require
from zoo.data import text
from zoo.data.mixed_text import MixedText, read_mixture
from zoo.data.mixtures import MixtureDataset
from zoo.data.prepared.opening import is_mixture
from zoo.data.tokenizer import Tokenizer, begin_id, end_id
from zoo.decoding import sampling
from zoo.decoding.decoder import decoder_of
from zoo.publishing.models import save as save_model
from zoo.runs import evaluation, loop
from zoo.runs.callbacks.callback import Callback
from zoo.runs.callbacks.evaluations import Samples
from zoo.runs.config import Config as RunConfig
from zoo.runs.run import Run
from zoo.tasks import mixtures
from zoo.training import losses, optimizers
from zoo.training.description import Evaluate, Training
from zoo.training.state import skeleton_of

Published = Callable[[PyTree], PyTree]  # from a model in training to the one that is for use


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The fields of every language model's recipe: a run's, text, an optimizer, a sample."""

    sample_tokens: int = may_differ(256)
    """Tokens of the sample at the end."""
    sample_every: int | None = may_differ(None)
    """Steps between samples during training, which samples.jsonl keeps."""
    data: text.Config = text.Config(tokenizer="bpe")
    optimizer: optimizers.Config = optimizers.Config()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_samples(self)


def check_samples(config: Any, *, label: str | None = None) -> None:
    """Raise a ValueError for a configuration's samples out of range, or a classifier's samples."""
    tokens, every = config.sample_tokens, config.sample_every
    require(tokens >= 0, f"sample_tokens={tokens}: must not be negative; 0 is no sample")
    require(every is None or every >= 1, f"sample_every={every}: must be at least 1")
    require(
        every is None or label is None,
        f"sample_every={every}: a classifier (label={label!r}) writes no text; leave it out",
    )


def check_row_lengths(rows: Mapping[str, tuple[int, ...]], model: Any, what: str) -> None:
    """Raise a ValueError for rows with more tokens than a model's configuration has positions.

    `rows` has their lengths, by the field that says so.
    """
    limit = getattr(model, "max_seq_len", None)
    for flag, lengths in rows.items():
        require(
            limit is None or max(lengths) <= limit,
            f"{flag}={max(lengths)}: {what} has {limit} positions (its max_seq_len); give rows of "
            f"at most {limit} tokens, or a model with more positions",
        )


def read_text(
    run: Run[Config], *, label: str | None = None, source: text.Config | None = None
) -> text.Text:
    """The run's text, with a tokenizer that the run keeps; says how much text there is.

    Given a `source`, that is read in the place of the configuration's.
    """
    config = run.config
    check_samples(config, label=label)
    default = type(config).data
    if source is None:
        source = config.data
    else:
        default = dataclasses.replace(text.Config(), tokenizer=source.tokenizer)
    options: Any = {"seed": config.seed, "default": default}
    options["tokenizer_folder"] = functools.partial(run.once, "tokenizer")
    if is_mixture(source.files):
        require(label is None, f"label={label!r}: a mixture of sources has none; give one source")
        require(
            config.epochs is None,
            f"epochs={config.epochs}: each source of a mixture has its own; give steps",
        )
        mixed = read_mixture(source, steps=config.steps, **options)
        mixtures.record(run, mixed)
        data: text.Text = mixed
    else:
        data = text.read_text(source, label=label, **options)
    say_what_there_is(run, data)
    return data


def say_what_there_is(run: Run[RunConfig], data: text.Text) -> None:
    """Say how much text there is to train on, and in which rows."""
    run.say(
        f"{data.train.corpus.num_tokens:,} tokens to train on, "
        f"{data.held_out.corpus.num_tokens:,} held out; an epoch is "
        f"{data.train.batches_per_epoch:,} batches, {data.train.padding_waste:.1%} padding"
    )
    for found in [one.special_tokens for one in getattr(data, "sources", {"": data}).values()]:
        if found:
            run.say(found)
    if data.prepared is not None:
        run.say(
            f"tokens from {data.prepared.folder}, with its tokenizer of "
            f"{data.tokenizer.vocab_size:,} ids"
        )
    if lines := data.train.describe_buckets():
        run.say(lines)
    if isinstance(data.train, MixtureDataset):
        run.say(mixtures.describe(data.train, run.config.steps))


def evaluator(run: Run[RunConfig], data: text.Text) -> Evaluate:
    """From a language model to its held-out loss, perplexity and bits per byte."""
    mean_loss: Evaluate = (
        mixtures.evaluator(run, losses.next_token, data)
        if isinstance(data, MixedText)
        else evaluation.evaluator(run, losses.next_token, data.held_out)
    )

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        means = mean_loss(model, whole)
        loss = means.pop("loss")
        bits = data.bits_per_byte(loss)
        found = {"eval_loss": loss, "perplexity": float(np.exp(loss)), "bits_per_byte": bits}
        return {**found, **means}  # of each source of a mixture

    return evaluate


def training(
    run: Run[RunConfig],
    optimizer: optimizers.Config,
    data: text.Text,
    make_model: Callable[..., PyTree],
) -> Training:
    """The training of a language model on the next token, with its held-out bits per byte."""
    steps = run.steps_of(data.train)
    return Training(
        make_model=optimizers.initialise(optimizer, make_model),
        loss_fn=losses.next_token,
        optimizer=optimizers.make_optimizer(optimizer, steps),
        schedule=optimizers.make_schedule(optimizer, steps),
        data=data.train,
        fingerprint=data.fingerprint,
        evaluate=evaluator(run, data),
    )


def train(
    run: Run[Config],
    data: text.Text,
    training: Training,
    *,
    published: Published = lambda model: model,
) -> dict[str, Any]:
    """Train a language model, compare it with compressors, save it, and show a sample of it.

    `published` makes the model for use from the one in training. Returns its metrics.
    """
    config = run.config
    check(training, data, sample_tokens=config.sample_tokens, published=published)
    sample_of = lambda model: sample(  # noqa: E731
        published(model), data.tokenizer, num_tokens=config.sample_tokens, seed=config.seed
    )
    more: list[Callback] = (
        [] if config.sample_every is None else [Samples(sample_of, every=config.sample_every)]
    )
    if isinstance(data.train, MixtureDataset):
        more.append(mixtures.Epochs(data.train))
        loss_fn = losses.per_source(training.loss_fn, [*data.train.datasets])
        training = dataclasses.replace(training, loss_fn=loss_fn)

    def save(folder: Path, model: PyTree, metrics: dict[str, Any]) -> None:
        metrics = {**metrics, "compressors": data.compressors}
        save_model(folder, published(model), tokenizer=data.tokenizer, metrics=metrics)

    trained = loop.fit(run, training, more, save=save)
    model, result = trained.model, trained.model_metrics
    rivals = ", ".join(f"{name} {bits:.3f}" for name, bits in data.compressors.items())
    run.say(f"held-out bits per byte: this model {result['bits_per_byte']:.3f}, {rivals}")
    save(run.folder / "model", model, {**result, "steps": int(trained.state.step)})
    run.say(f"the model is in {run.address}/model; a sample of it:\n")
    run.say(sample_of(model))
    return result


def check(
    training: Training,
    data: text.Text,
    *,
    sample_tokens: int,
    prompt: int = 1,
    published: Published = lambda model: model,
) -> None:
    """Refuse a model before any compute that could not be trained on the text, or sampled from.

    Raises:
        ValueError: it sees the tokens that it is to predict, or has fewer positions than a row
            takes, or than the sample after a `prompt` of so many tokens.
    """
    given = () if training.pretrained is None else (skeleton_of(training.pretrained),)
    skeleton = eqx.filter_eval_shape(training.make_model, jax.random.key(0), *given)
    decoder = decoder_of(published(skeleton))
    decoder.check_decoder(0)
    rows = {"the longest row of data": (*data.train.buckets, *data.held_out.buckets)}
    check_row_lengths(rows, decoder.config, "the model")
    try:
        decoder.check_decoder(prompt + sample_tokens)
    except ValueError as error:
        raise ValueError(
            f"sample_tokens={sample_tokens}: {error}; lower the one, or raise the other"
        ) from error


def sample(
    model: PyTree,
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    seed: int,
    prompt: Sequence[int] | None = None,
    stop_tokens: Sequence[int] | None = None,
    on_new_line: bool = False,
) -> str:
    """Text from a model, where it lies, after a prompt, or from the beginning of a document.

    It ends with one of the `stop_tokens`, the model's own if not given; `on_new_line` puts a line
    break after the prompt. All processes call it, as a model may lie on the devices of several.
    """
    prompt = document_begin(tokenizer) if prompt is None else prompt
    tokens = sampling.generate(
        model,
        [prompt],
        max_new_tokens=num_tokens,
        temperature=0.7,
        stop_tokens=stop_tokens,
        key=jax.random.key(seed),
    )
    if not on_new_line:
        return tokenizer.decode(tokens[0])
    given, new = tokens[0][: len(prompt)], tokens[0][len(prompt) :]
    return f"{tokenizer.decode(given).rstrip()}\n{tokenizer.decode(new)}"


def document_begin(tokenizer: Tokenizer) -> list[int]:
    """The token from which a model begins a document; without one, the end of another document."""
    begin = begin_id(tokenizer)
    return [end_id(tokenizer) if begin is None else begin]
