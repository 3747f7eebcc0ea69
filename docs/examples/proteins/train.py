"""Fine-tune a protein language model by adapters, to tell whether a sequence has a property.

python -m train
python -m train --model facebook/esm2_t6_8M_UR50D --mesh data=2,fsdp=4
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import proteins
import zoo
from zoo import finetuning, optimizers
from zoo.runs.command_line import cli

DATA, BASE = Path("runs/proteins.fasta"), Path("runs/base")


@dataclass(frozen=True, kw_only=True)
class Config(finetuning.Config):
    """Adapters and a head on an encoder of proteins."""

    run_dir: Path | str = Path("runs/aromatic")
    """Folder of the run; the same command on the same folder resumes it."""
    model: str = str(BASE)
    """The model to begin with: a folder, or its id on the Hugging Face Hub."""
    steps: int = 150
    """Optimizer steps in all."""
    method: Literal["full", "lora"] = "lora"
    """Adapters of low rank, or full."""
    label: str | None = "aromatic"
    """The field of a sequence's header that is to be told."""
    lora: zoo.lora.Config = zoo.lora.Config(rank=8)
    data: finetuning.Data = finetuning.Data(
        files=str(DATA), batch_size=16, buckets=(32, 64), held_out=0.2
    )
    optimizer: optimizers.Config = finetuning.Optimizer(learning_rate=5e-3)


def main(config: Config) -> None:
    """Make what is missing, train, judge and save."""
    if not DATA.exists():
        DATA.parent.mkdir(parents=True, exist_ok=True)
        proteins.write_base(BASE)
        proteins.write_proteins(DATA)
    with zoo.Run(config) as run:
        base = finetuning.Base(run)
        data = finetuning.read_text(run, base.tokenizer, label=config.label, closed=True)
        finetuning.train_classifier(run, base, data)


if __name__ == "__main__":
    cli(Config, main, "train")
