"""Fine-tune a published model, in full or by low-rank adapters, on text, completions or chats.

    python -m recipes.finetune

With no flag it fine-tunes `lm-python`, which was trained on source code alone, on the help texts
that come with Python, and prints the held-out loss and a sample before and after. Its 200 steps
take four to six minutes on two cores of an AMD EPYC.

    python -m recipes.finetune --model organisation/name --method lora --data 'chats/*.jsonl' \
        --data.format chats --run-dir runs/chat

begins with a model of the Hugging Face Hub, or a folder of its format, and ends in a folder that
`transformers` opens; `adapters/` beside it has the trained adapters alone. Encoders take labelled
rows and tags, by `--label`, and vision transformers a folder of pictures per class.
"""

from dataclasses import dataclass
from pathlib import Path

import zoo
from zoo import finetuning, images, optimizers, preferences
from zoo.runs.command_line import cli


@dataclass(frozen=True, kw_only=True)
class Config(preferences.Config):
    """Fine-tune a model, in full, in part, or by low-rank adapters."""

    run_dir: Path | str = Path("runs/finetune")
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    steps: int = 200
    """Optimizer steps in all; more than before continues a finished run."""
    data: finetuning.Data = finetuning.Data(held_out=0.1)
    optimizer: optimizers.Config = finetuning.Optimizer(warmup_steps=20)


def main(config: Config) -> None:
    """Train, evaluate, save, and show before and after."""
    with zoo.Run(config) as run:
        base = finetuning.Base(run)
        if base.reads_pictures:
            of_model = base.skeleton.config
            pictures = images.read_folder(
                config.data.files,
                config.data.batch_size,
                model=base.folder,
                size=of_model.image_size,
                channels=of_model.channels,
                held_out=config.data.held_out,
                augment=config.data.augment,
                skip_damaged=config.data.skip_damaged,
                seed=config.seed,
            )
            finetuning.train_classifier(run, base, pictures, pictures.processor)
            return
        closed = not base.skeleton.is_causal
        data = finetuning.read_text(run, base.tokenizer, label=config.label, closed=closed)
        train = finetuning.train_classifier if config.label else preferences.train
        train(run, base, data)


if __name__ == "__main__":
    cli(Config, main, "recipes.finetune")
