"""Train a transformer language model on text: the main job of the zoo.

    python -m recipes.lm

With no flag it trains on the source code of Python's standard library, with byte pairs trained on
it at the start, and prints its held-out bits per byte beside the figures of gzip and xz, and a
sample. On two cores of an AMD EPYC with AVX-512 (jax 0.10.2, Python 3.11's library) that took 4
minutes and reached 1.30 bits per byte; gzip -9 has 2.09 there and xz -9 1.95, on each held-out file
alone.
On files of your own: `--data 'corpus/*.txt'`.

    python -m recipes.lm --run-dir runs/encoder --objective masked --model.no-causal

trains an encoder to fill in hidden tokens, and shows a text with its fillings.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zoo
from zoo import language, losses, masked, optimizers, text, transformer
from zoo.common.configuration import require
from zoo.data import masking
from zoo.runs.command_line import cli
from zoo.training.loss_values import LossFunction


@dataclass(frozen=True, kw_only=True)
class Config(language.Config):
    """Train a transformer language model on text."""

    run_dir: Path | str = Path("runs/lm")
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    objective: Literal["next_token", "masked"] = "next_token"
    """Predict the next token, or fill in hidden ones (masked: with --model.no-causal)."""
    mask: masking.Config = masking.Config()
    steps: int = 500
    """Optimizer steps in all; more than before continues a finished run."""
    balance: float = 0.01
    """Load-balancing loss coefficient of a model with experts."""
    router_z: float = 0.0
    """Coefficient of the routers' z-loss, of a model with experts."""
    model: transformer.Config = transformer.Config(
        vocab_size=64,
        d_model=256,
        num_layers=4,
        num_heads=4,
        scan_layers=False,
        attention=transformer.AttentionConfig(qk_norm="per_head"),
    )
    optimizer: optimizers.Config = optimizers.Config(name="muon", learning_rate=3e-3)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.router_z == 0 or self.model.experts.num_experts is not None,
            f"router_z={self.router_z}: is for models with experts; set model.experts.num_experts",
        )
        language.check_row_lengths(self.row_lengths, self.model, "model")
        masked = self.objective == "masked"
        require(
            masked or self.mask == masking.Config(),
            f"mask={self.mask}: is for objective='masked', and objective={self.objective!r}",
        )
        require(
            not (masked and self.model.causal),
            "model.causal=True: objective='masked' is for encoders, which see the tokens behind a "
            "hidden one; give --model.no-causal",
        )
        require(
            not (masked and self.sample_every),
            f"sample_every={self.sample_every}: an encoder writes no text; leave it out",
        )


def main(config: Config) -> None:
    """Train, evaluate, sample and save."""
    with zoo.Run(config) as run:
        if config.objective == "masked":
            train_masked(run, config)
            return
        data = language.read_text(run)
        model = model_config(config, data)
        training = language.training(
            run, config.optimizer, data, lambda key: transformer.Transformer(model, key=key)
        )
        training = dataclasses.replace(
            training,
            loss_fn=loss_of(config),
            flops_per_token=transformer.num_flops_per_token(model, max(data.train.buckets)),
            remat=model.remat,
        )
        language.train(run, data, training)


def train_masked(run: zoo.Run, config: Config) -> None:
    """The same for an encoder that fills in hidden tokens."""
    data = masked.read_text(run, config.mask)
    model = model_config(config, data.text)
    training = masked.training(
        run, config.optimizer, data, lambda key: transformer.Transformer(model, key=key)
    )
    # The unit of its losses and speeds is a hidden token.
    flops = transformer.num_flops_per_token(model, max(data.train.buckets)) / config.mask.rate
    changes: dict[str, Any] = {"loss_fn": loss_of(config), "flops_per_token": flops}
    masked.train(run, data, dataclasses.replace(training, **changes, remat=model.remat))


def loss_of(config: Config) -> LossFunction:
    """The loss of tokens, next or hidden ones; of a model with experts with that of their load."""
    if config.model.experts.num_experts is None:
        return losses.next_token
    return losses.balanced_next_token(config.balance, config.router_z)


def model_config(config: Config, data: text.Text) -> transformer.Config:
    """The model's configuration, with room for all ids of the tokenizer."""
    vocab_size = data.vocab_size(at_least=config.model.vocab_size)
    return dataclasses.replace(config.model, vocab_size=vocab_size)


if __name__ == "__main__":
    cli(Config, main, "recipes.lm")
