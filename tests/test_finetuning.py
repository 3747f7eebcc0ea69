import gc
import importlib
import json
import shutil
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from helpers import arrays
from jax.experimental.compilation_cache import compilation_cache
from recipe_cases import Recipe, shared

import zoo
from zoo import finetuning, rnn, transformer
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer
from zoo.nn.parameters import cast
from zoo.planning import report, targets
from zoo.planning.job import make_estimate
from zoo.publishing.errors import PublishError
from zoo.runs import planned
from zoo.runs.metrics import read_metrics
from zoo.training.compiled import CompiledStep
from zoo.training.state import TrainState

__all__ = ["shared"]
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)


@pytest.fixture
def tune(shared, tmp_path):
    """`tune(*flags)` runs the recipe in this process, and returns the run's folder."""
    before = jax.config.jax_compilation_cache_dir
    recipe = importlib.import_module("recipes.finetune")

    def tune(*flags, run_dir=tmp_path / "run"):
        flags = Recipe("finetune", shared).flags(run_dir, "--steps=8", *flags)
        recipe.main(tyro.cli(recipe.Config, args=flags))
        return run_dir

    yield tune
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def write_lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_report_compares_before_and_after(tune, capsys):
    run_dir = tune("--method=full", "--optimizer.learning-rate=0.01")
    output = capsys.readouterr().out
    assert "--- a sample before ---" in output
    assert "--- a sample after ---" in output
    first, *_, last = [r for r in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in r]
    assert (first["step"], last["step"]) == (0, 8)
    assert f"eval_loss {first['eval_loss']:14.4f}{last['eval_loss']:10.4f}".split() == next(
        line.split() for line in output.splitlines() if line.startswith("eval_loss")
    )
    assert last["eval_loss"] < first["eval_loss"]
    assert not (run_dir / "adapters").exists()


@pytest.mark.slow
def test_saved_adapters_reproduce_the_model(tune, shared):
    run_dir = tune()
    model = zoo.load(run_dir)  # a run's folder stands for its model
    adapted = zoo.load_adapters(run_dir / "adapters", zoo.load(shared / "base"))
    np.testing.assert_allclose(adapted(TOKENS), model(TOKENS), atol=1e-5)
    assert np.abs(model(TOKENS) - zoo.load(shared / "base")(TOKENS)).max() > 1e-4
    again = tune("--model", str(run_dir / "adapters"), run_dir=run_dir.parent / "again")
    before = read_metrics(again / "metrics.jsonl")[0]["eval_loss"]
    assert before == pytest.approx(read_metrics(run_dir / "metrics.jsonl")[-1]["eval_loss"], 1e-5)


def test_frozen_parameters_do_not_change(tune, shared):
    run_dir = tune("--method=full", "--freeze", "embedding.*", "blocks.mlp.*")
    base, model = arrays(zoo.load(shared / "base")), arrays(zoo.load(run_dir))
    for name, array in model.items():
        frozen = name.startswith(("embedding", "blocks.mlp."))
        assert np.array_equal(array, base[name]) == frozen, name


def test_finetuning_on_completions(tune, tmp_path, capsys):
    pairs = [{"question": f"{i} ", "answer": f"is {i}"} for i in range(60)]
    path = write_lines(tmp_path / "rows.jsonl", *pairs)
    flags = ("--data.format=completions", "--data.prompt=question", "--data.completion=answer")
    run_dir = tune(*flags, f"--data.files={path}", "--method=full")
    assert read_metrics(run_dir / "metrics.jsonl")[1]["tokens"] < 8 * 32 * 0.8
    shown = capsys.readouterr().out.split("--- a sample after ---\n")[1]
    assert shown.split()[0].isdigit()  # it goes on from a held-out prompt


@pytest.mark.slow
@pytest.mark.parametrize("body", ["transformer", "rnn"])
def test_labelled_rows_train_a_classifier(body, tune, tmp_path, capsys):
    model = {
        "transformer": lambda key: transformer.Transformer(
            transformer.Config(320, d_model=32, num_layers=1, num_heads=2), key=key
        ),
        "rnn": lambda key: rnn.RNN(rnn.Config(320, hidden_size=32, num_layers=1), key=key),
    }[body](jax.random.key(0))
    zoo.save(tmp_path / "base", model, tokenizer=ByteTokenizer())
    rows = [{"text": f"{i} {word}", "kind": word} for i in range(60) for word in ("up", "down")]
    run_dir = tune(
        f"--model={tmp_path / 'base'}",
        f"--data.files={write_lines(tmp_path / 'rows.jsonl', *rows)}",
        "--data.rows=bucketed",
        "--data.held-out=0.2",
        "--label=kind",
        "--optimizer.learning-rate=0.03",
        "--steps=40",
    )
    assert "held out: accuracy 100.00%" in capsys.readouterr().out
    model = zoo.load(run_dir)
    assert isinstance(model, zoo.Classifier)
    ids = jnp.asarray([[256, *b"99 up"]], jnp.int32)
    assert model(ids).argmax() == 1


