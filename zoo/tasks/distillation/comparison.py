"""A teacher, its student, and the student alone, on the same held-out text."""

from typing import NamedTuple

import jax

from zoo.data import text
from zoo.publishing.tensors import num_parameters
from zoo.runs.run import Run
from zoo.tasks import language
from zoo.tasks.distillation.config import Config
from zoo.tasks.distillation.teacher import Teacher
from zoo.tasks.distillation.training import Student


class Row(NamedTuple):
    """A line of the comparison: a model's name, its parameters, its held-out bits per byte."""

    name: str
    num_parameters: int
    bits_per_byte: float


def teacher_row(run: Run[Config], data: text.Text, teacher: Teacher) -> Row:
    """The teacher, on the same held-out text."""
    model = teacher.load()
    evaluate = language.evaluator(run, data)
    size = num_parameters(teacher.skeleton)
    return Row(f"teacher {run.config.teacher}", size, evaluate(model, True)["bits_per_byte"])


def student_row(name: str, student: Student, metrics: dict[str, float]) -> Row:
    """A student by its metrics."""
    skeleton = jax.eval_shape(student.make_model, jax.random.key(0))
    return Row(name, num_parameters(skeleton), metrics["bits_per_byte"])


def table(rows: list[Row]) -> str:
    """The comparison as lines of text."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'held out':{width}}{'parameters':>14}{'bits per byte':>16}"]
    lines += [f"{x.name:{width}}{x.num_parameters:14,}{x.bits_per_byte:16.4f}" for x in rows]
    return "\n".join(lines)
