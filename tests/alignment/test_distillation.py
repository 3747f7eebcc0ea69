"""Distillation: the loss against its formula and its limits, and that nothing else changes it."""

import importlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro
from helpers import VOCAB, drawn_rnn, drawn_transformer, pad_tokens, small_config, token_batch
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import Array
from recipe_cases import Recipe, assert_same_result, finish, metrics, shared, wait_for

import zoo
from zoo import distillation, losses, optimizers, rnn, transformer
from zoo.alignment.distillation_loss import (
    TEACHER_ENTRIES,
    Distillation,
    Taught,
    divergences,
    student_alone,
    top_k,
)
from zoo.alignment.top_k import REST, StoredTopK, TopKPlan
from zoo.data.tokenizer import ByteTokenizer
from zoo.nn.precision import in_precision
from zoo.runs.processes import RunError

__all__ = ["shared"]

BATCH = jax.tree.map(jnp.asarray, token_batch(8, 12))
MIXED = Distillation(temperature=2.0, weight=0.3)


class Table(eqx.Module):
    """A bigram model without `readout`: the logits of each token are a row of a table."""

    logits: Array

    def __call__(self, tokens: Array, **options: Any) -> Array:
        return self.logits[tokens]


def table(seed: int, vocab: int = VOCAB) -> Table:
    return Table(2 * jax.random.normal(jax.random.key(seed), (VOCAB, vocab)))


def plain(student: Array, teacher: Array, loss: Distillation, batch: dict[str, Array]) -> Array:
    """The formula of Hinton et al. for the logits of both, on all weighted positions."""
    log_p, log_q = (jax.nn.log_softmax(x / loss.temperature) for x in (teacher, student))
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    hard = -jnp.take_along_axis(jax.nn.log_softmax(student), batch["targets"][..., None], -1)
    each = loss.weight * loss.temperature**2 * kl + (1 - loss.weight) * hard[..., 0]
    return (each * batch["weights"]).sum()


def of_logits(function: Any, student: Table, teacher: Table) -> tuple[Array, Table]:
    return eqx.filter_jit(eqx.filter_value_and_grad(function))(student, teacher)


@pytest.mark.parametrize("chunks", [1, 4])
def test_loss_and_gradient_match_the_formula(chunks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "LOGITS_BYTES", 2 * 4 * 8 * 12 * VOCAB // chunks)
    batch = BATCH | {"weights": BATCH["weights"] * 0.7}

    def ours(student: Table, teacher: Table) -> Array:
        return MIXED.beside_teacher(Taught(student, teacher), batch, None)[0]

    def formula(student: Table, teacher: Table) -> Array:
        return plain(student(batch["tokens"]), teacher(batch["tokens"]), MIXED, batch)

    found, wanted = (of_logits(f, table(0), table(1)) for f in (ours, formula))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert np.abs(wanted[1].logits).max() > 0.5
    np.testing.assert_allclose(found[1].logits, wanted[1].logits, rtol=1e-4, atol=1e-5)


def test_metrics_are_the_two_parts():
    total, weight, metrics = MIXED.beside_teacher(Taught(table(0), table(1)), BATCH, None)
    assert weight == BATCH["weights"].sum()
    hard = losses.next_token(table(0), BATCH, None)[0]
    np.testing.assert_allclose(metrics["next_token"], hard, rtol=1e-6)
    parts = 0.3 * 4 * metrics["kl"] + 0.7 * metrics["next_token"]
    np.testing.assert_allclose(total, parts, rtol=1e-6)
    total, _, metrics = Distillation().beside_teacher(Taught(table(0), table(1)), BATCH, None)
    parts = 0.9 * metrics["kl"] + 0.1 * metrics["next_token"]
    np.testing.assert_allclose(total, parts, rtol=1e-6)


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
    pairs = zip(jax.tree.leaves(of_both.student), jax.tree.leaves(of_student), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
    assert loss.of_stored(student, BATCH, None)[0] == losses.next_token(student, BATCH, None)[0]


def test_a_student_equal_to_its_teacher_has_nothing_to_learn():
    loss = Distillation(temperature=1.7, weight=1.0)
    value, gradient = of_logits(
        lambda student, teacher: loss.beside_teacher(Taught(student, teacher), BATCH, None)[0],
        table(0),
        table(0),
    )
    np.testing.assert_allclose(value, 0, atol=1e-5)
    np.testing.assert_allclose(gradient.logits, 0, atol=1e-6)


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


def stored_batch(teacher: Any, k: int, temperature: float) -> dict[str, Array]:
    return BATCH | jax.jit(lambda: top_k(teacher, BATCH, k, temperature))()


@pytest.mark.parametrize("k", [VOCAB, 5])
def test_stored_top_k_matches_the_formula(k: int):
    teacher, batch = table(1), stored_batch(table(1), k, 2.0)

    def coarse(logits: Array) -> Array:
        """The log-probabilities of the k likeliest tokens, and of all others as one."""
        log_probs = jax.nn.log_softmax(logits / 2.0)
        ids = jnp.argsort(-teacher(batch["tokens"]))[..., :k]
        chosen = jnp.take_along_axis(log_probs, ids, -1)
        if k == VOCAB:
            return chosen
        return jnp.append(chosen, jnp.log1p(-jnp.exp(chosen).sum(-1, keepdims=True)), -1)

    def formula(student: Table, teacher: Table) -> Array:
        log_p, log_q = (coarse(x(batch["tokens"])) for x in (teacher, student))
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        hard = losses.next_token(student, batch, None)[0]
        return 0.3 * 4 * (kl * batch["weights"]).sum() + 0.7 * hard

    def ours(student: Table, teacher: Table) -> Array:
        return MIXED.of_stored(student, batch, None)[0]

    found, wanted = (of_logits(f, table(0), teacher) for f in (ours, formula))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1].logits, wanted[1].logits, rtol=1e-3, atol=1e-4)