def write_hugging_face(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = BPETokenizer.train(["some text to train on"] * 9, 300)
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save(folder)


def test_finetuned_folder_opens_in_transformers(tune, tmp_path):
    write_hugging_face(tmp_path / "hf")
    import torch
    import transformers

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "some text"}]
    path = write_lines(tmp_path / "chats.jsonl", *[{"messages": chat}] * 20)
    run_dir = tune(
        f"--model={tmp_path / 'hf'}",
        f"--data.files={path}",
        "--data.format=chats",
        "--data.tokenizer=",
        "--optimizer.learning-rate=0.01",
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    with torch.no_grad():
        expected, before = theirs(ids).logits.numpy(), base(ids).logits.float().numpy()
    np.testing.assert_allclose(zoo.load(run_dir)(TOKENS), expected, atol=1e-4)
    assert np.abs(expected - before).max() > 1e-2
    opened = transformers.AutoTokenizer.from_pretrained(run_dir / "model")
    assert opened.apply_chat_template(chat, tokenize=False).startswith("user: hi\nassistant: some")


MISTAKES = {
    "shelf": (["--model=lm-nothing"], "'lm-nothing' is neither a folder nor on the shelf"),
    "pattern": (["--method=full", "--freeze", "blocks.mpl.*"], "matches no parameter"),
    "targets": (["--lora.targets", "blocks.mpl.*"], "matches no matrix"),
    "fields": (["--data.format=completions"], "is no .jsonl file"),
    "template": (["--data.format=chats"], "has no chat template"),
    "rows": (["--label=kind"], "needs data.rows='bucketed'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_training(mistake, tune, tmp_path):
    flags, message = MISTAKES[mistake]
    with pytest.raises((ValueError, PublishError)) as e:
        tune(*flags)
    assert message in str(e.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_mismatched_models_and_tokenizers_are_refused(tune, tmp_path):
    model = transformer.Transformer(
        transformer.Config(64, d_model=16, num_layers=1, num_heads=2), key=jax.random.key(0)
    )
    zoo.save(tmp_path / "small", model)
    with pytest.raises(ValueError, match=r"257, and .*small a vocab_size of 64"):
        tune(f"--model={tmp_path / 'small'}")
    with pytest.raises(ValueError, match=r"has no tokenizer.json: name one by --data.tokenizer"):
        tune(f"--model={tmp_path / 'small'}", "--data.tokenizer=")
    with pytest.raises(ValueError, match=r"model='mlp-digits' is a MLP that reads no tokens"):
        tune("--model=mlp-digits")
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    with pytest.raises(PublishError, match="is a run that has not finished"):
        tune(f"--model={tmp_path / 'unfinished'}")
    with pytest.raises(ValueError, match="trains nothing but adapters"):
        finetuning.Config(run_dir=tmp_path, steps=1, method="lora", freeze=("head.*",))


def test_default_data_is_python_help():
    documents = zoo.finetuning.help_topics()
    found = {document.name: document.text for document in documents}
    assert "Assignment statements" in found["assignment"]
    assert sum(map(len, found.values())) > 200_000


# Plans


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """The hub's client, of which `someone/model` is `tmp_path / "served"`; and its folder here."""
    client = pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    here = tmp_path / "cache"

    def snapshot_download(name, allow_patterns, ignore_patterns):
        assert name == "someone/model"
        here.mkdir(exist_ok=True)
        for path in (tmp_path / "served").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr(client, "snapshot_download", snapshot_download)
    return here


def test_plans_of_hub_models_take_no_weights(tune, tmp_path, capsys, fake_hub):
    sizes = transformer.Config(320, d_model=32, num_layers=1, num_heads=2)
    model = transformer.Transformer(sizes, key=jax.random.key(0))
    zoo.save(tmp_path / "served", cast(model, jnp.bfloat16), format="hf", tokenizer=ByteTokenizer())
    with pytest.raises(SystemExit) as ended:
        tune("--model=someone/model", "--plan=cpu:1", "--lora.rank=2", "--accumulate=1")
    assert ended.value.code == 0
    assert not list(fake_hub.glob("*.safetensors*"))
    output = " ".join(capsys.readouterr().out.split())
    adapters = sum(x.size for x in jax.tree.leaves(lora_of(model)))
    frozen = sum(x.size for x in jax.tree.leaves(model) if eqx.is_array(x))

    def size(number):
        return report.gigabytes(float(number))

    assert f"trained parameters {size(4 * adapters)} {adapters:,}, fp32 masters, " in output
    assert f"adapters' {adapters:,} frozen parameters {size(2 * frozen)} {frozen:,}, bf16" in output
    assert f"optimizer {size(2 * 4 * adapters + 8)}" in output


def lora_of(model):
    """The adapters of a model alone."""
    adapted = zoo.lora.adapt(model, zoo.lora.Config(rank=2), key=jax.random.key(0))
    return eqx.filter(adapted, zoo.lora.trainable(adapted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--method=full",), ("--method=lora",), ("--method=lora", "--base=int8")],
    ids=["full", "lora", "int8"],
)
def test_live_bytes_are_those_of_the_plan(flags, tune, monkeypatch):
    jobs, live = [], []
    make_job, call = planned.make_job, CompiledStep.__call__

    def step(self, state, batch):
        outputs = call(self, state, batch)
        if isinstance(state, TrainState):
            jax.block_until_ready(outputs)
            del state
            gc.collect()
            live.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return outputs

    monkeypatch.setattr(planned, "make_job", lambda *x: jobs.append(make_job(*x)) or jobs[-1])
    monkeypatch.setattr(CompiledStep, "__call__", step)
    monkeypatch.setattr(finetuning, "save", lambda *_: sys.exit())
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    # A checkpoint under way holds a copy of what is trained, for a moment.
    with pytest.raises(SystemExit):
        tune("--model=lm-python", "--data.tokenizer=", "--checkpoint-every=100", *flags)
    memory = make_estimate(jobs[0], targets.parse("cpu:1")).memory
    planned_bytes = memory.parameters + memory.optimizer + memory.batch
    assert len(live) == 8
    assert planned_bytes > 3e6
    assert min(live) >= 0.95 * planned_bytes
    assert max(live) <= 1.05 * planned_bytes
