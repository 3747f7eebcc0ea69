"""The training of a student beside its teacher, and that of the student alone."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Key, PyTree

from zoo.common import checksums
from zoo.common.files import local_path
from zoo.data import text
from zoo.data.top_k import StoredTopK, TopKPlan
from zoo.nn.remat import Policy
from zoo.publishing.tensors import num_parameters
from zoo.runs.run import Run
from zoo.tasks import language
from zoo.tasks.distillation.config import Config
from zoo.tasks.distillation.teacher import Teacher
from zoo.tasks.distillation.top_k import write_top_k
from zoo.training.description import Training
from zoo.training.distillation import Taught, student_alone
from zoo.training.pretrained import Pretrained


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
        stored = _stored(run, data, teacher)
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


def _stored(run: Run[Config], data: text.Text, teacher: Teacher) -> StoredTopK:
    """The teacher's likeliest tokens for every step of the run, on disk; a plan writes none."""
    config = run.config
    assert config.top_k is not None
    about = {
        "teacher": teacher.checksum,
        "quantize": config.teacher_quantize,
        "temperature": config.temperature,
        "precision": run.precision,
    }
    folder = run.folder / "teacher"
    if config.stored is not None and not config.plan:
        folder = local_path(config.stored, "stored")
    stored = StoredTopK(folder, data.train, config.top_k, about)
    if not config.plan:
        write_top_k(run, stored, data.train, teacher.load, config.temperature)
    return stored


def student_of(model: PyTree) -> PyTree:
    """The student of a model in training, which may have its teacher beside it."""
    return model.student if isinstance(model, Taught) else model


def train(
    run: Run[Config], student: Student, data: text.Text, teacher: Teacher
) -> dict[str, float]:
    """Train a student, save it, show a sample; its held-out metrics."""
    if run.config.weight:
        size = num_parameters(teacher.skeleton)
        run.say(f"the teacher, {run.config.teacher}, has {size:,} parameters")
    described = training(run, student, data, teacher)
    return language.train(run, data, described, published=student_of)
