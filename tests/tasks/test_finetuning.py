import dataclasses
import datetime
import gc
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import tokenizers
import tyro
from helpers import arrays
from model_folders import write_esm, write_tokenizer
from recipe_cases import Recipe, shared
from stores import free_port

import zoo
from zoo import finetuning, language, rnn, transformer
from zoo.common import checksums
from zoo.data.prepared.prepare import prepare
from zoo.data.tokenizer import ByteTokenizer, load_tokenizer
from zoo.export import command
from zoo.nn.products import is_quantized
from zoo.nn.stateful import cast
from zoo.planning import planner, targets
from zoo.planning.job import Job, make_estimate
from zoo.publishing import PublishError
from zoo.runs import loop
from zoo.runs.metrics import read_metrics
from zoo.runs.processes import RunError
from zoo.tasks.generation import Chat
from zoo.training.compiled import CompiledStep
from zoo.training.state import TrainState
from zoo.transformer.rotary import RopeScaling

__all__ = ["shared"]
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
SELDOM = ("--checkpoint-every=100", "--eval-every=100")  # at the end alone


@pytest.fixture
def tune(shared, tmp_path, no_curves, cache_put_back):
    """`tune(*flags)` runs the recipe in this process, and returns the run's folder."""

    def tune(*flags, run_dir=tmp_path / "run"):
        # The rank that all runs of the tests have is for adapters.
        more = ["--lora.rank=8"] if "--method=full" in flags else []
        Recipe("finetune", shared).run_here(run_dir, "--steps=8", *more, *flags)
        return run_dir

    return tune


def write_lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_full_finetuning_on_completions(tune, tmp_path, capsys, shared):
    pairs = [{"question": f"{i} ", "answer": f"is {i}"} for i in range(60)]
    path = write_lines(tmp_path / "rows.jsonl", *pairs)
    flags = ("--data.format=completions", "--data.prompt=question", "--data.completion=answer")
    flags += (f"--data.files={path}", "--method=full", "--optimizer.learning-rate=0.01")
    run_dir = tune(*flags, "--freeze", "embedding.*", "blocks.mlp.*")
    assert read_metrics(run_dir / "metrics.jsonl")[1]["tokens"] < 8 * 32 * 0.8
    # The report compares before and after.
    output = capsys.readouterr().out
    assert "--- a sample before ---" in output
    shown = output.split("--- a sample after ---\n")[1]
    assert shown.split()[0].isdigit()  # it goes on from a held-out prompt
    first, *_, last = [r for r in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in r]
    assert (first["step"], last["step"]) == (0, 8)
    assert f"eval_loss {first['eval_loss']:14.4f}{last['eval_loss']:10.4f}".split() == next(
        line.split() for line in output.splitlines() if line.startswith("eval_loss")
    )
    assert last["eval_loss"] < first["eval_loss"]
    assert not (run_dir / "adapters").exists()
    # What is frozen does not change.
    base, model = arrays(zoo.load(shared / "base")), arrays(zoo.load(run_dir))
    for name, array in model.items():
        frozen = name.startswith(("embedding", "blocks.mlp."))
        assert np.array_equal(array, base[name]) == frozen, name


@pytest.mark.slow
def test_saved_adapters_reproduce_the_model(tune, tmp_path, shared):
    base = shutil.copytree(shared / "base", tmp_path / "base")
    # In bf16 a product with the sum of two matrices is rounded otherwise than the sum of products.
    flags = (f"--model={base}", "--precision=fp32")
    run_dir = tune(*flags)
    model = zoo.load(run_dir)  # a run's folder stands for its model
    adapted = zoo.load_adapters(run_dir / "adapters", zoo.load(base))
    np.testing.assert_allclose(adapted(TOKENS), model(TOKENS), atol=1e-5)
    assert np.abs(model(TOKENS) - zoo.load(base)(TOKENS)).max() > 1e-4
    meta = json.loads((run_dir / "checkpoints" / "4" / "meta.json").read_text())
    trained = [name for name in meta["arrays"] if name.startswith("model.")]
    assert trained
    assert all(name.endswith((".down", ".up")) for name in trained)
    on_top = (f"--model={run_dir / 'adapters'}", *flags[1:], "--steps=1")
    again = tune(*on_top, run_dir=tmp_path / "again")
    before = read_metrics(again / "metrics.jsonl")[0]["eval_loss"]
    assert before == pytest.approx(read_metrics(run_dir / "metrics.jsonl")[-1]["eval_loss"], 1e-5)
    other = transformer.Transformer(model.config, key=jax.random.key(1))
    zoo.save(base, other, tokenizer=ByteTokenizer())
    with pytest.raises(RunError, match=r"--model .* base"):
        tune(*flags, "--steps=9")


