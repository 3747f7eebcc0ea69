"""zoo.tasks.generation: prompts, stops and chats as tokens; `recipes.generate --chat` with them."""

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import tyro
from helpers import drawn_rnn, drawn_transformer

import zoo
from recipes import finetune, generate
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, reading
from zoo.runs.command_line import cli
from zoo.tasks import generation
from zoo.tasks.generation import Chat, Continuation, Stops

NAMES = ["<s>", "</s>", "<|user|>", "<|bot|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ '<|bot|>' if m.role == 'assistant' else '<|user|>' if m.role == 'user' else '' }}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def make_tokenizer(template: str = TEMPLATE, **config: Any) -> BPETokenizer:
    """One token per byte but for "ab", and some special ones."""
    tokenizer = BPETokenizer.train(["ab ab ab"], 258).tokenizer
    tokenizer.add_special_tokens(NAMES)
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    return BPETokenizer(
        tokenizer, config=config | ({"chat_template": template} if template else {})
    )


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return make_tokenizer()


def id_of(tokenizer: BPETokenizer, name: str) -> int:
    found = tokenizer.tokenizer.token_to_id(name)
    assert found is not None
    return found


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).tolist()


# --- Prompts and stops --------------------------------------------------------------------------


def test_prompts_begin_as_texts_do():
    assert generation.encode_prompt(ByteTokenizer(), "ab") == [256, *b"ab"]
    assert generation.encode_prompt(ByteTokenizer(), "") == [256]
    both = make_tokenizer(bos_token="</s>")
    assert generation.encode_prompt(both, "x") == [id_of(both, "</s>"), *ids_of(both, "x")]
    assert generation.encode_prompt(both, "x", as_stored=True) == ids_of(both, "x")
    assert generation.encode_prompt(both, "", as_stored=True) == [id_of(both, "</s>")]
    none = make_tokenizer(bos_token=None)
    assert generation.encode_prompt(none, "x") == ids_of(none, "x")
    # A name is that token, and a begin that is there is not put there again.
    end = id_of(both, "<|end|>")
    begun = [id_of(both, "</s>"), *ids_of(both, "x"), end]
    assert generation.encode_prompt(both, "x<|end|>") == begun
    assert generation.encode_prompt(both, "</s>x<|end|>") == begun
    assert generation.encode_prompt(both, "x<|end|>", "text") == [
        id_of(both, "</s>"),
        *ids_of(both, "x<|end|>"),
    ]
    assert end not in ids_of(both, "x<|end|>")
    with pytest.raises(ValueError, match=r"prompt is empty, .* token"):
        generation.encode_prompt(none, "")


def test_a_turn_of_a_chat_is_text_unless_told(tokenizer: BPETokenizer):
    end = id_of(tokenizer, "<|end|>")
    for special_tokens, count in (("text", 1), ("parse", 2)):
        assert Chat(tokenizer, None, special_tokens).ask("hi<|end|>").count(end) == count
    assert Chat(tokenizer).ask("hi<|end|>").count(end) == 1


def hugging_face_folder(folder: Path, tokenizer: BPETokenizer, **settings: Any) -> Path:
    model = drawn_transformer(vocab_size=tokenizer.vocab_size, num_layers=1)
    zoo.save(folder, model, format="hf", tokenizer=tokenizer)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "checksums.json").unlink()
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], dict]]:
    """The prompts and options that the recipe generates with."""
    found: list[tuple[list[list[int]], dict]] = []

    def stream_texts(model: Any, tokenizer: Any, prompts: Any, stops: Any, **options: Any) -> Any:
        found.append((prompts, options))
        return [Continuation(tokenizer, prompts[0], stops)], iter(())

    monkeypatch.setattr(generation, "stream_texts", stream_texts)
    return found


def test_settings_of_the_folder_are_taken_over(
    asked: Any, tokenizer: BPETokenizer, tmp_path: Path, capsys: Any
):
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": None}
    folder = hugging_face_folder(tmp_path / "model", tokenizer, **settings)
    names = ("temperature", "top_k", "top_p")

    def sampled(*flags: str, folder: Path = folder) -> tuple:
        args = [str(folder), "ab", "--max-new-tokens=1", *flags]
        generate.main(tyro.cli(generate.Config, args=args))
        return tuple(getattr(asked[-1][1]["sampling"], name) for name in names)

    assert sampled() == (0.6, 20, 0.9)
    said = "(by generation_config.json: temperature=0.6, top_k=20, top_p=0.9)"
    assert said in capsys.readouterr().err
    assert sampled("--temperature=0.3", "--top-k=0", "--top-p=1") == (0.3, 0, 1.0)
    # Adapters are on a folder that says it, unless their own does.
    adapted = zoo.lora.adapt(zoo.load(folder), zoo.lora.Config(rank=1), key=jax.random.key(0))
    zoo.save_adapters(tmp_path / "adapters", adapted, base=folder)
    assert sampled(folder=tmp_path / "adapters") == (0.6, 20, 0.9)
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert sampled() == (0.0, None, None)
    (folder / "generation_config.json").write_text('{"temperature": -1.0}')
    with pytest.raises(ValueError, match=r"model/generation_config.json: temperature=-1.0"):
        sampled()
    (folder / "generation_config.json").unlink()
    assert sampled() == (None, None, None)


