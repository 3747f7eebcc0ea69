import dataclasses
import importlib
import json
import re
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from recipe_cases import RECIPES, STEPS, Recipe, finish, losses, metrics, shared

import zoo
from recipes import distill, finetune, generate, lm
from zoo import language, rnn, sharding, text, transformer
from zoo.data.tokenizer import ByteTokenizer
from zoo.nn.precision import native_precision
from zoo.publishing import PublishError
from zoo.runs import command_line, loop
from zoo.runs.config import as_json
from zoo.runs.processes import RunError

__all__ = ["shared"]

FLAGS = Path(__file__).parents[1] / "recipe_flags.txt"


@pytest.fixture
def train(shared, cache_put_back):
    """`train(name, run_dir, *flags)` runs a recipe in this process."""
    return lambda name, run_dir, *flags: Recipe(name, shared).run_here(run_dir, *flags)


# --- The command line -------------------------------------------------------------------------


def flag_names(name: str) -> list[str]:
    config_class = importlib.import_module(f"recipes.{name}").Config
    types = {f.name: repr(f.type) for f in dataclasses.fields(config_class)}
    positional = {name for name, text in types.items() if "Positional" in text}
    unprefixed = {name for name, text in types.items() if "OmitArgPrefixes" in text}

    def walk(config, prefix):
        for field, value in config.items():
            if field in unprefixed:
                yield from walk(value, prefix)
            elif isinstance(value, dict):
                yield from walk(value, f"{prefix}{field}.")
            elif field not in positional:
                yield f"recipes.{name} --{prefix}{field}".replace("_", "-")

    return list(walk(as_json(config_class()), ""))


@pytest.mark.parametrize("name", [*RECIPES, "generate"])
def test_flags_are_frozen(name):
    """Scripts have these names: after a change that is meant, write the new list to the file."""
    frozen = [
        line for line in FLAGS.read_text().splitlines() if line.startswith(f"recipes.{name} ")
    ]
    assert flag_names(name) == frozen


@pytest.mark.parametrize("name", [*RECIPES, "generate"])
def test_help_explains_each_flag(name, capsys):
    config_class = importlib.import_module(f"recipes.{name}").Config
    with pytest.raises(SystemExit) as end:
        command_line.parse(config_class, f"python -m recipes.{name}", ["--help"])
    assert not end.value.code
    output = capsys.readouterr().out
    shown = set(re.findall(r"--[\w.-]+", output))
    assert {flag.split()[1] for flag in flag_names(name)} <= shown
    assert "type: ignore" not in output  # a comment is the help of a field without a text
    if name in RECIPES:  # the text under a field that may differ is shown too
        assert "Optimizer steps in all" in output
        assert "Devices by axis, such as fsdp=4,tensor=2" in output


# --- From start to end ------------------------------------------------------------------------


# What an evaluation of each recipe writes, and what else its run folder holds.
EVALUATION = {
    "lm": {"eval_loss", "perplexity", "bits_per_byte"},
    "rnn": {"eval_loss", "perplexity", "bits_per_byte"},
    "finetune": {"eval_loss", "perplexity", "bits_per_byte"},
    "distill": {"eval_loss", "perplexity", "bits_per_byte"},
    "vision": {"eval_loss", "eval_accuracy", "calibration_error"},
}
PICTURES = {"curves.png"}
OF_CLASSES = {"confusion.png", "calibration.png"}
MORE_PICTURES = {"vision": OF_CLASSES | {"predictions.png", "attention.png"}}
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
INPUTS = {"vision": jnp.linspace(-1, 1, 2 * 28 * 28).reshape(2, 28, 28, 1)}


