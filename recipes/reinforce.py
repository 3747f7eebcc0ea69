"""Train a language model on rewards that a function of your own gives its answers.

    python -m recipes.reinforce --model organisation/name --method lora --data prompts.jsonl \
        --reward rewards:right --run-dir runs/reinforce

A row of `prompts.jsonl` has a prompt (a text, or messages for the tokenizer's chat template) and
whatever the reward needs; `right(prompt, answer, row)` in `rewards.py` returns a number, 1 for a
right answer. Each step draws `--group-size` answers to `--data.batch-size` prompts, and the model
learns what the better ones of a group have over the others. `samples.jsonl` has answers and
rewards while it runs; pass@1 and pass@8 on held-out prompts are shown before and after.
docs/guides/rewards.md has the rest.
"""

from dataclasses import dataclass
from pathlib import Path

import zoo
from zoo import finetuning, optimizers, reinforcement
from zoo.runs.command_line import cli


@dataclass(frozen=True, kw_only=True)
class Config(reinforcement.Config):
    """Train a model on the rewards of its own answers."""

    run_dir: Path | str = Path("runs/reinforce")
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    steps: int = 100
    """Optimizer steps in all; more than before continues a finished run."""
    optimizer: optimizers.Config = finetuning.Optimizer(
        learning_rate=1e-4, weight_decay=0.0, warmup_steps=10
    )


def main(config: Config) -> None:
    """Train, evaluate, save, and show before and after."""
    with zoo.Run(config) as run:
        reinforcement.train(run)


if __name__ == "__main__":
    cli(Config, main, "recipes.reinforce")
