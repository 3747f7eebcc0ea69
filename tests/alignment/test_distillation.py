"""Distillation: the loss against its formula and its limits, and that nothing else changes it."""

import importlib
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from helpers import (
    VOCAB,
    assert_trees_close,
    drawn_rnn,
    drawn_transformer,
    one_step,
    pad_tokens,
    small_config,
    token_batch,
)
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import Array
from recipe_cases import Recipe, metrics, shared

import zoo
from zoo import distillation, losses, optimizers, rnn, transformer
from zoo.alignment.distillation import Distillation, Taught, divergences, student_alone
from zoo.data.prepared.prepare import prepare
from zoo.data.tokenizer import ByteTokenizer
from zoo.nn.precision import in_precision
from zoo.runs.processes import RunError

__all__ = ["shared"]

BATCH = jax.tree.map(jnp.asarray, token_batch(8, 12))
MIXED = Distillation(temperature=3.0, weight=0.3)  # whose square is not its double


class Table(eqx.Module):
    """A bigram model without `readout`: the logits of each token are a row of a table."""

    logits: Array

    def __call__(self, tokens: Array, **options: Any) -> Array:
        return self.logits[tokens]


def table(seed: int, vocab: int = VOCAB) -> Table:
    logits = np.random.default_rng(seed).normal(size=(VOCAB, vocab))
    return Table(jnp.asarray(2 * logits, jnp.float32))


def plain(student: Array, teacher: Array, loss: Distillation, batch: dict[str, Array]) -> Array:
    """The formula of Hinton et al. for the logits of both, on all weighted positions."""
    log_p, log_q = (jax.nn.log_softmax(x / loss.temperature) for x in (teacher, student))
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    hard = -jnp.take_along_axis(jax.nn.log_softmax(student), batch["targets"][..., None], -1)
    each = loss.weight * loss.temperature**2 * kl + (1 - loss.weight) * hard[..., 0]
    return (each * batch["weights"]).sum()


def of_logits(function: Any, student: Table, teacher: Table) -> tuple[Array, Table]:
    return eqx.filter_jit(eqx.filter_value_and_grad(function))(student, teacher)