class Model:
    class config:
        eos_ids = (7,)


def test_stops_are_the_model_s_or_else_the_tokenizer_s(tokenizer: BPETokenizer):
    assert generation.make_stops(Model(), tokenizer) == Stops((7,))
    assert generation.make_stops(None, tokenizer) == Stops((id_of(tokenizer, "</s>"),))
    assert generation.make_stops(None, ByteTokenizer()) == Stops((256,))
    assert generation.make_stops(Model(), tokenizer, own=[3]) == Stops((3,))
    assert generation.make_stops(Model(), tokenizer, own=()) == Stops(())


def test_given_stops_are_special_tokens_or_texts(tokenizer: BPETokenizer, caplog: Any):
    stops = generation.make_stops(Model(), tokenizer, ["<|end|>", "ab", "abc"])
    [one] = ids_of(tokenizer, "ab")
    assert stops == Stops((7, id_of(tokenizer, "<|end|>"), one), ("ab", "abc"))
    assert len(ids_of(tokenizer, "<|end|>")) > 1  # as a text it is several tokens
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert generation.make_stops(Model(), tokenizer, ["<|fin|>"]) == Stops((7,), ("<|fin|>",))
    assert "stop='<|fin|>' is no special token" in caplog.text
    with pytest.raises(ValueError, match="stop=''"):
        generation.make_stops(Model(), tokenizer, [""])
    generation.check_stop_tokens(tokenizer, Stops((), ("ab",)))
    with pytest.raises(ValueError, match=r"stop='abc' is 2 tokens .*num_beams=1"):
        generation.check_stop_tokens(tokenizer, stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("hello\n\nworld", ["\n\n"], "hello\n\n"),
        ("aab abc", ["abc"], "aab abc"),
        ("xab", ["b", "ab"], "xab"),
        ("xyab", ["xy", "x"], "x"),
        ("one 漢two", ["漢"], "one 漢"),
        ("nothing", ["\n"], "nothing"),
    ],
)
def test_a_text_ends_with_the_first_stop(text: str, stops: Any, shown: str, tokenizer: Any):
    row = Continuation(tokenizer, ids_of(tokenizer, "ab\n\nabc"), Stops((), tuple(stops)))
    parts = [row.add(token) for token in ids_of(tokenizer, text)]
    assert row.prompt == "ab\n\nabc"  # in which nothing stops
    assert "".join([*parts, row.end()]) == row.text == shown
    assert row.stopped == (stops != ["\n"])


def test_an_incomplete_character_is_shown_at_the_end(tokenizer: BPETokenizer):
    row = Continuation(tokenizer, [], Stops((id_of(tokenizer, "</s>"),)))
    first, *_ = ids_of(tokenizer, "漢")
    assert [row.add(first), row.add(id_of(tokenizer, "</s>")), row.add(first)] == ["", "", ""]
    assert row.stopped
    assert row.end() == "\ufffd"


# --- Chats --------------------------------------------------------------------------------------


def rendered(tokenizer: BPETokenizer, *parts: str) -> list[int]:
    """Names of special tokens are those, and the rest is text."""
    ids = [[id_of(tokenizer, x)] if x in NAMES else ids_of(tokenizer, x) for x in parts]
    return [token for part in ids for token in part]


def test_a_chat_grows_by_its_template(tokenizer: BPETokenizer):
    chat = Chat(tokenizer, "be brief")
    first = rendered(tokenizer, "be brief", "<|end|>", "<|user|>", "hi", "<|end|>", "<|bot|>")
    assert chat.ask("hi") == first
    with pytest.raises(ValueError, match="refuses it: not that"):
        chat.ask("no")
    chat.hear("ab")
    more = rendered(tokenizer, "ab", "<|end|>", "<|user|>", "who", "<|end|>", "<|bot|>")
    assert chat.ask("who") == first + more
    assert [message["role"] for message in chat.messages] == [
        "system",
        *["user", "assistant"],
        "user",
    ]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (TEMPLATE, "<|end|>"),
        (TEMPLATE.replace("<|end|>", "</s>"), "</s>"),
        (TEMPLATE.replace("<|end|>", "\n"), None),
        ("{{ raise_exception('never') }}", None),
        ("{{ messages|length }}{% if add_generation_prompt %}x{% endif %}", None),
    ],
)
def test_the_end_of_a_turn_is_found(template: str, name: str | None):
    tokenizer = make_tokenizer(template)
    found = Chat(tokenizer).template.ends_of_turn
    assert found == (() if name is None else (id_of(tokenizer, name),))


