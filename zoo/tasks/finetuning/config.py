"""The fields of fine-tuning, and the defaults of its methods."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from zoo.common.configuration import may_differ, require
from zoo.common.store import location
from zoo.data import text
from zoo.nn.attention.attention import Implementation
from zoo.nn.products import Kind
from zoo.nn.remat import Policy
from zoo.runs.config import Config as RunConfig
from zoo.tasks import language
from zoo.training import optimizers
from zoo.wrappers.classifier import Pooling
from zoo.wrappers.lora import Config as LoraConfig

PREFERENCES = ("preferences", "unpaired")  # formats that have two examples per row


@dataclass(frozen=True)
class Data(text.Source):
    """Text to fine-tune on, in the tokens of the model's own tokenizer."""

    format: Literal["text", "completions", "chats", "preferences", "unpaired", "tags"] = "text"
    """text; or rows (.jsonl, .json, .csv, .parquet) of prompts with completions, which alone count
    in the loss; or of chats, by the tokenizer's own template, in which the assistant's answers
    count; or of preferences, each a prompt, chosen and rejected, or unpaired, a prompt, completion
    and label (true or false); or of tags, by --label, one for each word of a list or each letter of
    a text. The columns show the form: texts or messages, ShareGPT's or Alpaca's."""
    rows: Literal["packed", "bucketed"] | None = None  # type: ignore[assignment]
    """Documents packed into rows of seq_len, prompts in one piece; or each in a row of its own, cut
    and padded to the next of the buckets. If not given, packed, and bucketed for preferences and
    labelled rows."""
    prompt: str = "prompt"
    """Field of a prompt."""
    completion: str = "completion"
    """Field of its completion."""
    messages: str = "messages"
    """Field of a chat's messages, each with a role and a content."""
    augment: bool = True
    """Crop and mirror the pictures to train on by chance, as models of pictures read them."""
    skip_damaged: bool = False
    """Decode all pictures at the start, and leave out the ones that cannot be, with a line that
    counts them."""
    tokenizer: str = ""
    """bytes, or a path to tokenizer.json, where the model's folder has none."""
    chat_template: Annotated[str, tyro.conf.arg(aliases=("--chat-template",))] = ""
    """File of a chat template (Jinja) in place of the tokenizer's own, saved with the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.format not in PREFERENCES or self.rows != "packed",
            f"data.rows='packed': {self.format!r} have rows of their own; give 'bucketed'",
        )


# Rates and decays per method: adapters begin at zero, and the parameters at what they learned.
LEARNING_RATES = {"full": 3e-4, "lora": 1e-3}
WEIGHT_DECAYS = {"full": 0.01, "lora": 0.0}


@dataclass(frozen=True)
class Optimizer(optimizers.Config):
    """An optimizer whose rate and decay default to the method's."""

    learning_rate: float | None = None  # type: ignore[assignment]
    """Peak learning rate; if not given, 3e-4 for method full, and 1e-3 for lora."""
    weight_decay: float | None = None  # type: ignore[assignment]
    """Decoupled weight decay, on matrices only; if not given, 0.01 for full, and 0 for lora."""

    def __post_init__(self) -> None:
        if self.learning_rate is None or self.weight_decay is None:
            self.completed("full", {})
        else:
            super().__post_init__()

    def completed(self, method: str, stored: Mapping[str, Any]) -> "Optimizer":
        """The same with numbers: the stored run's, or else the method's."""
        defaults = {"learning_rate": LEARNING_RATES, "weight_decay": WEIGHT_DECAYS}
        missing = {name: x for name, x in defaults.items() if getattr(self, name) is None}
        numbers = {name: stored.get(name, x[method]) for name, x in missing.items()}
        return dataclasses.replace(self, **numbers)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The fields of fine-tuning: a run's, a model to begin with, text, an optimizer."""

    model: str = "lm-python"
    """Model to begin with: a name on the shelf, a folder of a run, of a model or of adapters (which
    are merged), or a hub id."""
    method: Literal["full", "lora"] = "full"
    """Train the parameters themselves, or adapters of low rank beside them."""
    base: Literal["stored", "int8", "int4", "nf4"] = "stored"
    """Format of the matrices that adapters are trained beside: as they are stored, or quantised to
    8 bits (int8) or to 4 (int4, nf4)."""
    freeze: tuple[str, ...] = ()
    """Paths of parameters that stay as they are, such as embedding.* and blocks.mlp.*."""
    label: str | None = None
    """Field of --data that holds a row's label, or the tags of its words or letters: puts a new
    head on the model, which classifies."""
    pooling: Pooling = "auto"
    """Input of that head: a row's last token, its first, BERT's pooler of the first, the mean,
    or (auto) the last of a decoder, which has seen the others, and the mean of an encoder."""
    sample_tokens: int = may_differ(128)
    """Tokens of the samples at the end."""
    sample_every: int | None = may_differ(None)
    """Steps between samples during training, which samples.jsonl keeps."""
    remat: Policy | None = may_differ(None)
    """Rematerialisation in the backward pass, to save memory: none, dots, dots_no_batch, full, or
    names, as in recipes.lm; that of the stored model if not given."""
    dropout: float | None = None
    """Rate of dropout in training; that of the stored model if not given."""
    kernel: Implementation | None = may_differ(None)
    """Attention kernel, as in recipes.lm; that of the stored model if not given."""
    scan_layers: bool | None = may_differ(None)
    """Run the layers by lax.scan, or unrolled; as the stored model does if not given."""
    lora: LoraConfig = LoraConfig()
    data: Data = Data()
    optimizer: optimizers.Config = Optimizer()

    def __post_init__(self) -> None:
        super().__post_init__()
        location(self.model, "model")
        language.check_samples(self, label=self.label)
        require(
            self.data.format != "tags" or self.label is not None,
            "data.format='tags': give the field of the tags as --label",
        )
        require(
            self.method != "lora" or not self.freeze,
            f"freeze={self.freeze}: method='lora' trains nothing but adapters",
        )
        fields = dataclasses.asdict(self.lora).items() - dataclasses.asdict(type(self).lora).items()
        require(
            self.method == "lora" or not fields,
            f"{', '.join(f'lora.{name}={x!r}' for name, x in sorted(fields))}: "
            f"method={self.method!r} has no adapters; give --method lora too",
        )
        require(
            self.method == "lora" or self.base == "stored",
            f"base={self.base!r}: quantised matrices are not trained; take method='lora', which "
            "trains adapters beside them, or base='stored'",
        )

    def completed(self, stored: Mapping[str, Any]) -> "Config":
        """The configuration with the rows of its data and the numbers of its optimizer."""
        data, optimizer = self.data, self.optimizer
        if isinstance(optimizer, Optimizer):
            optimizer = optimizer.completed(self.method, stored.get("optimizer", {}))
        if isinstance(data, Data):
            of_rows = data.format in PREFERENCES or self.label is not None
            rows = data.rows or ("bucketed" if of_rows else "packed")
            data = dataclasses.replace(data, rows=rows)
        return dataclasses.replace(self, data=data, optimizer=optimizer)

    def overrides(self, model: Any) -> dict[str, Any]:
        """The given values of fields of the model's own configuration, by their names there."""
        kernel = "attention.kernel" if hasattr(model, "attention") else "kernel"
        values = {
            "remat": self.remat,
            "dropout": self.dropout,
            kernel: self.kernel,
            "scan_layers": self.scan_layers,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def quantize(self) -> Kind | None:
        """The kind that the base's matrices are quantised in."""
        return None if self.base == "stored" else self.base
