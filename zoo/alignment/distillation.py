"""Distillation: a student language model of any family beside a published teacher's distribution.

The student alone is the same training without the teacher, for comparison: it begins with the same
parameters, and has the same batches.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Array, Key, PyTree

from zoo.alignment.distillation_loss import Distillation, Taught, student_alone
from zoo.alignment.top_k import StoredTopK, TopKPlan, write_top_k
from zoo.common import checksums
from zoo.common.addresses import is_remote
from zoo.common.configuration import may_differ, require
from zoo.common.files import local_path
from zoo.data import text
from zoo.data.tokenizer import FILE_NAME, Tokenizer, get_tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.nn.products import Kind
from zoo.nn.remat import Policy
from zoo.publishing import models
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest
from zoo.publishing.tensors import num_parameters
from zoo.rnn.config import num_flops_per_token as rnn_flops
from zoo.rnn.model import RNN
from zoo.runs.run import Run
from zoo.tasks import language
from zoo.tasks.generation import have_same_tokens
from zoo.training.description import Training
from zoo.training.pretrained import Pretrained
from zoo.transformer.config import num_flops_per_token as transformer_flops
from zoo.transformer.model import Transformer


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


class Teacher:
    """The model to learn from: its folder, its skeleton, its tokenizer; nothing is loaded yet.

    Raises:
        ValueError: it is no language model, has fewer positions than a row, or too few ids.
    """

    def __init__(self, run: Run[Config]):
        config = self._config = run.config
        weights = not config.plan  # which fetches none
        self._run = run
        self.folder = find(config.teacher, weights=weights)
        self.skeleton: Any = models.skeleton(
            self.folder, quantize=config.teacher_quantize, weights=weights
        )
        try:
            decoder_of(self.skeleton).check_decoder(0)
        except ValueError as error:
            raise ValueError(
                f"teacher={config.teacher!r} is no language model, and has no next token to "
                f"learn: {error}"
            ) from error
        language.check_row_lengths(config.data, self.skeleton.config, f"teacher={config.teacher!r}")
        self.vocab_size = int(self.skeleton.config.vocab_size)
        folder, given = nearest(self.folder, FILE_NAME), config.data.tokenizer
        self.tokenizer_spec = str(folder) if (folder / FILE_NAME).is_file() else given
        """What `get_tokenizer` makes its tokenizer of."""
        require(
            bool(self.tokenizer_spec),
            f"teacher={config.teacher!r} has no {FILE_NAME}: name its tokenizer by "
            "--data.tokenizer, or 'bytes'",
        )
        self.tokenizer = get_tokenizer(self.tokenizer_spec)
        if given:
            self.check_tokenizer(get_tokenizer(given), f"data.tokenizer={given!r}")
        require(
            self.tokenizer.vocab_size <= self.vocab_size,
            f"teacher={config.teacher!r} has {self.vocab_size} ids, and its tokenizer "
            f"{self.tokenizer.vocab_size}: they do not go together",
        )
        require(
            (config.top_k or 1) <= self.vocab_size,
            f"top_k={config.top_k}: teacher={config.teacher!r} has {self.vocab_size} ids; give "
            "that many at most",
        )

    def check_tokenizer(self, tokenizer: Tokenizer, what: str) -> None:
        """Raise a ValueError for a tokenizer that gives other ids than the teacher's."""
        require(
            have_same_tokens(self.tokenizer, tokenizer),
            f"{what}, of {tokenizer.vocab_size} ids, has another vocabulary than teacher="
            f"{self._config.teacher!r}, of {self.tokenizer.vocab_size}: both need one tokenizer, "
            "so leave --data.tokenizer out, and take text that is prepared with the teacher's, or "
            "not prepared",
        )

    def load(self) -> PyTree:
        """The teacher on the run's mesh, in its own dtypes.

        Raises:
            ValueError: a parameter that is not finite.
        """
        quantize = self._config.teacher_quantize
        model = models.load(self.folder, mesh=self._run.mesh, quantize=quantize)
        check_finite(model, self.folder)
        return model

    @property
    def checksum(self) -> str:
        """Checksum of its weights' files; of a plan, which fetches none, it is empty."""
        return "" if self._config.plan else models.weights_checksum(self.folder)

    def flops_per_token(self, seq_len: int) -> float | None:
        """FLOPs of a forward pass per token: a third of a training's; None for other families."""
        if isinstance(self.skeleton, Transformer):
            return transformer_flops(self.skeleton.config, seq_len) / 3
        return rnn_flops(self.skeleton.config) / 3 if isinstance(self.skeleton, RNN) else None