@pytest.fixture(scope="module")
def folder(tokenizer: BPETokenizer, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    zoo.save(folder, drawn_rnn("gru", vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)
    return folder


def run(capsys: Any, *flags: Any) -> str:
    args = ["--max-new-tokens=8", "--temperature=0.0", *map(str, flags)]
    generate.main(tyro.cli(generate.Config, args=args))
    return capsys.readouterr().out


def test_a_conversation_goes_on_by_lines(
    folder: Path, tokenizer: BPETokenizer, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    model, history, expected = zoo.load(folder), "S<|end|>", ""
    ends = [id_of(tokenizer, "</s>"), id_of(tokenizer, "<|end|>")]
    for text in ("hi", "and you?"):
        history += f"<|user|>{text}<|end|><|bot|>"
        prompt = reading(tokenizer, "parse").encode(history).tolist()
        options: dict = {"max_new_tokens": 8, "temperature": 0.0, "stop_tokens": ends}
        answer = tokenizer.decode(zoo.generate(model, [prompt], **options)[0][len(prompt) :])
        history += f"{answer}<|end|>"
        expected += f"> {text}\n{answer}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("\nand you?\n"))  # an empty line is no turn
    assert run(capsys, folder, "hi", "--chat", "--system=S") == expected


def test_stop_tokens_replace_those_of_the_model(folder: Path, tokenizer: BPETokenizer, capsys: Any):
    model, prompt = zoo.load(folder), ids_of(tokenizer, "hi")
    options: dict = {"max_new_tokens": 8, "temperature": 0.0, "stop_tokens": ()}
    new = zoo.generate(model, [prompt], **options)[0][len(prompt) :]
    kept = new[: new.index(new[2]) + 1]
    assert len(kept) < 8
    printed = run(capsys, folder, "hi", "--stop-tokens", new[2])
    assert printed == f"hi{tokenizer.decode(kept)}\n"


def test_damaged_models_are_named(folder: Path, tokenizer: BPETokenizer, tmp_path: Path):
    model = zoo.load(folder)
    table = model.embedding.weight.at[1, 2].set(jnp.nan)
    damaged = eqx.tree_at(lambda m: m.embedding.weight, model, table)
    zoo.save(tmp_path / "model", damaged, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"model: embedding.weight .* NaN"):
        generate.main(generate.Config(str(tmp_path / "model"), ("hi",)))


@pytest.mark.parametrize("is_typed", [True, False])
def test_an_interrupt_ends_an_answer(
    is_typed: bool, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []
    inputs = iter(["more", "bye"])

    def ask(_: str) -> str:
        if (text := next(inputs, None)) is None:
            raise EOFError
        return text

    def stream_texts(model: Any, tokenizer: Any, prompts: Any, stops: Any, **_: Any) -> Any:
        asked.append(tokenizer.decode(prompts[0]))
        row = Continuation(tokenizer, prompts[0], stops)

        def steps() -> Any:
            for token in ids_of(tokenizer, "well"):
                yield [row.add(token)]
            if len(asked) == 1:
                raise KeyboardInterrupt

        return [row], steps()

    monkeypatch.setattr(generation, "stream_texts", stream_texts)
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", io.StringIO("more\nbye\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: is_typed)
    ended = contextlib.nullcontext() if is_typed else pytest.raises(KeyboardInterrupt)
    with ended:
        run(capsys, folder, "hi", "--chat")
    # The next turn knows what there is of the answer.
    assert asked == (["hi", "hiwellmore", "hiwellmorewellbye"] if is_typed else ["hi"])


def test_only_runs_are_said_to_resume(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    def interrupted(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["recipe"])
    for config, message in ((generate.Config, "stopped"), (finetune.Config, "the same command")):
        with pytest.raises(SystemExit):
            cli(config, interrupted, "recipes.x")
        shown = capsys.readouterr().err
        assert (message in shown, "command" in shown) == (True, config is finetune.Config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["lm-python", "hi", "--chat"], "has no chat template"),
        (["{folder}", "no", "--chat"], "the chat template refuses it: not that"),
        (["{folder}", "--chat", "--num-beams=2"], "num_beams=2: a chat is sampled"),
        (["{folder}", "--system=x"], "system='x': needs --chat"),
    ],
)
def test_mistakes_of_chats_are_reported(
    flags: list[str], message: str, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "jit", None)  # before any compute
    with pytest.raises((ValueError, SystemExit)) as error:
        run(capsys, *(flag.format(folder=folder) for flag in flags))
    assert message in str(error.value) + capsys.readouterr().err