def test_loss_and_gradient_match_the_formula(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "LOGITS_BYTES", 2 * 4 * 8 * 12 * VOCAB // 4)  # in chunks
    batch = BATCH | {"weights": BATCH["weights"] * 0.7}

    def ours(student: Table, teacher: Table) -> Array:
        return MIXED.beside_teacher(Taught(student, teacher), batch, None)[0]

    def formula(student: Table, teacher: Table) -> Array:
        return plain(student(batch["tokens"]), teacher(batch["tokens"]), MIXED, batch)

    found, wanted = (of_logits(f, table(0), table(1)) for f in (ours, formula))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert np.abs(wanted[1].logits).max() > 0.5
    np.testing.assert_allclose(found[1].logits, wanted[1].logits, rtol=1e-4, atol=1e-5)
    total, weight, parts = MIXED.beside_teacher(Taught(table(0), table(1)), batch, None)
    assert weight == batch["weights"].sum()
    hard = losses.next_token(table(0), batch, None)[0]
    np.testing.assert_allclose(parts["next_token"], hard, rtol=1e-6)
    np.testing.assert_allclose(total, 0.3 * 9 * parts["kl"] + 0.7 * hard, rtol=1e-6)


def test_a_pair_casts_at_use_where_both_of_it_do():
    """Else the step casts all of it, or the other one would compute in fp32."""
    for models in itertools.product((drawn_transformer(), table(0)), repeat=2):
        both = not any(isinstance(model, Table) for model in models)
        model = Taught(*models)
        assert model.casts_inputs == both
        with in_precision(model, "bf16") as given:
            dtypes = {x.dtype for x in jax.tree.leaves(eqx.filter(given, eqx.is_inexact_array))}
        assert dtypes == {jnp.dtype(jnp.float32 if both else jnp.bfloat16)}


def test_without_weight_it_is_the_language_loss():
    student = drawn_rnn("gru")
    loss = Distillation(temperature=3.0, weight=0.0)
    model = Taught(student, table(1))
    grad = eqx.filter_jit(
        eqx.filter_value_and_grad(lambda m: loss.beside_teacher(m, BATCH, None)[0])
    )
    alone = eqx.filter_jit(
        eqx.filter_value_and_grad(lambda m: losses.next_token(m, BATCH, None)[0])
    )
    (value, of_both), (wanted, of_student) = grad(model), alone(student)
    assert value == wanted
    assert_trees_close(of_both.student, of_student, rtol=0)


def test_infinite_logits_of_the_teacher_have_no_mass():
    teacher = jnp.asarray([[0.0, 1.0, -jnp.inf]])
    student = jnp.asarray([[0.5, 0.0, 3.0]])
    p = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    q = np.exp(student[0]) / np.exp(student[0]).sum()
    np.testing.assert_allclose(
        divergences(student, teacher)[0], (p * np.log(p / q[:2])).sum(), 1e-6
    )
    gradient = jax.grad(lambda x: divergences(x, teacher)[0])(student)[0]
    np.testing.assert_allclose(gradient, q - np.append(p, 0), rtol=1e-5)


@pytest.mark.slow
def test_mesh_accumulation_and_padding_change_nothing():
    student = drawn_rnn("gru")
    model, loss = Taught(student, drawn_transformer()), MIXED.beside_teacher
    run = lambda batch, **options: one_step(
        lambda key: model, loss, batch, trainable=student_alone, **options
    )
    expected, wanted = run(BATCH)
    mesh, batch = zoo.make_mesh("data=2,fsdp=2,tensor=2"), jax.tree.map(np.asarray, BATCH)
    metrics, found = run(pad_tokens(batch), accumulate=2, mesh=mesh)
    for name in ("loss", "kl", "next_token", "tokens"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    for path, gradient in wanted.items():
        assert (np.abs(gradient).max() > 1e-6) == path.startswith("student."), path
        np.testing.assert_allclose(found[path], gradient, atol=2e-5, err_msg=path)


def test_the_teacher_is_frozen_and_computes_without_dropout():
    teacher = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn_transformer(dropout=0.5))
    model = Taught(table(0), teacher)
    key = jax.random.key(1)
    one, other = (MIXED.beside_teacher(model, BATCH, k)[0] for k in (key, None))
    assert one == other
    loss, options = MIXED.beside_teacher, {"trainable": student_alone}
    _, found = one_step(lambda key: model, loss, BATCH, **options)
    of_teacher = [x for path, x in found.items() if path.startswith("teacher.")]
    assert {x.dtype for x in of_teacher} == {jnp.dtype("bfloat16")}
    assert not any(x.any() for x in of_teacher)


def test_another_vocabulary_is_refused():
    model = Taught(table(0), table(1, vocab=VOCAB + 1))
    with pytest.raises(ValueError, match=r"teacher has 65 .* student 64"):
        MIXED.beside_teacher(model, BATCH, None)


# --- The recipe ---------------------------------------------------------------------------------


@pytest.fixture
def distil(shared, tmp_path):
    """`distil(*flags)` runs the recipe in this process, and returns the run's folder."""
    before = jax.config.jax_compilation_cache_dir
    recipe = importlib.import_module("recipes.distill")

    def distil(*flags, run_dir=tmp_path / "run"):
        flags = Recipe("distill", shared).flags(run_dir, "--steps=6", *flags)
        recipe.main(tyro.cli(recipe.Config, args=flags))
        return run_dir

    yield distil
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0:"),
        ({"weight": 1.1}, r"weight=1.1: .* 0 to 1"),
        ({"rnn": rnn.Config(vocab_size=9)}, r"student='transformer' .* --rnn"),
        (
            {"model": small_config(**{"experts.num_experts": 2})},
            r"model.experts.num_experts=2:",
        ),
        (
            {"optimizer": optimizers.Config(parametrization="mup", base_width=64)},
            "a student beside its teacher has two widths",
        ),
    ],
)
def test_configurations_that_do_not_go_together_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        importlib.import_module("recipes.distill").Config(**fields)