def read_text(run: Run[Config], teacher: Teacher) -> text.Text:
    """The run's text in the teacher's tokens; without files, the source code of Python's library.

    Raises:
        ValueError: text that is prepared with another tokenizer.
    """
    fields = [field.name for field in dataclasses.fields(text.Source)]
    given = {name: getattr(run.config.data, name) for name in fields}
    source = text.Config(**given, tokenizer=teacher.tokenizer_spec)
    data = language.read_text(run, source=source)
    what = "the text" if data.prepared is None else f"{data.prepared.folder}"
    teacher.check_tokenizer(data.tokenizer, f"the tokenizer of {what}")
    return data


class Student(NamedTuple):
    """The model to train: from a key to it, and what a training says of its family."""

    make_model: Callable[[Key[Array, ""]], PyTree]
    flops_per_token: float | None = None
    remat: Policy | None = None
    remat_flag: str = "--model.remat"


def training(
    run: Run[Config], student: Student, data: text.Text, teacher: Teacher | None
) -> Training:
    """The training of a student, beside its teacher unless its weight is 0."""
    config, loss = run.config, run.config.loss
    plain = dataclasses.replace(
        language.training(run, config.optimizer, data, student.make_model),
        flops_per_token=student.flops_per_token,
        remat=student.remat,
        remat_flag=student.remat_flag,
    )
    if teacher is None or loss.weight == 0:
        return plain
    if config.top_k is not None:
        language.check(plain, data, sample_tokens=config.sample_tokens)  # before the teacher's pass
        folder = run.folder / "teacher"
        if config.stored is not None and not config.plan:
            folder = local_path(config.stored, "stored")
        about = {
            "teacher": teacher.checksum,
            "quantize": config.teacher_quantize,
            "temperature": config.temperature,
            "precision": run.precision,
        }
        stored = StoredTopK(folder, data.train, config.top_k, about)
        if not config.plan:
            write_top_k(run, stored, data.train, teacher.load, config.temperature)
        return dataclasses.replace(
            plain,
            loss_fn=loss.of_stored,
            data=TopKPlan(data.train, stored),
            fingerprint=checksums.joined(plain.fingerprint, teacher.checksum),
        )
    of_teacher = teacher.flops_per_token(max(data.train.buckets))
    of_student, evaluate = student.flops_per_token, language.evaluator(run, data)
    return dataclasses.replace(
        plain,
        make_model=lambda key, model: Taught(plain.make_model(key), model),
        pretrained=Pretrained(teacher.skeleton, teacher.load, teacher.checksum, flag="--teacher"),
        trainable=student_alone,
        loss_fn=loss.beside_teacher,
        flops_per_token=of_teacher and of_student and of_teacher + of_student,
        evaluate=lambda model, whole: evaluate(model.student, whole),
    )


def train(
    run: Run[Config], student: Student, data: text.Text, teacher: Teacher
) -> dict[str, float]:
    """Train a student, save it, show a sample; its held-out metrics."""
    if run.config.weight:
        size = num_parameters(teacher.skeleton)
        run.say(f"the teacher, {run.config.teacher}, has {size:,} parameters")
    described = training(run, student, data, teacher)
    return language.train(
        run, data, described, published=lambda x: x.student if isinstance(x, Taught) else x
    )