@pytest.mark.parametrize(
    "name",
    [name if name == "lm" else pytest.param(name, marks=pytest.mark.slow) for name in EVALUATION],
)
def test_run_writes_all_documented_files(name, train, tmp_path, monkeypatch, capsys):
    states, fit = [], loop.fit

    def kept(*arguments, **options):
        trained = fit(*arguments, **options)
        states.append(trained.state)
        return trained

    sampled, generate = [], language.sampling.generate

    def seen(model, *arguments, **options):
        sampled.append(model)
        return generate(model, *arguments, **options)

    monkeypatch.setattr(loop, "fit", kept)
    monkeypatch.setattr(language.sampling, "generate", seen)
    run_dir = tmp_path / "run"
    train(name, run_dir, "--mesh=data=2,fsdp=2,tensor=2")
    output = capsys.readouterr().out
    assert "a sample " in output or "held out: accuracy" in output
    if name == "rnn":
        assert re.search(r"compiled 3 bucket\(s\) \[32, 64, 128\] .*: 1 compile\(s\) per", output)
        for bucket in (32, 64, 128):
            assert re.search(rf"bucket {bucket}: \d+ rows in \d+ batches, \d+\.\d% padding", output)
    assert len(sampled) == {"vision": 0, "finetune": 2}.get(name, 1)
    for model in sampled:  # on the mesh, sharded as it was trained
        placed = jax.tree.map(lambda x: x.sharding, model)
        expected = sharding.shardings(model, sharding.make_mesh("data=2,fsdp=2,tensor=2"))
        assert jax.tree.map(sharding.canonical, placed) == jax.tree.map(
            sharding.canonical, expected
        )

    stored = json.loads((run_dir / "config.json").read_text())
    assert stored["steps"] == STEPS
    assert stored["precision"] == native_precision()
    assert {f"recipes.{name} --{flag}" for flag in flatten(stored)} == set(flag_names(name))
    assert list(losses(run_dir)) == list(range(1, STEPS + 1))
    evaluations = [line for line in metrics(run_dir) if "eval_loss" in line]
    first = [0] if name in ("finetune", "distill") else []
    assert [line["step"] for line in evaluations] == [*first, 20, 40]
    assert all(set(line) == EVALUATION[name] | {"step"} for line in evaluations)
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    pictures = list(run_dir.glob("*.png"))
    assert {path.name for path in pictures} == PICTURES | MORE_PICTURES.get(name, set())
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in pictures)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"32", "36", "40"}

    model = zoo.load(run_dir / "model")
    inputs = INPUTS.get(name, TOKENS)
    trained = jax.tree.map(jnp.asarray, jax.device_get(states[0].model))  # off its mesh
    trained = trained.student if name == "distill" else trained
    merged = 1e-5 if name == "finetune" else 0  # the adapters, and only there
    call = eqx.filter_jit(lambda model: model(inputs))
    np.testing.assert_allclose(call(model), call(trained), rtol=0, atol=merged)
    assert json.loads((run_dir / "model" / "metrics.json").read_text())["steps"] == STEPS
    if name not in INPUTS:
        tokenizer = zoo.tokenizer.load_tokenizer(run_dir / "model")
        assert tokenizer.decode(tokenizer.encode("def")) == "def"