@pytest.mark.slow
def test_adapters_over_a_quantised_base_are_served_by_it(tune, capsys):
    kind = "nf4"
    run_dir = tune("--method=lora", f"--base={kind}", "--optimizer.learning-rate=0.01")
    first, last = [x for x in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in x]
    assert (first["step"], last["step"]) == (0, 8)
    assert first["eval_loss"] > last["eval_loss"]
    served = zoo.load(run_dir / "adapters", quantize=kind)
    assert is_quantized(served.blocks.attention.wq.weight)
    assert not is_quantized(zoo.load(run_dir / "adapters").blocks.attention.wq.weight)
    tokens = jnp.asarray([[256, *b"def f(x):"]])
    merged = zoo.load(run_dir)(tokens)  # in the dtype of the base
    np.testing.assert_allclose(served(tokens), merged, atol=0.05 * float(jnp.abs(merged).max()))
    generate = importlib.import_module("recipes.generate")
    capsys.readouterr()
    args = [str(run_dir / "adapters"), f"--quantize={kind}", "def ", "--max-new-tokens=4"]
    generate.main(tyro.cli(generate.Config, args=[*args, "--stop", "\n"]))
    assert capsys.readouterr().out.startswith("def ")


@pytest.mark.slow
def test_labelled_rows_train_a_recurrent_classifier(tune, tmp_path, capsys):
    config = rnn.Config(320, hidden_size=32, num_layers=1)
    base = rnn.RNN(config, key=jax.random.key(0))
    zoo.save(tmp_path / "base", base, tokenizer=ByteTokenizer())
    rows = [{"text": f"{i} {word}", "kind": word} for i in range(60) for word in ("up", "down")]
    run_dir = tune(
        f"--model={tmp_path / 'base'}",
        f"--data.files={write_lines(tmp_path / 'rows.jsonl', *rows)}",
        "--data.rows=bucketed",
        "--data.held-out=0.2",
        "--label=kind",
        "--optimizer.learning-rate=0.03",
        "--steps=60",
        *SELDOM,
        "--lora.rank=16",
        "--lora.alpha=32",
    )
    assert "held out: accuracy 100.00%" in capsys.readouterr().out
    model = zoo.load(run_dir)
    assert isinstance(model, zoo.Classifier)
    ids = jnp.asarray([[256, *b"99 up"]], jnp.int32)
    assert model(ids).argmax() == 1


AROMATIC = {*"FWY"}


@pytest.fixture
def proteins(tmp_path):
    """Random sequences in FASTA and CSV, with a class and a tag per letter; ESM-2's folder."""
    write_esm(tmp_path / "esm")
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        sequence = "".join(rng.choice([*"ACDEFGHIKLMNPQRSTVWY"], rng.integers(10, 30)))
        share = np.mean([x in AROMATIC for x in sequence])
        tags = "".join("H" if x in "AELM" else "C" for x in sequence)
        found.append((sequence, "many" if share > 0.15 else "few", tags))
    fasta = [f">p{i} aromatic={kind}\n{x[:9]}\n{x[9:]}" for i, (x, kind, _) in enumerate(found)]
    (tmp_path / "p.fasta").write_text("\n".join(fasta))
    (tmp_path / "p.csv").write_text("\n".join(["sequence,kind,tags", *map(",".join, found)]))
    flags = ("--data.buckets", "32", "--data.held-out=0.2", "--data.tokenizer=")
    more = ("--lora.rank=8", "--steps=80", "--optimizer.learning-rate=0.01", *SELDOM)
    return (f"--model={tmp_path / 'esm'}", *flags, *more)


@pytest.mark.slow
def test_an_encoder_learns_a_class_of_sequences_and_keeps_its_name(proteins, tune, tmp_path):
    run_dir = tune(*proteins, f"--data={tmp_path / 'p.fasta'}", "--label=aromatic")
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["eval_accuracy"] > 0.8
    model, tokenizer = zoo.load(run_dir), load_tokenizer(run_dir / "model")
    ids, folders = jnp.asarray([[0, 5, 15, 2]], jnp.int32), (run_dir / "adapters", tmp_path / "esm")
    adapted, base = (zoo.load(folder).without_head().hidden(ids) for folder in folders)
    np.testing.assert_allclose(adapted, model.body.hidden(ids), atol=1e-4)
    assert jnp.abs(adapted - base).max() > 0.1
    classes = json.loads((run_dir / "model" / "metrics.json").read_text())["classes"]
    assert classes == ["few", "many"]
    for sequence, kind in (("AKAGAKAGAKAG", "few"), ("FWYAFWYAFWYA", "many")):
        ids = tokenizer.tokenizer.encode(sequence).ids  # <cls> and <eos> too, as in training
        assert classes[int(model(jnp.asarray([ids], jnp.int32)).argmax())] == kind


