"""Train a recurrent network on text: a language model, or a classifier of labelled rows.

    python -m recipes.rnn

With no flag each function in the source code of Python's standard library is a row, padded to the
smallest of four buckets that holds it. It prints each bucket's share of padding, and the
compiles per bucket; then, as `recipes.lm`, held-out bits per byte and a sample. On two cores of an
AMD EPYC without AVX-512 (jax 0.10.2) that takes 5 minutes and reaches 2.1 bits per byte; gzip -9
has 4.1 there and xz -9 5.1, on each function alone.

    python -m recipes.rnn --run-dir runs/reviews --data 'reviews/*.jsonl' --label stars

trains a classifier on JSON lines, or a CSV or Parquet file, whose field `text` (`--data.field`) is
the text and whose field `stars` is the label.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Array, Key

import zoo
from zoo import classification, language, optimizers, rnn, text
from zoo.runs.command_line import cli


@dataclass(frozen=True, kw_only=True)
class Config(language.Config):
    """Train a recurrent network on text: a language model, or with --label a classifier."""

    run_dir: Path | str = Path("runs/rnn")
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    steps: int = 300
    """Optimizer steps in all; more than before continues a finished run."""
    label: str | None = None
    """Field of --data that holds a row's label: trains a classifier of rows, from the mean of a
    row's steps unless --model.pooling is last."""
    model: rnn.Config = rnn.Config(vocab_size=64, hidden_size=384, num_layers=1, embed_size=256)
    data: text.Config = text.Config(
        documents="functions",
        tokenizer="bpe",
        rows="bucketed",
        buckets=(32, 64, 128, 256),
        too_long="split",
        batch_size=64,
    )
    optimizer: optimizers.Config = optimizers.Config(learning_rate=3e-3)


def main(config: Config) -> None:
    """Train, evaluate, show and save."""
    with zoo.Run(config) as run:
        data = language.read_text(run, label=config.label)
        model = model_config(config, data)

        def make_model(key: Key[Array, ""]) -> rnn.RNN:
            return rnn.RNN(model, key=key)

        if config.label is None:
            training = dataclasses.replace(
                language.training(run, config.optimizer, data, make_model),
                flops_per_token=rnn.num_flops_per_token(model),
                remat=model.remat,
            )
            language.train(run, data, training)
        else:
            classifier = classification.training(run, config.optimizer, data, make_model)
            classifier = dataclasses.replace(classifier, remat=model.remat)
            classification.train(run, classifier, data.tokenizer)


def model_config(config: Config, data: text.Text) -> rnn.Config:
    """The model's configuration, with room for all ids of the tokenizer, and for the classes.

    Raises:
        ValueError: another number of outputs than classes was given.
    """
    model = dataclasses.replace(
        config.model, vocab_size=data.vocab_size(at_least=config.model.vocab_size or 0)
    )
    if not data.classes:
        return model
    if model.out_size not in (None, len(data.classes)):
        raise ValueError(
            f"model.out_size={model.out_size}: the data has {len(data.classes)} classes; leave the "
            "flag out"
        )
    pooling = "mean" if model.pooling == "none" else model.pooling
    return dataclasses.replace(model, out_size=len(data.classes), pooling=pooling)


if __name__ == "__main__":
    cli(Config, main, "recipes.rnn")