BEST = ("--average=0.9", "--keep-best=average/eval_loss", "--patience=1")


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_language_recipes_average_stop_and_sample(train, tmp_path, capsys):
    """Of adapters at a rate of zero, which learn nothing, so that the run is ended."""
    run_dir, flags = tmp_path / "run", (*BEST, "--steps=12", "--eval-every=4", "--sample-every=6")
    flags = (*flags, "--optimizer.learning-rate=0.0")
    train("finetune", run_dir, *flags)
    output = capsys.readouterr().out
    assert "what is published is the average of the weights (0.9)" in output
    assert "'early-stopping' has ended the run at step 4: average/eval_loss has not imp" in output
    evaluations = [line for line in metrics(run_dir) if "eval_loss" in line]
    last = evaluations[-1]
    assert last["step"] == 4
    found = json.loads((run_dir / "model" / "metrics.json").read_text())
    assert found["eval_loss"] == last["average/eval_loss"]
    assert "average/eval_loss" not in found
    best = json.loads((run_dir / "best" / "metrics.json").read_text())
    assert best["average/eval_loss"] == min(line["average/eval_loss"] for line in evaluations)
    for folder in ("best", "model"):
        assert zoo.load(run_dir / folder)(TOKENS).shape[:2] == TOKENS.shape
        assert zoo.tokenizer.load_tokenizer(run_dir / folder).vocab_size
    with pytest.raises(RunError, match=r"average: was 0.9, is 0.99"):
        train("finetune", run_dir, *flags, "--average=0.99")


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_classifiers_publish_and_judge_their_average(train, tmp_path, capsys):
    run_dir, flags = tmp_path / "run", (*BEST[:1], "--keep-best=eval_accuracy", "--steps=4")
    train("mlp", run_dir, *flags, "--eval-every=2")
    line = metrics(run_dir)[-1]
    assert {"member_loss", "member_accuracy", "member_calibration_error"} < line.keys()
    assert {path.name for path in run_dir.glob("*.png")} == OF_CLASSES
    assert f"held out: accuracy {line['average/eval_accuracy']:.2%}" in capsys.readouterr().out
    found = json.loads((run_dir / "model" / "metrics.json").read_text())
    assert found["eval_loss"] == line["average/eval_loss"] != line["eval_loss"]
    assert zoo.load(run_dir / "best")(jnp.ones((2, 4))).shape[-2:] == (2, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_resuming_with_changed_data_is_refused(train, shared, tmp_path):
    run_dir, corpus = tmp_path / "run", shutil.copytree(shared / "corpus", tmp_path / "corpus")
    flags = (f"--data.files={corpus}/*.txt", "--steps=4")
    train("lm", run_dir, *flags)
    before = (run_dir / "metrics.jsonl").read_bytes()
    train("lm", run_dir, *flags)
    (corpus / "00.txt").write_text("something else")
    with pytest.raises(RunError, match=r"the data of .* has changed since step 4\b"):
        train("lm", run_dir, *flags)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def flatten(config, prefix=""):
    for field, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{field}.")
        else:
            yield f"{prefix}{field}".replace("_", "-")


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_resuming_on_another_mesh_matches(train, tmp_path, capsys):
    moved, stayed = tmp_path / "moved", tmp_path / "stayed"
    # With this schedule a run of more steps begins as one of fewer.
    flags = ("--precision=fp32", "--optimizer.schedule=constant", "--optimizer.warmup-steps=0")
    train("lm", moved, *flags, "--steps=6", "--mesh=fsdp=2")
    train("lm", moved, *flags, "--steps=12", "--mesh=data=4")
    output = capsys.readouterr().out
    assert f"resumed {moved} at step 6" in output
    assert "--steps was 6 and is 12" in output
    train("lm", stayed, *flags, "--steps=12")
    assert list(losses(moved)) == list(range(1, 13))
    assert losses(moved) == pytest.approx(losses(stayed), rel=1e-5)


@pytest.mark.slow
def test_long_evaluations_do_not_deadlock(shared, tmp_path):
    """Where all of them are under way, their collectives deadlock, and XLA ends the process."""
    flags = ("--steps=6", "--mesh=data=8", "--precision=fp32", "--data.seq-len=64")
    model = ("--model.vocab-size=2048", "--model.d-model=64", "--model.num-layers=2")
    (tmp_path / "long").mkdir()
    for i in range(40):
        (tmp_path / "long" / f"{i}.txt").write_text(f"file {i}, of many words; " * 200)
    text = (f"--data.files={tmp_path}/long/*.txt", "--data.held-out=0.5")
    output = Recipe("lm", shared).run(tmp_path / "run", *flags, *model, *text, devices=8)
    [held_out] = re.findall(r"([\d,]+) held out", output)
    assert int(held_out.replace(",", "")) > 100 * 8 * 64
    assert "step 6: eval_loss" in output


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_labelled_rows_train_a_classifier(train, tmp_path, capsys):
    rows = [{"text": f"{i} {word}", "kind": word} for i in range(60) for word in ("up", "down")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_dir, flags = tmp_path / "run", (f"--data.files={tmp_path}/*.jsonl", "--label=kind")
    train("rnn", run_dir, *flags, "--optimizer.learning-rate=0.03", "--data.held-out=0.2")
    assert "held out: accuracy 100.00%" in capsys.readouterr().out
    assert (run_dir / "confusion.png").exists()
    found = json.loads((run_dir / "model" / "metrics.json").read_text())
    assert found["classes"] == ["down", "up"]
    model = zoo.load(run_dir / "model")
    tokenizer = zoo.tokenizer.load_tokenizer(run_dir / "model")
    for label, word in enumerate(found["classes"]):
        ids = [tokenizer.separator_id, *tokenizer.encode(f"99 {word}")]
        assert model(jnp.asarray([ids], jnp.int32)).argmax() == label


# --- What is made of a model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """The model of a run, as a run leaves it."""
    folder = tmp_path_factory.mktemp("run") / "model"
    config = rnn.Config(vocab_size=257, hidden_size=16, num_layers=1, cell="gru")
    zoo.save(
        folder, rnn.RNN(config, key=jax.random.key(0)), tokenizer=zoo.tokenizer.ByteTokenizer()
    )
    return folder


def continued(capsys, *flags):
    """What the recipe prints, with each text's tokens by zoo.generate beside."""
    args = ["--max-new-tokens=12", *map(str, flags)]
    generate.main(tyro.cli(generate.Config, args=args))
    return capsys.readouterr().out


def test_generate_continues_each_prompt(model_folder, capsys):
    model, tokenizer = zoo.load(model_folder), zoo.tokenizer.ByteTokenizer()
    prompts = [[256, *b"def "], [256, *"漢".encode()]]
    options = {"max_new_tokens": 12, "stop_tokens": [256, 10], "key": jax.random.key(3)}
    first, second = map(tokenizer.decode, zoo.generate(model, prompts, **options))
    flags = ("--seed=3", "--stop", "\n")
    for folder in (model_folder, model_folder.parent):
        printed = continued(capsys, folder, "def ", "漢", *flags)
        assert printed == f"{first}\n{generate.RULE}\n{second}\n"


def test_beams_are_printed_with_scores(model_folder, capsys):
    printed = continued(capsys, model_folder, "def ", "--num-beams=3")
    tokens, scores = zoo.beam_search(
        zoo.load(model_folder), [[256, *b"def "]], max_new_tokens=12, num_beams=3, stop_tokens=[256]
    )
    assert len(tokens[0]) == 3
    for ids, score in zip(tokens[0], scores[0], strict=True):
        text = zoo.tokenizer.ByteTokenizer().decode(ids)
        assert f"log-probability {score:.2f}\n{text}\n" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "'nowhere' is neither a folder nor on the shelf"),
        (["{folder}", "--stop", "ab", "--num-beams=2"], "stop='ab' is 2 tokens"),
    ],
    ids=str,
)
def test_invalid_generate_arguments_are_refused(model_folder, capsys, flags, message):
    with pytest.raises((ValueError, PublishError), match=re.escape(message)):
        continued(capsys, *(flag.format(folder=model_folder) for flag in flags))
    with pytest.raises(SystemExit):
        continued(capsys, model_folder, "--top-p=0")
    assert "top_p=0.0: must be" in capsys.readouterr().err


