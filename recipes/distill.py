"""Distil a language model: train a smaller one, or one of another family, beside its teacher.

    python -m recipes.distill

With no flag it makes a transformer of half the width and half the layers of `lm-python`, on the
source code of Python's standard library, from the teacher's distribution and the data's own next
tokens. Then it trains the same student without the teacher, and prints the held-out bits per byte
of all three: 0.86 for the teacher, 1.43 and 1.49. On two cores of an AMD EPYC with AVX-512 (jax
0.10.2), with other work beside it, the two trainings took seven minutes and two and a half.

    python -m recipes.distill --student rnn --run-dir runs/distill-rnn

distils the transformer into a recurrent network. docs/guides/distillation.md has the rest.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

import zoo
from zoo import distillation, language, optimizers, rnn, transformer
from zoo.publishing.tensors import num_parameters
from zoo.runs.command_line import cli

TRANSFORMER = transformer.Config(
    vocab_size=64,
    d_model=128,
    num_layers=2,
    num_heads=2,
    scan_layers=False,
    attention=transformer.AttentionConfig(qk_norm="per_head"),
)
RNN = rnn.Config(vocab_size=64, hidden_size=256, num_layers=1, embed_size=128)


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    """Train a student beside a teacher, and the same student alone."""

    run_dir: Path | str = Path("runs/distill")
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    steps: int = 500
    """Optimizer steps in all; more than before continues a finished run."""
    student: Literal["transformer", "rnn"] = "transformer"
    """Family of the student: a transformer by --model, or a recurrent network by --rnn."""
    model: transformer.Config = TRANSFORMER
    rnn: zoo.rnn.Config = RNN
    optimizer: optimizers.Config = optimizers.Config(name="muon", learning_rate=3e-3)

    def __post_init__(self) -> None:
        super().__post_init__()
        other, default = (
            (self.rnn, RNN) if self.student == "transformer" else (self.model, TRANSFORMER)
        )
        if other != default:
            flag = "--rnn" if self.student == "transformer" else "--model"
            raise ValueError(
                f"student={self.student!r} takes nothing from {flag}: leave those flags out, or "
                "choose the other family by --student"
            )
        if (experts := self.model.experts.num_experts) is not None:
            raise ValueError(
                f"model.experts.num_experts={experts}: a student has no experts, which need a loss "
                "of their own; leave it out"
            )
        if self.student == "transformer":
            language.check_row_lengths(self.row_lengths, self.model, "model")


def main(config: Config) -> None:
    """Train both students, and compare them with the teacher."""
    with zoo.Run(config) as run:
        teacher = distillation.Teacher(run)
        student = make_student(run.config, teacher)
        data = distillation.read_text(run, teacher)
        metrics = distillation.train(run, student, data, teacher)
        name = "student, distilled" if config.weight else "student, alone"
        of_teacher = language.evaluator(run, data)(teacher.load(), True)
        size = num_parameters(jax.eval_shape(student.make_model, jax.random.key(0)))
        rows = [(f"teacher {config.teacher}", num_parameters(teacher.skeleton), of_teacher)]
        rows.append((name, size, metrics))
    if config.compare and config.weight:
        with zoo.Run(config.alone()) as run:
            run.say(f"\nthe same student alone, in {run.address}")
            metrics = distillation.train(run, student, data, teacher)
            rows.append(("student, alone", size, metrics))
    width = max(len(name) for name, *_ in rows)
    run.say(f"\n{'held out':{width}}{'parameters':>14}{'bits per byte':>16}")
    for name, size, found in rows:
        run.say(f"{name:{width}}{size:14,}{found['bits_per_byte']:16.4f}")


def make_student(config: Config, teacher: distillation.Teacher) -> distillation.Student:
    """The student of the configuration, with the ids of its teacher.

    Raises:
        ValueError: it was given more.
    """
    chosen = config.model if config.student == "transformer" else config.rnn
    if (chosen.vocab_size or 0) > teacher.vocab_size:
        raise ValueError(
            f"vocab_size={chosen.vocab_size}: teacher={config.teacher!r} has another vocabulary, "
            f"of {teacher.vocab_size}, which the student takes over; leave it out"
        )
    model = dataclasses.replace(chosen, vocab_size=teacher.vocab_size)
    if isinstance(model, rnn.Config):
        flops = rnn.num_flops_per_token(model)
        make_rnn = lambda key: rnn.RNN(model, key=key)  # noqa: E731
        return distillation.Student(make_rnn, flops, model.remat, "--rnn.remat")
    longest = config.data.seq_len if config.data.rows == "packed" else max(config.data.buckets)
    flops = transformer.num_flops_per_token(model, longest)
    make_transformer = lambda key: transformer.Transformer(model, key=key)  # noqa: E731
    return distillation.Student(make_transformer, flops, model.remat)


if __name__ == "__main__":
    cli(Config, main, "recipes.distill")
