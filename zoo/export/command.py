"""`python -m zoo export`: a model as other engines take it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zoo.common.configuration import require
from zoo.common.files import local_path
from zoo.data import tokenizer as tokenizers
from zoo.export import gguf_file, stablehlo
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
    to: Literal["gguf", "stablehlo"] = "gguf"
    """gguf: a file that llama.cpp opens; stablehlo: programs that JAX runs by itself."""
    type: gguf_file.Type | None = None
    """Values of matrices: floats of 32 or 16 bits, or for GGUF also of 8 or 4 with a scale for each
    32; if not given f16, and in programs as they are stored."""
    out: Path | None = None
    """The file or folder; NAME-TYPE.gguf or NAME-stablehlo, here, if not given."""
    tokenizer: bool = True
    """Put the model's tokenizer and chat template there; without, the engine takes ids alone."""
    length: int = 512
    """For programs: the most tokens of a text, prompt included; a power of two."""

    def __post_init__(self) -> None:
        require(
            self.to == "gguf" or self.type not in ("q8_0", "q4_0"),
            f"type={self.type!r}: is of --to gguf; programs take f32, f16 or bf16",
        )
        require(
            self.to == "stablehlo" or self.length == Config.length,
            f"length={self.length}: is of --to stablehlo; leave it out",
        )


DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def main(config: Annotated[Config, tyro.conf.arg(name="")]) -> None:
    """Write a model as other engines take it, with its adapters merged.

    For example: python -m zoo export runs/finetune --to gguf --type q8_0
    """
    folder = find(config.model)
    name = Path(config.model).name or "model"
    type = config.type or "f16"
    default = Path(f"{name}-{type}.gguf" if config.to == "gguf" else f"{name}-stablehlo")
    out = local_path(config.out or default, "out")
    if out.exists():
        raise PublishError(f"out='{out}' is there already: remove it, or give another --out")
    tokenizer = tokenizer_of(folder) if config.tokenizer else None
    if config.to == "stablehlo":
        model = whole_model(config.model, config.type and DTYPES[config.type])
        stablehlo.write(out, model, name=name, length=config.length, tokenizer=tokenizer)
        print(f"{out}: python {out}/run.py COUNT ID … continues ids")
        return
    model = whole_model(config.model)
    for note in gguf_file.write(out, model, name=name, type=type, tokenizer=tokenizer):
        logger.warning("%s: %s", out, note)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def whole_model(name: str, dtype: str | None = None) -> Any:
    """A model with plain arrays: adapters merged, and no matrix quantised."""
    return dequantize(lora.merge(models.load(name, dtype=dtype)))


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
