"""Distillation: a student language model of any family beside a published teacher's distribution.

At each position the loss is `weight` T² KL(teacher ‖ student), of both distributions at temperature
T, plus 1 - `weight` times the loss on the next token (Hinton et al. 2015). T² keeps the gradients
of both in proportion. The student alone is the same training without the teacher, for comparison:
it begins with the same parameters, and has the same batches.

Legend of suffixes: B batch, T time, E embed.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from zoo.common.configuration import may_differ, require
from zoo.data import text
from zoo.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.nn.parameters import CastsAtUse, casts_at_use, casts_inputs, dropping_out
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
from zoo.training import losses
from zoo.training.chunked_loss import chunked
from zoo.training.description import Training
from zoo.training.state import Pretrained
from zoo.transformer.flops import num_flops_per_token as transformer_flops
from zoo.transformer.model import Transformer

# --- The loss ------------------------------------------------------------------------------------


class Taught(CastsAtUse):
    """A student, which is trained, and beside it its teacher, which is not (`student_alone`)."""

    student: PyTree
    teacher: PyTree

    @property
    def casts_at_use(self) -> bool:
        """Whether both cast their parameters themselves."""
        return casts_at_use(self.student) and casts_at_use(self.teacher)

    @property
    def casts_inputs(self) -> bool:
        """Whether both cast their inputs themselves."""
        return casts_inputs(self.student) and casts_inputs(self.teacher)


def student_alone(model: Taught) -> PyTree:
    """The tree of booleans of a `Training`'s `trainable`: the student is trained."""
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda x: x.student, nothing, jax.tree.map(lambda _: True, model.student))