def test_top_k_of_the_whole_vocabulary_is_the_teacher(monkeypatch: pytest.MonkeyPatch):
    student, teacher = table(0), table(1)
    on_the_fly = MIXED.beside_teacher(Taught(student, teacher), BATCH, None)
    monkeypatch.setattr(losses, "LOGITS_BYTES", 2 * 4 * 8 * 12 * VOCAB // 3)
    whole = stored_batch(teacher, VOCAB, 2.0)
    stored = MIXED.of_stored(student, whole, None)
    np.testing.assert_allclose(stored[0], on_the_fly[0], rtol=1e-6)
    assert not whole[REST].any()  # nor a rounding error
    entries = stored_batch(teacher, 3, 2.0)
    assert [entries[name].shape for name in TEACHER_ENTRIES] == [(8, 12, 3), (8, 12, 3), (8, 12)]


def step_once(batch: Any, loss: Any, model: Any, **options: Any) -> tuple[Any, dict[str, Array]]:
    """The parameters after a step of plain descent, and the step's metrics."""
    trainable = student_alone if isinstance(model, Taught) else None
    state = zoo.init_state(
        lambda key: model,
        optax.sgd(1.0),
        key=jax.random.key(0),
        mesh=options.get("mesh"),
        trainable=trainable,
    )
    step = zoo.make_train_step(
        loss, optax.sgd(1.0), precision="fp32", clip_norm=None, trainable=trainable, **options
    )
    state, metrics = step(state, batch)
    return state.model, metrics


VARIANTS: dict[str, dict[str, Any]] = {
    "mesh": {"mesh": "data=2,fsdp=2,tensor=2"},
    "accumulated": {"accumulate": 4},
    "padded": {"padded": True},
    "all": {"mesh": "data=2,fsdp=2,tensor=2", "accumulate": 2, "padded": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["on the fly", "stored"])
def test_mesh_accumulation_and_padding_change_nothing(kind: str, variant: str):
    student, teacher = drawn_rnn("gru"), drawn_transformer()
    options, batch = dict(VARIANTS[variant]), BATCH
    padded = options.pop("padded", False)
    model, loss = Taught(student, teacher), MIXED.beside_teacher
    if kind == "stored":
        model, loss, batch = student, MIXED.of_stored, stored_batch(teacher, 5, 2.0)
    if "mesh" in options:
        options["mesh"] = zoo.make_mesh(options["mesh"])
    wanted, expected = step_once(batch, loss, model)
    given = pad_batch(batch) if padded else batch
    found, metrics = step_once(given, loss, model, **options)
    for name in ("loss", "kl", "next_token", "tokens"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    before = jax.tree.leaves(eqx.filter(student, eqx.is_array))
    trees = [x.student if kind == "on the fly" else x for x in (found, wanted)]
    pairs = zip(*map(jax.tree.leaves, trees), before, strict=True)
    for one, other, old in pairs:
        assert np.abs(other - old).max() > 1e-6
        np.testing.assert_allclose(one, other, atol=2e-5)


def pad_batch(batch: dict[str, Array]) -> dict[str, Array]:
    tokens = {name: x for name, x in batch.items() if name not in TEACHER_ENTRIES}
    more = batch["tokens"].shape[1] // 2
    rest = {
        name: jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))
        for name, x in batch.items()
        if name in TEACHER_ENTRIES
    }
    return pad_tokens({name: np.asarray(x) for name, x in tokens.items()}) | rest


def test_the_teacher_is_frozen_and_computes_without_dropout():
    teacher = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn_transformer(dropout=0.5))
    model = Taught(table(0), teacher)
    key = jax.random.key(1)
    one, other = (MIXED.beside_teacher(model, BATCH, k)[0] for k in (key, None))
    assert one == other
    after, _ = step_once(BATCH, MIXED.beside_teacher, model)
    for x, y in zip(jax.tree.leaves(after.teacher), jax.tree.leaves(teacher), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0: must be positive"),
        ({"temperature": -1.0}, r"temperature=-1.0: must be positive"),
        ({"weight": 1.5}, r"weight=1.5: must be in 0 to 1"),
        ({"weight": -0.1}, r"weight=-0.1: must be in 0 to 1"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        Distillation(**change)


def test_another_vocabulary_is_refused():
    model = Taught(table(0), table(1, vocab=VOCAB + 1))
    with pytest.raises(ValueError, match="the teacher has 65 outputs, and the student 64"):
        MIXED.beside_teacher(model, BATCH, None)


# --- What is stored -----------------------------------------------------------------------------


class Rows:
    """A plan of token rows, each batch of its own tokens."""

    unit, batch_size, buckets, batches_per_epoch = "tokens", 4, (6,), 3

    def __init__(self, seed: int = 0):
        self._seed = seed

    def row(self, bucket: int) -> dict:
        return {"tokens": ((bucket,), np.int32)}

    def batch(self, k: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng([self._seed, k]).integers(0, 99, (4, 6)).astype(np.int32)
        return {"tokens": tokens[rows or slice(None)]}


def entries(k: int) -> dict[str, np.ndarray]:
    ids = np.full((4, 6, 2), k, np.int32)
    log_probs, rest = np.full((4, 6, 2), -k, np.float32), np.full((4, 6), 0.1, np.float32)
    return dict(zip(TEACHER_ENTRIES, (ids, log_probs, rest), strict=True))


@pytest.fixture
def stored(tmp_path: Path) -> StoredTopK:
    found = StoredTopK(tmp_path / "top", Rows(), 2, {"teacher": "abc", "temperature": 1.0})
    for k in (0, 1):
        found.write(k, entries(k))
    return found


def test_stored_batches_are_read_by_number_and_rows(stored: StoredTopK):
    plan = TopKPlan(Rows(), stored)
    assert stored.num_batches == 2
    batch = plan.batch(1, slice(1, 3))
    np.testing.assert_array_equal(batch["tokens"], Rows().batch(1)["tokens"][1:3])
    for name, x in entries(1).items():
        np.testing.assert_array_equal(batch[name], x[1:3])
        assert plan.row(6)[name] == (x.shape[1:], x.dtype)
    (stored.folder / "00000000.npz").unlink()  # the pass resumes with the first that is missing
    assert stored.num_batches == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flip, lambda x: x.write_bytes(x.read_bytes()[:-9]), Path.unlink]
)
def test_damaged_stored_batches_are_refused(stored: StoredTopK, damage: Any):
    damage(stored.folder / "00000001.npz")
    with pytest.raises(ValueError, match=r"00000001\.npz is damaged or missing"):
        stored.read(1)


def test_stored_batches_of_other_data_or_teachers_are_refused(stored: StoredTopK):
    about = {"teacher": "abc", "temperature": 1.0}
    with pytest.raises(ValueError, match="of other data: batch 0 is of other tokens"):
        StoredTopK(stored.folder, Rows(1), 2, about)
    with pytest.raises(ValueError, match=r"of teacher='abc', and this run asks for 'xyz'"):
        StoredTopK(stored.folder, Rows(), 2, {**about, "teacher": "xyz"})
    with pytest.raises(ValueError, match=r"of top_k=2, and this run asks for 3"):
        StoredTopK(stored.folder, Rows(), 3, about)
    with pytest.raises(ValueError, match=r"has files, and no about.json"):
        StoredTopK(stored.folder.parent, Rows(), 3, about)
    killed = stored.folder.parent / "killed"  # as it wrote its first file
    killed.mkdir()
    (killed / "about.json.tmp").write_text("{")
    assert StoredTopK(killed, Rows(), 3, about).num_batches == 0


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
        ({"temperature": 0.0}, "temperature=0.0: must be positive"),
        ({"weight": 1.1}, "weight=1.1: must be in 0 to 1"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_k": 3, "weight": 0.0}, "top_k=3: with weight=0 there is no teacher"),
        ({"stored": Path("x")}, "stored='x': only the likeliest tokens are stored"),
        ({"top_k": 3, "run_dir": "gs://a/b"}, "name a local folder for what the teacher writes"),
        ({"rnn": rnn.Config(vocab_size=9)}, "student='transformer' takes nothing from --rnn"),
        (
            {"model": small_config(**{"experts.num_experts": 2})},
            "model.experts.num_experts=2: a student has no experts",
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


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--top-k=321", "top_k=321: teacher=.* has 320 ids"),
        ("--teacher=mlp-digits", "teacher='mlp-digits' is no language model, .* MLP"),
        ("--data.seq-len=4096", "data.seq_len=4096: teacher=.* has 2048 positions"),
        ("--teacher=lm-python", "'bytes', of 257 ids, has another vocabulary than .* of 2048"),
        ("--model.vocab-size=999", "vocab_size=999: teacher=.* has another vocabulary, of 320"),
    ],
)
def test_unfit_teachers_are_refused_before_any_compute(flag, message, distil, monkeypatch):
    monkeypatch.setattr(distillation, "read_text", None)
    with pytest.raises(ValueError, match=message):
        distil(flag)


@pytest.mark.slow
def test_all_tokens_stored_train_as_the_teacher_on_the_fly(distil, tmp_path, capsys):
    flags = ("--precision=fp32", "--temperature=2")
    live = distil(*flags, run_dir=tmp_path / "live")
    folder = tmp_path / "top"
    kept = distil(*flags, "--top-k=320", f"--stored={folder}", run_dir=tmp_path / "kept")
    wanted, found = ([x for x in metrics(path) if "kl" in x] for path in (live, kept))
    assert len(wanted) == len(found) == 6
    for one, other in zip(found, wanted, strict=True):
        assert one["kl"] > 0
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-3)
    # Another student reads the same folder; with more steps, the pass resumes.
    assert len(list(folder.glob("*.npz"))) == 6
    capsys.readouterr()
    more = ("--top-k=320", f"--stored={folder}", "--student=rnn", "--rnn.hidden-size=16")
    more += ("--model.num-layers=2", "--model.d-model=128", "--model.dropout=0.0")
    distil(*flags, *more, "--steps=7", run_dir=tmp_path / "rnn")
    assert "of batches 6 to 6" in capsys.readouterr().out
    other = ("--precision=fp32", "--temperature=3", "--top-k=320", f"--stored={folder}")
    with pytest.raises(ValueError, match=r"temperature=2.0, and this run asks for 3.0"):
        distil(*other, run_dir=tmp_path / "other")


@pytest.mark.slow
def test_a_killed_run_on_stored_tokens_resumes_bit_for_bit(shared, tmp_path):
    recipe, flags = Recipe("distill", shared), ("--top-k=4",)
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    recipe.run(straight, *flags)
    for where in ("teacher/0000001*.npz", "checkpoints/8"):
        process = recipe.start(run_dir, *flags)
        wait_for(lambda: any(run_dir.glob(where)), process)  # noqa: B023
        process.kill()
        process.communicate()
        assert process.returncode < 0
    finish(recipe.start(run_dir, *flags))
    assert_same_result(run_dir, straight)


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
    with pytest.raises(RunError, match="--teacher is not the base this run began with"):
        distil(f"--teacher={teacher}", "--teacher-quantize=int8", "--steps=8")


def saved_names(run_dir: Path) -> list[str]:
    meta = max((run_dir / "checkpoints").glob("*/meta.json"))
    return list(json.loads(meta.read_text())["arrays"])