@pytest.mark.slow
def test_an_encoder_learns_the_tags_of_letters(proteins, tune, tmp_path, capsys):
    flags = (f"--data={tmp_path / 'p.csv'}", "--data.format=tags", "--data.field=sequence")
    run_dir = tune(*proteins, *flags, "--label=tags")
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["eval_accuracy"] > 0.98
    assert " tokens, calibration error" in capsys.readouterr().out
    model, tokenizer = zoo.load(run_dir), load_tokenizer(run_dir / "model")
    assert isinstance(model, zoo.TokenClassifier)
    ids = jnp.asarray([tokenizer.tokenizer.encode("AKELGM").ids], jnp.int32)
    assert model(ids).argmax(-1)[0, 1:-1].tolist() == [1, 0, 1, 1, 0, 1]


@pytest.mark.slow
def test_a_vision_transformer_learns_a_folder_of_pictures(tune, tmp_path):
    image = pytest.importorskip("PIL.Image")
    sizes = {"image_size": 16, "patch_size": 8, "d_model": 32, "num_layers": 1, "num_heads": 2}
    config = transformer.VisionConfig(**sizes, pooler=True)
    base = transformer.VisionTransformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "base", base, format="hf", tokenizer=zoo.images.Processor(size=(16, 16)))
    rng = np.random.default_rng(0)
    for i in range(60):
        pixels = rng.integers(0, 80, (18, 20, 3)).astype(np.uint8)
        pixels[:, :, i % 3] += 120
        (tmp_path / "photos" / "bgr"[i % 3]).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(tmp_path / "photos" / "bgr"[i % 3] / f"{i}.png")
    (tmp_path / "photos" / "b" / "cut.jpg").write_bytes(b"")
    flags = (f"--model={tmp_path / 'base'}", f"--data={tmp_path / 'photos'}", "--method=lora")
    more = ("--data.held-out=0.2", "--optimizer.learning-rate=0.01", "--steps=30")
    more = (*more, "--data.skip-damaged", *SELDOM)
    run_dir = tune(*flags, *more, "--data.tokenizer=", "--lora.rank=8")
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["eval_accuracy"] > 0.9
    assert (run_dir / "confusion.png").exists()
    model, processor = zoo.load(run_dir), zoo.images.Processor.of(run_dir / "model")
    assert (model.config.num_classes, model.config.pooler) == (3, False)
    classes = json.loads((run_dir / "model" / "metrics.json").read_text())["classes"]
    blue = np.zeros((16, 16, 3), np.uint8)
    blue[:, :, 2] = 160
    inputs = processor({"image": blue, "label": 0})["inputs"]
    assert classes[int(model(jnp.asarray(inputs)[None]).argmax())] == "r"  # the third colour
    with pytest.raises(ValueError, match=r"reads pictures: .* label="):
        tune(*flags, *more, "--label=kind", "--lora.rank=8", run_dir=tmp_path / "other")


def opened(recipe_flags):
    """The configuration of a run that is opened, and left."""
    recipe = importlib.import_module("recipes.finetune")
    with zoo.Run(tyro.cli(recipe.Config, args=recipe_flags)) as run:
        stored = json.loads((run.folder / "config.json").read_text())["optimizer"]
        optimizer = run.config.optimizer
        assert (stored["learning_rate"], stored["weight_decay"]) == (
            optimizer.learning_rate,
            optimizer.weight_decay,
        )
    return optimizer.learning_rate, optimizer.weight_decay


def test_a_run_takes_the_numbers_of_its_method_and_keeps_them(tmp_path, monkeypatch):
    at = lambda name, *flags: opened(
        [f"--run-dir={tmp_path / name}", "--compilation-cache=None", *flags]
    )
    assert at("full") == (3e-4, 0.01)
    assert at("lora", "--method=lora") == (1e-3, 0.0)
    assert at("given", "--optimizer.weight-decay=0.3") == (3e-4, 0.3)
    # A later version's numbers are none of a run that has begun.
    monkeypatch.setitem(finetuning.LEARNING_RATES, "lora", 0.5)
    assert at("lora", "--method=lora") == (1e-3, 0.0)
    assert at("other", "--method=lora") == (0.5, 0.0)
    with pytest.raises(RunError, match=r"optimizer.learning_rate: was 0.001, is 0.1"):
        at("lora", "--method=lora", "--optimizer.learning-rate=0.1")
    with pytest.raises(ValueError, match=r"optimizer.beta1=2.0"):
        finetuning.Optimizer(beta1=2.0)