# --- What goes wrong --------------------------------------------------------------------------

MISTAKES = {
    "no file": (["--data.files=nowhere/*.txt"], "no file matches 'nowhere/*.txt'"),
    "no text": (["--data.files={tmp}/empty.txt"], "(1) are empty"),
    "no token file": (["--data.tokenizer=nowhere.json"], "no tokenizer at nowhere.json"),
    "no tokenizer": (["--data.tokenizer=bpee"], "or for a corpus 'bpe'"),
    "batch": (["--mesh=data=3"], "batch_size=8 is not divisible by 3"),
    "devices": (["--mesh=data=16"], "needs 16 devices, and there are 8"),
    "axis": (["--mesh=model=2"], "no axis 'model'"),
    "heads": (["--mesh=tensor=8"], "is not divisible by tensor=8 of the mesh"),
    "long rows": (
        ["--data.rows=bucketed", "--data.buckets", "16"],
        "add a larger bucket, or set too_long",
    ),
    "microbatches": (["--accumulate=3"], "accumulate=3"),
    "parts of rows": (
        ["--mesh=data=2,context=4", "--data.rows=packed", "--data.seq-len=66"],
        "data.seq_len: a row of 66 tokens is not divisible by 4, the number of its parts on data=2",
    ),
    "parts of buckets": (
        ["--mesh=context=4", "--data.rows=bucketed", "--data.buckets", "64", "30"],
        "data.buckets: a row of 30 tokens is not divisible by 4",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_training(mistake, train, tmp_path):
    flags, message = MISTAKES[mistake]
    (tmp_path / "empty.txt").touch()
    with pytest.raises((ValueError, OSError)) as e:
        train("lm", tmp_path / "run", *(flag.format(tmp=tmp_path) for flag in flags))
    assert message in str(e.value)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("mlp", ["--model.in-size=5"], "model.in_size=5: the data has 4; leave the flag out"),
        ("mlp", ["--model.out-size=2"], "model.out_size=2: the data has 3; leave the flag out"),
        (
            "rnn",
            ["--model.out-size=3", "--label=kind", "--data.files={tmp}/rows.jsonl"],
            "model.out_size=3: the data has 2 classes",
        ),
    ],
    ids=["mlp in", "mlp out", "rnn"],
)
def test_sizes_unlike_the_data_are_refused(name, flags, message, train, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "fit", lambda *_, **__: pytest.fail("it was trained"))
    rows = [{"text": f"{i} {word}", "kind": word} for i in range(60) for word in ("up", "down")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=re.escape(message)):
        train(name, tmp_path / "run", *(flag.format(tmp=tmp_path) for flag in flags))


