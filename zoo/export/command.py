"""`python -m zoo export`: a model as other engines take it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zoo.common.files import local_path
from zoo.data import tokenizer as tokenizers
from zoo.export import gguf_file
from zoo.nn.products import dequantize
from zoo.publishing import PublishError, models
from zoo.publishing.shelf import find, nearest
from zoo.wrappers import lora

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Write a model as other engines take it, with its adapters merged."""

    model: tyro.conf.Positional[str]
    """Name on the shelf, folder or address of a model, of adapters or of a run, or a hub id."""
    to: Literal["gguf"] = "gguf"
    """gguf: a file that llama.cpp opens."""
    type: gguf_file.Type = "f16"
    """Values of matrices: floats of 32 or 16 bits, or of 8 or 4 with a scale for each 32."""
    out: Path | None = None
    """The file; NAME-TYPE.gguf in the working directory if not given."""
    tokenizer: bool = True
    """Put the model's tokenizer and chat template into the file; without, it takes ids alone."""


def main(config: Annotated[Config, tyro.conf.arg(name="")]) -> None:
    """Write a model as other engines take it, with its adapters merged.

    For example: python -m zoo export runs/finetune --to gguf --type q8_0
    """
    folder = find(config.model)
    name = Path(config.model).name or "model"
    out = (
        Path(f"{name}-{config.type}.gguf") if config.out is None else local_path(config.out, "out")
    )
    if out.exists():
        raise PublishError(f"out='{out}' is there already: remove it, or give another --out")
    model = whole_model(config.model)
    tokenizer = tokenizer_of(folder) if config.tokenizer else None
    notes = gguf_file.write(out, model, name=name, type=config.type, tokenizer=tokenizer)
    for note in notes:
        logger.warning("%s: %s", out, note)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def whole_model(name: str) -> Any:
    """A model with plain arrays: adapters merged, and no matrix quantised."""
    return dequantize(lora.merge(models.load(name)))


def tokenizer_of(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model's folder, or of the model that adapters are on.

    Raises:
        PublishError: there is none.
    """
    where = nearest(folder, tokenizers.FILE_NAME)
    if not (where / tokenizers.FILE_NAME).is_file():
        raise PublishError(
            f"{folder} has no {tokenizers.FILE_NAME}: put the model's there, or give "
            "--no-tokenizer, for a file that takes ids alone"
        )
    return tokenizers.load_tokenizer(where)