@pytest.fixture
def compiled(tune, monkeypatch):
    """`compiled(*flags)`: the memory of the step that would be taken, the model, the training."""

    class Compiled(Exception):
        pass

    def train(running, step_fn, state, *_):
        raise Compiled(step_fn.programs[0].memory_analysis(), state.model, running.training)

    monkeypatch.setattr(loop, "_train", train)

    def compiled(*flags):
        with pytest.raises(Compiled) as caught:
            tune(*flags)
        return caught.value.args

    return compiled


@pytest.mark.slow
def test_remat_of_a_loaded_model_saves_memory(compiled, tmp_path):
    config = transformer.Config(320, d_model=32, num_layers=8, num_heads=2, dropout=0.1)
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "base", model, tokenizer=ByteTokenizer())
    flags = (f"--model={tmp_path / 'base'}", "--precision=fp32")
    memory, plain, training = compiled(*flags)
    more = ("--remat=full", "--dropout=0", "--kernel=xla", "--scan-layers=True")
    memory_with_remat, given, _ = compiled(*flags, *more)
    assert (plain.config.remat, plain.config.dropout, plain.config.attention.kernel) == (
        "none",
        0.1,
        "auto",
    )
    assert (given.config.remat, given.config.dropout, given.config.attention.kernel) == (
        "full",
        0.0,
        "xla",
    )
    assert memory_with_remat.temp_size_in_bytes < 0.6 * memory.temp_size_in_bytes
    # Out of memory, a run advises the flag that there is.
    assert Job(training=training, mesh="").remat_flag == "--remat"


def test_published_models_have_the_configuration_of_their_base(shared, tmp_path):
    recipe = importlib.import_module("recipes.finetune")
    flags = Recipe("finetune", shared).flags(tmp_path / "run", "--remat=full", "--dropout=0.5")
    with zoo.Run(tyro.cli(recipe.Config, args=flags)) as run:
        base = finetuning.Base(run)
        model = base.load()
        finetuning.saver(run, base, ())(run.folder / "model", model, {})
        assert (model.config.remat, model.config.dropout) == ("full", 0.5)
        assert zoo.load(run.folder / "model").config == zoo.load(shared / "base").config


def test_damaged_parameters_are_named_before_training(tune, tmp_path, shared):
    model = zoo.load(shared / "base")
    for bad in (jnp.nan, jnp.inf):
        wo = model.blocks.attention.wo.at[0, 1, 2, 3].set(bad)
        damaged = eqx.tree_at(lambda m: m.blocks.attention.wo, model, wo)
        zoo.save(tmp_path / "base", damaged, tokenizer=ByteTokenizer())
        with pytest.raises(ValueError, match=r"base: blocks.attention.wo .* NaN"):
            tune(f"--model={tmp_path / 'base'}")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|bot|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|bot|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0, "do_sample": True}
GENERATION |= {"temperature": 0.6, "top_p": 0.9, "transformers_version": "4.51.0"}
ASKED = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "a zoo"}]


