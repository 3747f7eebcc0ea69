import importlib
import json

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
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer
from zoo.publishing.errors import PublishError
from zoo.runs.metrics import read_metrics

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


@pytest.mark.slow
def test_adapters_are_saved_in_the_format_of_peft(tune, tmp_path):
    config = transformer.Config(320, d_model=32, num_layers=2, num_heads=4, mlp="swiglu")
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "base", model, format="hf", tokenizer=ByteTokenizer())
    base = f"--model={tmp_path / 'base'}"
    flags = ("--adapter-format=peft", "--lora.targets", "q_proj,v_proj", "--data.tokenizer=")
    run_dir = tune(base, *flags, "--optimizer.learning-rate=0.01")
    values = json.loads((run_dir / "adapters" / "adapter_config.json").read_text())
    assert values["target_modules"] == ["q_proj", "v_proj"]
    assert values["base_model_name_or_path"] == str(tmp_path / "base")
    assert not (run_dir / "adapters" / "config.json").exists()
    # They open as they are, with the tokenizer beside them.
    adapted = zoo.load(run_dir / "adapters")
    np.testing.assert_allclose(adapted(TOKENS), zoo.load(run_dir)(TOKENS), atol=1e-5)
    assert np.abs(adapted(TOKENS) - model(TOKENS)).max() > 1e-3
    assert load_tokenizer(run_dir / "adapters").encode("a").tolist() == [97]
    # A run on them begins with both merged; PEFT's format cannot name such a base.
    on_top = (f"--model={run_dir / 'adapters'}", "--data.tokenizer=")
    with pytest.raises(PublishError, match=r"adapters holds adapters itself, and PEFT's format"):
        tune(*on_top, "--adapter-format=peft", run_dir=tmp_path / "again")
    again = tune(*on_top, run_dir=tmp_path / "again")
    opened = zoo.load(again / "adapters")
    np.testing.assert_allclose(opened(TOKENS), zoo.load(again)(TOKENS), atol=1e-5)
    assert "model_type" in json.loads((again / "model" / "config.json").read_text())


@pytest.mark.parametrize(
    "flags",
    [["--lora.targets", "q_porj"], ["--lora.targets", "embed_tokens", "--adapter-format=peft"]],
)
def test_targets_are_checked_before_the_text_is_read(flags, tune, monkeypatch):
    def read_text(*arguments, **options):
        pytest.fail("the text was read")

    monkeypatch.setattr(finetuning, "read_text", read_text)
    with pytest.raises((ValueError, PublishError), match=r"matches no matrix|no adapters on embed"):
        tune(*flags)


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
