"""Train a language model on rewards that a function of your own gives its answers.

    python -m recipes.reinforce

With no flag it trains `puzzles`, a small model that solves about half of the sums, countdowns and
brackets which are made in place, and prints pass@1, pass@8 and the length of answers before and
after, with the halves of their 95% intervals: pass@1 goes from 0.47 to 0.50 or 0.52, by seed, in
seven minutes of one core of an AMD EPYC.

    python -m recipes.reinforce --model organisation/name --method lora --data prompts.jsonl \
        --reward rewards:right --data.max-prompt-tokens 256 --max-new-tokens 256 --run-dir runs/mine

A row of `prompts.jsonl` has a prompt (a text, or messages for the tokenizer's chat template) and
whatever the reward needs; `right(prompt, answer, row)` in `rewards.py` returns a number, 1 for a
right answer. Each step draws `--group-size` answers to `--data.batch-size` prompts, and the model
learns what the better ones of a group have over the others. `samples.jsonl` has answers and
rewards while it runs. docs/guides/rewards.md has the rest.
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
    model: str = "puzzles"
    """Model to begin with, as in recipes.finetune."""
    steps: int = 150
    """Optimizer steps in all; more than before continues a finished run."""
    group_size: int = 16
    """Answers to each prompt."""
    max_new_tokens: int = 20
    """Tokens of an answer, at most: enough for a puzzle."""
    data: reinforcement.Data = reinforcement.Data(batch_size=32, max_prompt_tokens=28)
    optimizer: optimizers.Config = finetuning.Optimizer(
        learning_rate=2e-4, weight_decay=0.0, warmup_steps=10
    )


def main(config: Config) -> None:
    """Train, evaluate, save, and show before and after."""
    with zoo.Run(config) as run:
        reinforcement.train(run)


if __name__ == "__main__":
    cli(Config, main, "recipes.reinforce")