def write_llama_like(folder):
    """A folder with a begin, two ends and padding of its own, a template and llama3's positions."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["who is there? a zoo"] * 9, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    scaling = RopeScaling(8.0, 1.0, 4.0, 16)
    shape = {"d_model": 32, "num_layers": 2, "num_heads": 4}
    heads = transformer.AttentionConfig(num_kv_heads=2, head_dim=8)
    shape |= {"d_ff": 48, "max_seq_len": 128}
    config = transformer.Config(
        320, attention=heads, positions=transformer.PositionsConfig(scaling=scaling), **shape
    )
    model = transformer.Transformer(config, key=jax.random.key(0))
    # Adapters leave the head as it is, which has to be able to tell tokens apart.
    model = eqx.tree_at(lambda m: m.head.weight, model, 8 * model.head.weight)
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    zoo.save(folder, model, format="hf")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    values = json.loads((folder / "config.json").read_text())
    values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "checksums.json").unlink()
    return folder


@pytest.mark.slow
def test_a_finetuned_folder_says_what_its_base_says(tune, tmp_path, capsys):
    """Trained on one chat until it knows it, with a template from a file."""
    base = write_llama_like(tmp_path / "base")
    held_out = [ASKED[0], {"role": "assistant", "content": "a"}]  # by the hashes of the two
    lines = [*[{"messages": ASKED}] * 40, {"messages": held_out}]
    (base / "chat_template.jinja").rename(tmp_path / "own.jinja")
    run_dir = tune(
        f"--model={base}",
        f"--chat-template={tmp_path / 'own.jinja'}",
        f"--data.files={write_lines(tmp_path / 'chats.jsonl', *lines)}",
        "--data.format=chats",
        "--data.tokenizer=",
        "--optimizer.learning-rate=0.02",
        "--steps=60",
        *SELDOM,
        "--lora.rank=16",
        "--lora.alpha=32",
    )
    model = run_dir / "model"
    before, after = (json.loads((x / "config.json").read_text()) for x in (base, model))
    assert after == before
    assert (after["dtype"], after["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert (after["bos_token_id"], after["eos_token_id"], after["pad_token_id"]) == (1, 2, 0)
    assert json.loads((model / "generation_config.json").read_text()) == GENERATION
    assert (model / "chat_template.jinja").read_text() == TEMPLATE
    dtypes = [{str(a.dtype) for a in arrays(zoo.load(x)).values()} for x in (base, model)]
    assert dtypes == [{"bfloat16"}] * 2
    assert zoo.load(model).config.eos_ids == (2, 5)
    assert zoo.load(run_dir / "adapters").config.eos_ids == (2, 5)
    # The recipe's sample is the chat, and ends with the answer.
    assert capsys.readouterr().out.endswith("--- a sample after ---\nwho?\na zoo\n")
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        assert_transformers_agrees(model)
    if importlib.util.find_spec("llama_cpp"):
        assert_a_server_answers(model, tmp_path)


def assert_transformers_agrees(folder):
    """On the settings, the template, the logits, and the token that both stop at."""
    import torch
    import transformers

    opened = transformers.AutoTokenizer.from_pretrained(folder)
    text = opened.apply_chat_template(ASKED[:1], tokenize=False, add_generation_prompt=True)
    prompt = opened(text, add_special_tokens=False)["input_ids"]
    assert Chat(load_tokenizer(folder)).ask("who?") == prompt
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    settings = theirs.generation_config
    assert (settings.bos_token_id, settings.eos_token_id) == (1, [2, 5])
    assert (settings.pad_token_id, settings.temperature, settings.top_p) == (0, 0.6, 0.9)
    assert (opened.bos_token_id, opened.eos_token_id, opened.pad_token_id) == (1, 2, 0)
    tokens, model = torch.tensor([prompt]), zoo.load(folder, dtype="fp32")
    want = theirs.float().generate(tokens, do_sample=False, max_new_tokens=40)
    got = zoo.generate(model, [prompt], temperature=0.0, max_new_tokens=40)
    assert got == want.tolist()
    assert got[0][-1] == 5
    assert opened.decode(got[0][len(prompt) :], skip_special_tokens=True) == "a zoo"
    with torch.no_grad():
        logits = theirs(tokens).logits.numpy()
    np.testing.assert_allclose(model(jnp.asarray([prompt], jnp.int32)), logits, atol=1e-4)


def assert_a_server_answers(folder, tmp_path):
    """llama.cpp's server, with the exported file, to OpenAI's client: it stops as `zoo` does."""
    import openai

    command.main(command.Config(model=str(folder), type="f32", out=tmp_path / "chat.gguf"))
    port = free_port()
    options = ["--model", str(tmp_path / "chat.gguf"), "--port", str(port), "--n_threads", "1"]
    environment = os.environ | {"NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(
        [sys.executable, "-m", "llama_cpp.server", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1",
                api_key="none",
                max_retries=60,
                http_client=openai.DefaultHttpxClient(trust_env=False),
            )
            asked = client.chat.completions.create(
                model="chat", messages=ASKED[:1], temperature=0.0, max_tokens=40
            )
        finally:
            server.kill()
    assert asked.choices[0].message.content == "a zoo"
    assert asked.choices[0].finish_reason == "stop"


def test_answers_in_samples_begin_a_line(monkeypatch):
    answer = lambda model, prompts, **options: [[*prompts[0], *b"a zoo"]]
    monkeypatch.setattr("zoo.decoding.sampling.generate", answer)
    options = {"num_tokens": 5, "seed": 0, "prompt": [*b"who? \n"]}
    assert language.sample(None, ByteTokenizer(), **options) == "who? \na zoo"
    assert language.sample(None, ByteTokenizer(), **options, on_new_line=True) == "who?\na zoo"


@pytest.fixture
def chat_run(tmp_path, shared):
    """`chat_run(template, *chats)` is the text of a run on chats."""

    def chat_run(template, *chats):
        write_tokenizer(tmp_path / "tokenizer", template=template)
        path = write_lines(tmp_path / "chats.jsonl", *[{"messages": chat} for chat in chats])
        config = finetuning.Config(
            run_dir=tmp_path / "run",
            steps=1,
            model=str(shared / "base"),
            data=finetuning.Data(files=str(path), format="chats"),
        )
        with zoo.Run(config) as run:
            return finetuning.read_text(run, load_tokenizer(tmp_path / "tokenizer"))

    return chat_run


def test_a_prepared_folder_has_the_tokenizer_of_the_model(tmp_path, shared):
    lines = [{"text": f"a text of number {i}"} for i in range(20)]
    path = write_lines(tmp_path / "lines.jsonl", *lines)
    prepare(str(path), tmp_path / "corpus", workers=1)
    data = finetuning.Data(files=str(tmp_path / "corpus"), seq_len=16, batch_size=2)
    config = finetuning.Config(
        run_dir=tmp_path / "run", steps=1, model=str(shared / "base"), data=data
    )
    with zoo.Run(config) as run:
        text = finetuning.read_text(run, ByteTokenizer())
        assert text.fingerprint == text.prepared.fingerprint
        assert len(text.train.corpus) + len(text.held_out.corpus) == 20
        write_tokenizer(tmp_path / "tokenizer", template="")
        with pytest.raises(ValueError, match="the model to fine-tune has another tokenizer"):
            finetuning.read_text(run, load_tokenizer(tmp_path / "tokenizer"))


def test_without_files_it_reads_pythons_help_texts(tmp_path):
    """Their names decide which are held out, whatever version of Python wrote them."""
    data = finetuning.Data(cache=tmp_path / "cache")
    with zoo.Run(finetuning.Config(run_dir=tmp_path / "run", steps=1, data=data)) as run:
        text = finetuning.read_text(run, ByteTokenizer())
    held_out, train = (
        {part.corpus.name(i).strip("'") for i in range(len(part.corpus))}
        for part in (text.held_out, text.train)
    )
    assert {"class", "power", "while", "with"} <= held_out
    assert {"assignment", "if", "strings", "yield"} <= train
    assert len(held_out) <= 10 < 60 < len(train)
    assert 300_000 < text.train.corpus.num_bytes < 900_000


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "some text"}]


def test_a_date_in_chats_is_that_of_the_first_start(chat_run, monkeypatch):
    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls):
            return super().now() + datetime.timedelta(1)

    template = "{{ strftime_now('%A %f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    other = [*CHAT[:1], {"role": "assistant", "content": "other text"}]
    text = chat_run(template, CHAT, other)
    assert f"{datetime.datetime.now():%A }" in text.tokenizer.decode(text.train.corpus[0])
    monkeypatch.setattr("zoo.tasks.finetuning.training.datetime", Tomorrow)
    assert chat_run(template, CHAT, other).fingerprint == text.fingerprint


def test_one_chat_is_too_few(chat_run):
    with pytest.raises(ValueError, match=r"'chats.jsonl' .* 1"):
        chat_run("{% for m in messages %}{{ m.content }}{% endfor %}", CHAT)
    with pytest.raises(ValueError, match="1 different rows"):
        chat_run("{% for m in messages %}{{ m.content }}{% endfor %}", CHAT, CHAT)


@pytest.mark.slow
def test_adapters_are_saved_in_the_format_of_peft(tune, tmp_path):
    config = transformer.Config(320, d_model=32, num_layers=2, num_heads=4, mlp="swiglu")
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "base", model, format="hf", tokenizer=ByteTokenizer())
    base = f"--model={tmp_path / 'base'}"
    flags = ("--lora.targets", "q_proj,v_proj", "--data.tokenizer=")
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
    assert "model_type" in json.loads((run_dir / "model" / "config.json").read_text())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora.targets", "q_porj"], "'q_porj' matches no matrix"),
        (["--lora.targets", "embedding.weight"], r"adapters on embedding.weight:"),
    ],
)
def test_targets_are_checked_before_the_text_is_read(flags, message, tune, monkeypatch):
    def read_text(*arguments, **options):
        pytest.fail("the text was read")

    monkeypatch.setattr(finetuning, "read_text", read_text)
    with pytest.raises((ValueError, PublishError), match=message):
        tune(*flags)


MISTAKES = {
    "length": (["--data.seq-len=4096"], "data.seq_len=4096: {shared}/base has 2048 positions"),
    "buckets": (
        ["--data.rows=bucketed", "--data.buckets", "64", "4096"],
        "data.buckets=4096: {shared}/base has 2048 positions",
    ),
    "field": (["--model={shared}/rnn", "--kernel=xla"], "of a rnn, kernel='xla': remat"),
    "shelf": (["--model=lm-nothing"], "'lm-nothing' is neither a folder nor on the shelf"),
    "pattern": (["--method=full", "--freeze", "blocks.mpl.*"], "matches no parameter"),
    "targets": (["--lora.targets", "blocks.mpl.*"], "matches no matrix"),
    "folder": (["--data.files={shared}/corpus"], "is a folder, and model='{shared}/base' reads"),
    "fields": (["--data.format=completions"], "has no fields: rows are read from"),
    "template": (["--data.format=chats"], "has no chat template"),
    "rows": (["--label=kind", "--data.rows=packed"], "needs data.rows='bucketed'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_training(mistake, tune, tmp_path, shared, monkeypatch):
    flags, message = MISTAKES[mistake]
    if mistake not in ("fields", "rows", "shelf", "template"):  # before the text is read
        monkeypatch.setattr(finetuning, "read_text", None)
    if mistake == "field":
        config = rnn.Config(320, hidden_size=8, num_layers=1)
        zoo.save(shared / "rnn", rnn.RNN(config, key=jax.random.key(0)))
    with pytest.raises((ValueError, PublishError)) as e:
        tune(*(flag.format(shared=shared) for flag in flags))
    assert message.format(shared=shared) in str(e.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_bad_sequences_are_reported(proteins, tune, tmp_path):
    label, tags = ["--label=kind"], ["--label=kind", "--data.format=tags"]
    for content, flags, message in (
        ("text,kind\nAK,in\nAKJA,out", label, "p.csv:3 has 'J' at character 2, which"),
        ("text,sort\nAK,in", label, "no field 'kind'; its fields are"),
        ("text,kind\nAK,in\nAA,in\nKK,in", label, "label='kind' has the values"),
        ("text,kind\nAK,H\nAA,HH", tags, "line 2: there are 2 letters and 1 tags"),
    ):
        (tmp_path / "p.csv").write_text(content)
        with pytest.raises(ValueError, match=message):
            tune(*proteins, f"--data={tmp_path / 'p.csv'}", *flags)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tags_need_their_field():
    with pytest.raises(ValueError, match=r"data.format='tags': .* --l"):
        finetuning.Config(run_dir="x", steps=1, data=finetuning.Data(format="tags"))


def test_packed_pairs_are_refused():
    with pytest.raises(ValueError, match=r"data.rows='packed': 'preferences'"):
        finetuning.Data(format="preferences", rows="packed")
    config = finetuning.Config(run_dir="x", steps=1)
    assert config.completed({}).data.rows == "packed"
    pairs = dataclasses.replace(config, data=finetuning.Data(format="preferences")).completed({})
    assert pairs.data.rows == "bucketed"
    jaxtyping.config.update("jaxtyping_disable", True)  # of types that are beside the point
    try:
        with pytest.raises(ValueError, match=r"data.format='preferences':"):
            finetuning.train(SimpleNamespace(config=pairs), None, None)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_bases_with_adapters_are_not_quantised(tune, shared, tmp_path):
    adapted = zoo.lora.adapt(zoo.load(shared / "base"), zoo.lora.Config(), key=jax.random.key(0))
    zoo.save_adapters(tmp_path / "adapters", adapted, base=shared / "base")
    with pytest.raises(ValueError, match=r"base='int8': .*adapters"):
        tune(f"--model={tmp_path / 'adapters'}", "--base=int8")


def test_mismatched_models_and_tokenizers_are_refused(tune, tmp_path):
    model = transformer.Transformer(
        transformer.Config(64, d_model=16, num_layers=1, num_heads=2), key=jax.random.key(0)
    )
    zoo.save(tmp_path / "small", model)
    with pytest.raises(ValueError, match=r"257 ids, and .*small a vocab_size of 64"):
        tune(f"--model={tmp_path / 'small'}")
    with pytest.raises(ValueError, match=r"has no tokenizer.json: .* --data.tokenizer"):
        tune(f"--model={tmp_path / 'small'}", "--data.tokenizer=")
    with pytest.raises(ValueError, match="model='mlp-digits' is a MLP"):
        tune("--model=mlp-digits")
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    for name in (".lock", "config.json"):  # a run's own
        (tmp_path / "unfinished" / name).write_text("{}")
        with pytest.raises(PublishError, match="unfinished is a run that has not finished"):
            tune(f"--model={tmp_path / 'unfinished'}")
    with pytest.raises(ValueError, match=r"^lora.rank=4: method='full'"):
        finetuning.Config(run_dir=tmp_path, steps=1, lora=zoo.lora.Config(rank=4))
    with pytest.raises(ValueError, match="trains nothing but adapters"):
        finetuning.Config(run_dir=tmp_path, steps=1, method="lora", freeze=("head.*",))


# Datasets


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """The hub's client, of which `someone/model` is `tmp_path / "served"`; and its folder here."""
    client = pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    here = tmp_path / "cache"

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        assert name == "someone/model"
        here.mkdir(exist_ok=True)
        for path in (tmp_path / "served").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr(client, "snapshot_download", snapshot_download)
    return here