def test_the_student_alone_has_folders_of_its_own():
    make = importlib.import_module("recipes.distill").Config
    alone = make(run_dir="gs://bucket/run/", work_dir=Path("here/run")).alone()
    assert (alone.run_dir, alone.work_dir) == ("gs://bucket/run-alone", Path("here/run-alone"))
    alone = make(run_dir=Path("runs/one")).alone()
    assert (alone.run_dir, alone.work_dir) == (Path("runs/one-alone"), None)
    assert (alone.weight, alone.compare) == (0, False)


def test_a_teacher_takes_two_flops_per_weight():
    of = lambda model: distillation.Teacher.flops_per_token(SimpleNamespace(skeleton=model), 8)
    assert of(drawn_rnn("gru")) == 2 * (2 * (32 + 32) * 3 * 32 + 32 * VOCAB)
    assert of(table(0)) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--teacher=mlp-digits", r"teacher='mlp-digits' .* MLP"),
        (
            "--data.seq-len=4096 --model.max-seq-len=4096",
            "data.seq_len=4096: teacher=.* has 2048 positions",
        ),
        ("--teacher=lm-python", r"'bytes', of 257 .* of 2048"),
        ("--model.vocab-size=999", r"vocab_size=999: teacher=.* 320"),
    ],
)
def test_unfit_teachers_are_refused_before_any_compute(flags, message, distil, monkeypatch):
    monkeypatch.setattr(distillation, "read_text", None)
    with pytest.raises(ValueError, match=message):
        distil(*flags.split())


def test_text_of_another_tokenizer_is_refused(distil, tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"some text of number {i} " * 40)
    prepare(f"{tmp_path}/text/*.txt", tmp_path / "out", tokenizer="bpe", vocab_size=270)
    with pytest.raises(ValueError, match=r"tokenizer of .*/out, of \d+ ids, has another"):
        distil(f"--data.files={tmp_path / 'out'}", "--data.tokenizer=bytes")


@pytest.mark.slow
def test_comparison_and_another_teacher(distil, shared, tmp_path, capsys):
    teacher = shutil.copytree(shared / "base", tmp_path / "teacher")
    run_dir = distil("--compare", f"--teacher={teacher}", "--teacher-quantize=int8")
    rows = capsys.readouterr().out.split("bits per byte\n")[-1].splitlines()
    assert [row.rsplit(maxsplit=2)[0] for row in rows] == [
        f"teacher {teacher}",
        "student, distilled",
        "student, alone",
    ]
    for folder, row in ((run_dir, rows[1]), (tmp_path / "run-alone", rows[2])):
        found = [x for x in metrics(folder) if "bits_per_byte" in x][-1]["bits_per_byte"]
        assert row.endswith(f"{found:.4f}")
        assert zoo.load(folder)(jnp.zeros((1, 3), jnp.int32)).shape == (1, 3, 320)
    # Both begin with the same weights, on the same batch.
    [[one, *_], [other, *_]] = (
        [x for x in metrics(folder) if "loss" in x] for folder in (run_dir, tmp_path / "run-alone")
    )
    assert one["next_token"] == pytest.approx(other["loss"], rel=1e-5)
    names = [x for x in saved_names(run_dir) if "teacher" in x]
    assert not names  # a checkpoint holds its checksum alone
    model = transformer.Transformer(zoo.load(teacher).config, key=jax.random.key(5))
    shutil.rmtree(teacher)
    zoo.save(teacher, model, tokenizer=ByteTokenizer())
    with pytest.raises(RunError, match=r"--teacher .* base"):
        distil(f"--teacher={teacher}", "--teacher-quantize=int8", "--steps=8")


def saved_names(run_dir: Path) -> list[str]:
    meta = max((run_dir / "checkpoints").glob("*/meta.json"))
    return list(json.loads(meta.read_text())["arrays"])