@pytest.mark.parametrize(
    ("name", "head"),
    [("mlp", lambda model: model.members.head), ("rnn", lambda model: model.head)],
    ids=["mlp", "rnn"],
)
def test_initial_scales_are_those_of_the_parametrization(name, head, train, tmp_path, monkeypatch):
    def fit(run, training, *_, **__):
        model = eqx.filter_jit(training.make_model)(jax.random.key(0))
        raise LookupError(np.asarray(head(model).weight))

    monkeypatch.setattr(loop, "fit", fit)
    weights = []
    for flags in ([], ["--optimizer.parametrization=mup", "--optimizer.base-width=8"]):
        with pytest.raises(LookupError) as made:
            train(name, tmp_path / "run" / str(len(flags)), *flags)
        weights += made.value.args
    width = weights[0].shape[-2]
    assert width > 8
    np.testing.assert_allclose(weights[1], weights[0] * (8 / width) ** 0.5, rtol=1e-5)


# What would come to light only after the training, at the sample, or never.
UNFIT = {
    "not causal": ("lm", ["--model.no-causal"], "causal=False: this is an encoder"),
    "both ways": ("rnn", ["--model.bidirectional"], "bidirectional=True: this network has no next"),
    "long sample": (
        "lm",
        ["--model.positions.kind=learned", "--model.max-seq-len=64", "--sample-tokens=64"],
        "sample_tokens=64: a sequence of 65 is longer than max_seq_len=64",
    ),
    "long prompt": (
        "finetune",
        [
            "--model={tmp}/short",
            "--data.format=completions",
            "--data.files={tmp}/pairs.jsonl",
            "--data.seq-len=48",
            "--sample-tokens=16",
        ],
        "sample_tokens=16: a sequence of 57 is longer than max_seq_len=56",
    ),
}


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """A model of few positions, and prompts of 40 characters."""
    folder = tmp_path_factory.mktemp("unfit")
    sizes = {"vocab_size": 320, "d_model": 8, "num_layers": 1, "num_heads": 1}
    config = transformer.Config(
        max_seq_len=56, positions=transformer.PositionsConfig(kind="learned"), **sizes
    )
    skeleton = eqx.filter_eval_shape(transformer.Transformer, config, key=jax.random.key(0))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), skeleton)
    zoo.save(folder / "short", blank, tokenizer=ByteTokenizer())
    pairs = [json.dumps({"prompt": "p" * 40, "completion": answer}) for answer in "cd"]
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    return folder


@pytest.mark.parametrize("case", UNFIT)
def test_unsampleable_models_are_refused_before_training(case, train, tmp_path, monkeypatch, unfit):
    name, flags, message = UNFIT[case]
    monkeypatch.setattr(loop, "fit", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=re.escape(message)):
        train(name, tmp_path / "run", *(flag.format(tmp=unfit) for flag in flags))


def test_long_rows_are_refused_in_recipes_without_a_check(train, tmp_path, monkeypatch):
    monkeypatch.setattr(lm.Config, "__post_init__", lambda self: None)
    monkeypatch.setattr(loop, "fit", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=r"row of data=32: .* 31 positions"):
        train("lm", tmp_path / "run", "--model.max-seq-len=31")


@pytest.mark.parametrize(
    ("recipe", "fields", "message"),
    [
        (lm, {"router_z": 0.1}, r"router_z=0.1: .* set model\.experts\.num_experts"),
        (lm, {"sample_tokens": -1}, "sample_tokens=-1:"),
        (lm, {"sample_every": 0}, r"sample_every=0: .* 1"),
        (finetune, {"label": "kind", "sample_every": 5}, "sample_every=5: a classifier"),
        (generate, {"seed": 2**32}, r"seed=4294967296: .* 0 to 4294967295"),
        (lm, {"data": text.Config(seq_len=4096)}, r"data\.seq_len=4096: .* 2048 positions"),
        (
            distill,
            {"model": dataclasses.replace(distill.Config.model, max_seq_len=32)},
            r"data\.seq_len=\d+: .* 32 positions",
        ),
        (generate, {"num_beams": 0}, r"num_beams=0: .* 1"),
        (generate, {"num_beams": 2, "sampling": zoo.Sampling(min_p=0.1)}, r"num_beams=2: .*min_p"),
    ],
)
def test_fields_out_of_range_are_named(recipe, fields, message):
    with pytest.raises(ValueError, match=message):
        recipe.Config(**fields)


def test_mistakes_exit_without_traceback(shared, tmp_path):
    recipe = Recipe("lm", shared)
    wrong_values = recipe.start(tmp_path / "run", "--data.files=nowhere/*.txt")
    no_cluster = recipe.start(tmp_path / "run", "--distributed")
    for process, code, message in (
        (wrong_values, 1, "error: no file matches 'nowhere/*.txt'"),
        (no_cluster, 1, "error: --distributed: this is no cluster that JAX knows"),
    ):
        output = finish(process, code)
        assert message in output
        assert "Traceback" not in output