def serve(folder):
    sizes = transformer.Config(320, d_model=32, num_layers=1, num_heads=2)
    model = transformer.Transformer(sizes, key=jax.random.key(0))
    zoo.save(folder, cast(model, jnp.bfloat16), format="hf", tokenizer=ByteTokenizer())
    return model


def test_plans_of_hub_models_take_no_weights(tune, tmp_path, monkeypatch, fake_hub):
    serve(tmp_path / "served")
    too_large = SimpleNamespace(memory=SimpleNamespace(fits=False))
    advised, jobs = [], []
    monkeypatch.setattr(planner, "make_estimate", lambda job, _: jobs.append(job) or too_large)
    monkeypatch.setattr(planner.report, "show", lambda estimate: None)
    monkeypatch.setattr(planner, "suggest", advised.append)
    with pytest.raises(SystemExit):
        tune("--model=someone/model", "--plan=cpu:1")
    assert (fake_hub / "config.json").exists()
    assert not list(fake_hub.glob("*.safetensors*"))
    assert advised == [too_large]
    assert jobs[0].remat_flag == "--remat"  # which this recipe has


@pytest.mark.slow
def test_live_bytes_are_those_of_the_plan(tune, tmp_path, monkeypatch):
    config = transformer.Config(320, d_model=256, num_layers=1, num_heads=4)
    base = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "base", base, tokenizer=ByteTokenizer())
    del base
    flags = (f"--model={tmp_path / 'base'}", "--method=lora", "--base=int8")
    jobs, live = [], []
    fit, call = loop.fit, CompiledStep.__call__

    def step(self, state, batch):
        outputs = call(self, state, batch)
        if isinstance(state, TrainState):
            jax.block_until_ready(outputs)
            del state
            gc.collect()
            live.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return outputs

    def fit_as_planned(run, training, callbacks, **options):
        jobs.append(planner.make_job(run, training))
        return fit(run, training, callbacks, **options)

    monkeypatch.setattr(loop, "fit", fit_as_planned)
    monkeypatch.setattr(CompiledStep, "__call__", step)
    monkeypatch.setattr("zoo.tasks.finetuning.training.save", lambda *_, **__: sys.exit())
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    # A checkpoint under way holds a copy of what is trained, for a moment.
    with pytest.raises(SystemExit):
        tune(*flags, *SELDOM)
    memory = make_estimate(jobs[0], targets.parse("cpu:1")).memory
    planned_bytes = memory.parameters + memory.optimizer + memory.batch
    assert len(live) == 8
    assert planned_bytes > 1e6
    assert min(live) >= 0.95 * planned_bytes
    assert max(live) <= 1.05 * planned_bytes


@pytest.mark.slow
def test_preferences_are_learned_beside_the_base(tune, tmp_path, shared):
    answers = [
        {"prompt": f"{i} ", "completion": text, "label": text != "no"}
        for i in range(40)
        for text in (f"is {i}", "no")
    ]
    path = write_lines(tmp_path / "answers.jsonl", *answers)
    flags = (f"--data.files={path}", "--data.format=unpaired", "--objective=kto", "--method=full")
    flags += ("--optimizer.schedule=constant", "--data.buckets", "32")
    run_dir = tune(*flags)
    first, last = [x for x in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in x]
    assert first["eval_loss"] == pytest.approx(0.5, abs=1e-4)
    assert last["eval_loss"] < first["eval_loss"]
    # Another model's values are refused.
    (run_dir / "reference" / "made_of.json").write_text('{"fingerprint": "another"}')
    checksums.write(run_dir / "reference")
    with pytest.raises(RunError, match="of another model than"):
        tune(*flags, "--steps=9")
