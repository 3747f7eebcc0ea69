"""zoo.evaluation.harness: a model behind lm-eval, its chats and its settings of generation."""

import pytest
import tokenizers
from evaluation_cases import asked
from model_folders import write_tokenizer

from zoo.data.tokenizer import load_tokenizer
from zoo.evaluation.harness import ZooLM, generation


def test_generation_is_read_as_lm_eval_does():
    none = {"stops": [], "max_new_tokens": 256, "temperature": 0.0}
    assert generation({}) == none
    assert generation({"do_sample": True}) == none
    found = generation({"until": "x", "max_new_tokens": 9})
    assert found == {**none, "stops": ["x"], "max_new_tokens": 9}
    found = generation({"temperature": 0.5, "top_p": 0.9})
    assert found == {**none, "temperature": 0.5, "top_p": 0.9}
    ignored = {"do_sample": False, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    assert generation(ignored) == {**none, "repetition_penalty": 1.1}
    with pytest.raises(ValueError, match=r"'num_beams'; .* do_sample"):
        generation({"num_beams": 4})


TEMPLATE = (
    "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_chats_are_written_by_the_template(model, tmp_path, monkeypatch):
    ids = write_tokenizer(tmp_path, template=TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    lm = ZooLM(model, tokenizer)
    given = lambda _, stops, **options: iter([{0: " ".join(stops)}])
    monkeypatch.setattr(lm.scorer, "stream_texts", given)
    [before] = lm.generate_until(asked(("a", {"until": ["x"]})))
    chat = [{"role": "user", "content": "text"}]
    text = lm.apply_chat_template(chat)
    [stops] = lm.generate_until(asked(("a", {"until": ["x"]})))
    assert (before, stops) == ("x", "x <eot>")  # the end of a turn
    assert text == "<bos>user: text<eot>assistant: "
    context, continuation = lm._encode_pair(text, "12<eot>")
    assert context == [ids["<bos>"], *tokenizer.encode("user: text"), ids["<eot>"],
                       *tokenizer.encode("assistant:")]  # fmt: skip
    assert continuation[-1] == ids["<eot>"]
    started = [*chat, {"role": "assistant", "content": "some "}]
    continued = lm.apply_chat_template(started, add_generation_prompt=False)
    assert continued == "<bos>user: text<eot>assistant: some"
    assert (lm.chat_template(True), lm.chat_template(False)) == (TEMPLATE, None)
    other = tmp_path / "other"
    write_tokenizer(other, template=TEMPLATE + " ")
    assert lm.tokenizer_name == ZooLM(model, load_tokenizer(tmp_path)).tokenizer_name
    assert lm.tokenizer_name != ZooLM(model, load_tokenizer(other)).tokenizer_name
    with pytest.raises(ValueError, match=r"apply_chat_template='tools': .* give True"):
        lm.chat_template("tools")


def test_an_end_of_turn_that_is_matched_after_normalisation_is_named_as_in_texts(model, tmp_path):
    write_tokenizer(tmp_path, template=TEMPLATE)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.normalizer = tokenizers.normalizers.Prepend("_")
    inner.add_special_tokens([tokenizers.AddedToken("<eot>", normalized=True)])
    inner.save(str(tmp_path / "tokenizer.json"))
    lm = ZooLM(model, load_tokenizer(tmp_path))
    lm.apply_chat_template([{"role": "user", "content": "text"}])
    assert lm._ends == ["<eot>"]


def test_names_of_special_tokens_are_tokens_after_the_begin(model, tmp_path):
    """lm-eval's own models tokenize rendered chats so; see `tokenizers` itself for the ids."""
    ids = write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = library.encode("user\nsome<|im_end|>", add_special_tokens=False).ids
    assert plain[-1] == ids["<|im_end|>"]
    lm, bare = ZooLM(model, tokenizer), ZooLM(model, tokenizer, begin=False)
    begun = [ids["<bos>"], *plain]
    assert lm.tok_encode("user\nsome<|im_end|>") == begun
    assert lm.tok_encode("<bos>user\nsome<|im_end|>") == begun
    assert lm.tok_encode("user\nsome<|im_end|>", add_special_tokens=False) == plain
    assert bare.tok_encode("user\nsome<|im_end|>") == plain
    assert lm.prefix_token_id == ids["<bos>"]
