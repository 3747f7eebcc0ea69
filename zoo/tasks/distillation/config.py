"""The fields of distillation."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.common.addresses import is_remote
from zoo.common.configuration import may_differ, require
from zoo.common.files import local_path
from zoo.data import text
from zoo.nn.products import Kind
from zoo.tasks import language
from zoo.training.distillation import Distillation


@dataclass(frozen=True)
class Data(text.Source):
    """Text to distil on, in the tokens of the teacher's own tokenizer."""

    tokenizer: str = ""
    """bytes, or a path to tokenizer.json, of a teacher that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class Config(language.Config):
    """The fields of distillation: those of a language model's recipe, and a teacher."""

    teacher: str = "lm-python"
    """Teacher: a name on the shelf, a run's folder, a model's or one of adapters, or a hub id."""
    teacher_quantize: Kind | None = None
    """Quantise the teacher's matrices to 8 bits (int8) or to 4 (int4, nf4); if not given, they
    are as they are stored."""
    temperature: float = 1.0
    """Temperature of both distributions; the higher, the more unlikely tokens count."""
    weight: float = 0.9
    """Weight of the teacher beside the data's own next tokens: 1 is the teacher alone, and 0 the
    student alone, without a teacher."""
    top_k: int | None = None
    """Likeliest tokens per position that the teacher writes to disk before the training, which
    then needs no teacher in memory; if not given, it computes all of its logits in each step."""
    stored: Path | None = may_differ(None)
    """Folder of the teacher's tokens, which other students on the same batches read too; if not
    given, teacher/ in the run's folder."""
    compare: bool = may_differ(True)
    """Then train the same student alone, in the folder beside, RUN_DIR-alone."""
    data: Data = Data()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        loss = self.loss
        require(
            self.top_k is None or self.top_k >= 1,
            f"top_k={self.top_k}: must be at least 1, or not be given",
        )
        require(
            self.stored is None or self.top_k is not None,
            f"stored='{self.stored}': only the likeliest tokens are stored; give their number, "
            "--top-k",
        )
        require(
            self.top_k is None or loss.weight > 0,
            f"top_k={self.top_k}: with weight=0 there is no teacher; leave it out",
        )
        require(
            self.optimizer.parametrization == "standard",
            f"optimizer.parametrization={self.optimizer.parametrization!r}: a student beside its "
            "teacher has two widths; choose 'standard'",
        )
        require(
            self.top_k is None or self.stored is not None or not is_remote(self.run_dir),
            f"top_k={self.top_k}: a run at {self.run_dir} copies its folder there; name a local "
            "folder for what the teacher writes, --stored",
        )
        if self.stored is not None:
            local_path(self.stored, "stored")

    @property
    def loss(self) -> Distillation:
        """The loss that the flags ask for."""
        return Distillation(self.temperature, self.weight)

    def alone(self) -> Any:
        """The configuration of the same student without its teacher."""
        folder = f"{str(self.run_dir).rstrip('/')}-alone"
        run_dir = folder if is_remote(self.run_dir) else Path(folder)
        work_dir = self.work_dir and self.work_dir.with_name(f"{self.work_dir.name}-alone")
        folders: Any = {"run_dir": run_dir, "work_dir": work_dir, "stored": None}
        return dataclasses.replace(self, **folders, weight=0.0, top_k=None, compare=False)
