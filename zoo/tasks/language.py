"""Language models of any family, from text to a published model: what their recipes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo.data import text
from zoo.data.token_plans import BucketPlan
from zoo.data.tokenizer import Tokenizer
from zoo.decoding import sampling
from zoo.decoding.decoder import decoder_of
from zoo.publishing.models import save as save_model
from zoo.runs import evaluation, loop, run
from zoo.training import losses, optimizers
from zoo.training.state import TrainState
from zoo.training.step import LossFunction


@dataclass(frozen=True, kw_only=True)
class Config(run.Config):
    """What the recipes of language models have beyond a run: text, an optimizer, a sample."""

    sample_tokens: int = 256
    """Tokens of the sample at the end."""
    data: text.Config = text.Config(tokenizer="bpe")
    optimizer: optimizers.Config = optimizers.Config()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sample_tokens(self.sample_tokens)


def check_sample_tokens(count: int) -> None:
    """Raise a ValueError for less than none."""
    if count < 0:
        raise ValueError(f"sample_tokens={count}: must not be negative; 0 is no sample")


def load(run: run.Run, *, label: str | None = None) -> text.Text:
    """The run's text, with a tokenizer that the run keeps; says what there is of it."""
    config = run.config
    data = text.load(
        config.data,
        seed=config.seed,
        tokenizer_folder=lambda make: run.once("tokenizer", make),
        label=label,
    )
    say_what_there_is(run, data)
    return data


def say_what_there_is(run: run.Run, data: text.Text) -> None:
    """Say how much text there is to train on, and in which rows."""
    run.say(
        f"{len(data.train.corpus.tokens):,} tokens to train on, "
        f"{len(data.held_out.corpus.tokens):,} held out; an epoch is "
        f"{data.train.batches_per_epoch:,} batches, {data.train.padding_waste:.1%} padding"
    )
    if isinstance(data.train, BucketPlan):
        run.say(data.train.describe_buckets())


def train(
    run: run.Run,
    data: text.Text,
    make_model: Callable[[Any], PyTree],
    flops_per_token: float,
    loss: LossFunction = losses.next_token,
) -> None:
    """Train a language model, compare it with compressors, save it, and show a sample of it."""
    state, result = fit(run, data, make_model, loss=loss, flops_per_token=flops_per_token)
    rivals = ", ".join(f"{name} {bits:.3f}" for name, bits in data.compressors.items())
    run.say(f"held-out bits per byte: this model {result['bits_per_byte']:.3f}, {rivals}")
    save_model(
        run.folder / "model",
        state.model,
        tokenizer=data.tokenizer,
        metrics={**result, "steps": int(state.step), "compressors": data.compressors},
    )
    run.say(f"the model is in {run.folder / 'model'}; a sample of it:\n")
    config = run.config
    run.say(sample(state.model, data.tokenizer, num_tokens=config.sample_tokens, seed=config.seed))


def fit(
    run: run.Run,
    data: text.Text,
    make_model: Callable[..., PyTree],
    *,
    loss: LossFunction = losses.next_token,
    pretrained: PyTree = None,
    prompt: Sequence[int] | np.ndarray = (),
    **options: Any,
) -> tuple[TrainState, dict[str, float]]:
    """`loop.fit`, which takes the options, of a language model: the state, and how good it is.

    Raises:
        ValueError: before any compute, a model that sees the tokens it is to predict, or that has
            fewer positions than a row or than the sample to come, after its `prompt`, takes.
    """
    config = run.config
    given = () if pretrained is None else (pretrained,)
    _check(config, data, eqx.filter_eval_shape(make_model, jax.random.key(0), *given), len(prompt))
    mean_loss = evaluation.evaluator(run, losses.next_token, data.held_out)

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        loss = mean_loss(model, whole)["loss"]
        return {
            "eval_loss": loss,
            "perplexity": float(np.exp(loss)),
            "bits_per_byte": data.bits_per_byte(loss),
        }

    return loop.fit(
        run,
        make_model,
        loss,
        optimizers.make_optimizer(config.optimizer, config.steps),
        data.train,
        fingerprint=data.fingerprint,
        evaluate=evaluate,
        schedule=optimizers.make_schedule(config.optimizer, config.steps),
        pretrained=pretrained,
        **options,
    )


def _check(config: Any, data: text.Text, skeleton: PyTree, prompt: int) -> None:
    decoder = decoder_of(skeleton)
    decoder.check_decoder(0)
    lengths = {
        "the longest row of data": max(*data.train.buckets, *data.held_out.buckets),
        f"sample_tokens={config.sample_tokens}": 1 + prompt + config.sample_tokens,
    }
    for what, length in lengths.items():
        try:
            decoder.check_decoder(length)
        except ValueError as error:
            raise ValueError(f"{what}: {error}; lower the one, or raise the other") from error


def sample(
    model: PyTree,
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    seed: int,
    prompt: Sequence[int] | np.ndarray = (),
) -> str:
    """Text from a model, where it lies, after a prompt if there is one.

    All processes call it, as a model may lie on the devices of several.
    """
    tokens = sampling.generate(
        model,
        jnp.asarray([[tokenizer.separator_id, *prompt]], jnp.int32),
        max_new_tokens=num_tokens,
        temperature=0.7,
        key=jax.random.key(seed),
    )
    return tokenizer.decode(tokens[0].tolist())