@dataclass(frozen=True)
class Distillation:
    """A temperature, and the weight of the teacher beside the data: a loss for a train step.

    Metrics are `kl`, the divergence at the temperature, and `next_token`, the loss on the data; at
    weight 0 there are none, and the loss is `zoo.losses.next_token`'s, bit for bit.

    Raises:
        ValueError: a temperature that is not positive, or a weight outside of 0 to 1.
    """

    temperature: float = 1.0
    weight: float = 0.9

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"temperature={self.temperature}: must be positive")
        require(0 <= self.weight <= 1, f"weight={self.weight}: must be in 0 to 1")

    @losses.OF_TOKENS
    def beside_teacher(
        self, model: Taught, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """The loss of `model.student` on a token batch, as `make_train_step` takes it.

        The batch is that of `zoo.losses.next_token`. The teacher computes without dropout.
        """
        if self.weight == 0:
            return losses.next_token(model.student, batch, key)
        losses.check_tokens(batch)
        readout, x_BTE = losses.readout_and_input(model.student, batch, key)
        with dropping_out(None):
            outputs = losses.readout_and_input(model.teacher, batch, None)
        teacher, of_teacher = jax.lax.stop_gradient(outputs)
        logits = jax.eval_shape(readout, x_BTE)
        size = jax.eval_shape(teacher, of_teacher).shape[-1]
        require(
            size == logits.shape[-1],
            f"the teacher has {size} outputs, and the student {logits.shape[-1]}: give both one "
            "tokenizer and one vocab_size",
        )
        # One chunk too: the gradient is computed forward, and no logits are kept for it.
        count = losses.num_chunks(logits, copies=2)
        targets = {"x": of_teacher, "targets": batch["targets"]}
        readouts, weights = (readout, teacher), batch["weights"]
        total, sums = chunked(self._of_chunk, count, readouts, x_BTE, targets, weights)
        return total, weights.sum(), sums

    def _of_chunk(
        self, readouts: tuple[Any, Any], x_BTE: Array, targets: dict[str, Array], weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        # At a weight of 0 logits do not matter, finite or not.
        student, teacher = (
            jnp.where(weights[..., None] > 0, logits.astype(jnp.float32), 0.0)
            for logits in (readouts[0](x_BTE), readouts[1](targets["x"]))
        )
        kl = divergences(student / self.temperature, teacher / self.temperature)
        sums = {
            "kl": (kl * weights).sum(),
            "next_token": losses.cross_entropy(student, targets["targets"], weights)[0],
        }
        of_teacher = self.weight * self.temperature**2 * sums["kl"]
        return of_teacher + (1 - self.weight) * sums["next_token"], sums


def divergences(
    student: Float[Array, "*batch vocab"], teacher: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch"]:
    """KL(teacher ‖ student) of each row of logits, in nats."""
    log_q, log_p = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    p = jnp.exp(log_p)
    return jnp.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)  # without mass, they may be infinite


# --- Its training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data(text.Source):
    """Text to distil on, in the tokens of the teacher's own tokenizer."""

    tokenizer: str = ""
    """bytes, or a path to tokenizer.json, for a teacher that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class Config(language.Config):
    """The fields of a language model's recipe, and a teacher."""

    teacher: str = "lm-python"
    """Teacher: a name on the shelf, a folder of a run, of a model or of adapters, or a hub id."""
    teacher_quantize: Kind | None = None
    """Quantise the teacher's matrices to 8 bits (int8) or to 4 (int4, nf4); if not given, they
    are as they are stored."""
    temperature: float = 1.0
    """Temperature of both distributions; the higher it is, the more unlikely tokens count."""
    weight: float = 0.9
    """Weight of the teacher beside the data's own next tokens: 1 is the teacher alone, and 0 the
    student alone, without a teacher."""
    compare: bool = may_differ(True)
    """Then train the same student alone, in the folder RUN_DIR-alone."""
    data: Data = Data()  # type: ignore[assignment]
    """Text that teacher and student read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Distillation(self.temperature, self.weight)  # which checks them
        require(
            self.optimizer.parametrization == "standard",
            f"optimizer.parametrization={self.optimizer.parametrization!r}: a student beside its "
            "teacher has two widths; choose 'standard'",
        )

    def alone(self) -> Any:
        """The configuration of the same student without its teacher."""
        run_dir = f"{str(self.run_dir).rstrip('/')}-alone"
        work_dir = self.work_dir and self.work_dir.with_name(f"{self.work_dir.name}-alone")
        folders: Any = {"run_dir": run_dir, "work_dir": work_dir}
        return dataclasses.replace(self, **folders, weight=0.0, compare=False)


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
        language.check_row_lengths(
            config.row_lengths, self.skeleton.config, f"teacher={config.teacher!r}"
        )
        self.vocab_size = int(self.skeleton.config.vocab_size)
        folder, given = nearest(self.folder, FILE_NAME), config.data.tokenizer
        self.tokenizer_spec = str(folder) if (folder / FILE_NAME).is_file() else given
        """The name or folder by which `load_tokenizer` makes its tokenizer."""
        require(
            bool(self.tokenizer_spec),
            f"teacher={config.teacher!r} has no {FILE_NAME}: name its tokenizer by "
            "--data.tokenizer, or 'bytes'",
        )
        self.tokenizer = load_tokenizer(self.tokenizer_spec)
        if given:
            self.check_tokenizer(load_tokenizer(given), f"data.tokenizer={given!r}")
        require(
            self.tokenizer.vocab_size <= self.vocab_size,
            f"teacher={config.teacher!r} has {self.vocab_size} ids, and its tokenizer "
            f"{self.tokenizer.vocab_size}: they do not go together",
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
        """Checksum of its weights' files; empty for a plan, which fetches none."""
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
    config = run.config
    plain = dataclasses.replace(
        language.training(run, config.optimizer, data, student.make_model),
        flops_per_token=student.flops_per_token,
        remat=student.remat,
        remat_flag=student.remat_flag,
    )
    if teacher is None or config.weight == 0:
        return plain
    of_teacher = teacher.flops_per_token(max(data.train.buckets))
    of_student, evaluate = student.flops_per_token, language.evaluator(run, data)
    return dataclasses.replace(
        plain,
        make_model=lambda key, model: Taught(plain.make_model(key), model),
        pretrained=Pretrained(teacher.skeleton, teacher.load, teacher.checksum, flag="--teacher"),
        trainable=student_alone,
        loss_fn=Distillation(config.temperature, config.weight).beside_teacher,
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
