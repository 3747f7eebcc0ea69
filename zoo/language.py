"""Language models of any family, from text to a published model: what their recipes share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo import generate, loop, losses, optimizers, publish, run, text
from zoo.plans import BucketPlan
from zoo.tokenizer import Tokenizer
from zoo.train import LossFunction


@dataclass(frozen=True, kw_only=True)
class Config(run.Config):
    """What the recipes of language models have beyond a run: text, an optimizer, a sample."""

    sample_tokens: int = 256
    """Tokens of the sample at the end."""
    data: text.Config = text.Config(tokenizer="bpe")
    optimizer: optimizers.Config = optimizers.Config()


def load(run: run.Run, *, label: str | None = None) -> text.Text:
    """The run's text, with a tokenizer that the run keeps; says what there is of it."""
    config = run.config
    data = text.load(
        config.data,
        seed=config.seed,
        tokenizer_folder=lambda make: run.once("tokenizer", make),
        label=label,
    )
    run.say(
        f"{len(data.train.corpus.tokens):,} tokens to train on, "
        f"{len(data.held_out.corpus.tokens):,} held out; an epoch is "
        f"{data.train.batches_per_epoch:,} batches, {data.train.padding_waste:.1%} padding"
    )
    if isinstance(data.train, BucketPlan):
        run.say(data.train.describe_buckets())
    return data


def train(
    run: run.Run,
    data: text.Text,
    make_model: Callable[[Any], PyTree],
    flops_per_token: float,
    loss: LossFunction = losses.next_token,
) -> None:
    """Train a language model, compare it with compressors, save it, and show a sample of it."""
    config = run.config
    mean_loss = loop.evaluator(run, losses.next_token, data.held_out)

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        loss = mean_loss(model, whole)["loss"]
        return {
            "eval_loss": loss,
            "perplexity": float(np.exp(loss)),
            "bits_per_byte": data.bits_per_byte(loss),
        }

    state, result = loop.fit(
        run,
        make_model,
        loss,
        optimizers.make_optimizer(config.optimizer, config.steps),
        data.train,
        fingerprint=data.fingerprint,
        evaluate=evaluate,
        schedule=optimizers.make_schedule(config.optimizer, config.steps),
        flops_per_token=flops_per_token,
    )
    rivals = ", ".join(f"{name} {bits:.3f}" for name, bits in data.compressors.items())
    run.say(f"held-out bits per byte: this model {result['bits_per_byte']:.3f}, {rivals}")
    publish.save(
        run.folder / "model",
        state.model,
        tokenizer=data.tokenizer,
        metrics={**result, "steps": int(state.step), "compressors": data.compressors},
    )
    run.say(f"the model is in {run.folder / 'model'}; a sample of it:\n")
    if run.is_main:
        print(sample(run.folder / "model", data.tokenizer, config))


def sample(folder: Path, tokenizer: Tokenizer, config: Config) -> str:
    """Text from the model as anyone would load it."""
    tokens = generate.generate(
        publish.load(folder),
        jnp.full((1, 1), tokenizer.separator_id, jnp.int32),
        max_new_tokens=config.sample_tokens,
        temperature=0.7,
        key=jax.random.key(config.seed),
    )
    return tokenizer.decode(tokens[0].tolist())
