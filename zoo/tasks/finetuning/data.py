"""Text to fine-tune on: documents, completions, chats, pairs, and where a sample begins."""

import functools
from datetime import datetime
from pathlib import Path

import numpy as np

from zoo.data import completions, rows, text
from zoo.data.chats import ChatTemplate
from zoo.data.documents import held_out_split, help_topics
from zoo.data.preferences import make_pairs
from zoo.data.prepared.opening import check_tokenizer
from zoo.data.special_tokens import AS_TEXT
from zoo.data.tokenizer import Reading, Tokenizer
from zoo.runs.run import Run
from zoo.tasks import language
from zoo.tasks.finetuning.config import Config, Data

_REMEDY = "prepare the text again, with --tokenizer and the model's folder"


def read_text(run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code."""
    config = run.config.data
    text.check_label(config, label)
    if config.format != "text":
        data = _read_rows(run, config.format, tokenizer, label)
    elif label is not None:
        parts = text.split(config, label)
        data = text.make_text(config, parts, tokenizer, seed=run.config.seed, label=label)
    else:
        prepared = text.open_text(config, Data(), tokenizer, built_in=help_topics)
        check_tokenizer(prepared, tokenizer, "the model to fine-tune", _REMEDY)
        data = text.prepared_text(config, prepared, seed=run.config.seed)
    language.say_what_there_is(run, data)
    return data


def _read_rows(
    run: Run[Config], format: rows.Format, tokenizer: Tokenizer, label: str | None
) -> text.Text:
    """The text of rows, whose form is said."""
    config, seed = run.config.data, run.config.seed
    if label is not None or not config.files:
        raise ValueError(
            f"data.format={format!r} takes data.files (now {config.files!r}) and no label "
            f"(now {label!r})"
        )
    template = functools.cache(lambda: _template(run, tokenizer))
    if format == "chats":
        template()  # a tokenizer without one is refused before any file is read
    names = {name: getattr(config, name) for name in ("prompt", "completion", "messages")}
    documents, form = rows.read_rows(config.files, format, template, names)
    if len({document.text for document in documents}) < 2:
        raise ValueError(
            f"data.files={config.files!r} has one line of {format}, or copies of one: give two or "
            "more that differ, one of which is held out"
        )
    run.say(f"{len(documents):,} rows of {format}: {form.described}")
    reading: Reading
    if form.is_chat:
        tokenize, reading = completions.tokenize_chats, config.special_tokens or "text"
    else:
        tokenize, reading = completions.tokenize_parts, config.reading
    if format == "preferences":
        data = make_pairs(config, documents, tokenizer, seed=seed, tokenize=tokenize)
    else:
        parts = held_out_split(documents, config.held_out)
        data = text.make_text(config, parts, tokenizer, seed=seed, tokenize_rows=tokenize)
    texts, behind = completions.texts_of(documents), AS_TEXT if form.is_chat else ""
    return text.describe_special_tokens(data, reading, texts, behind)


def _template(run: Run[Config], tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's template; a run that is resumed on another day reads the same."""
    given = run.config.data.special_tokens or "text"
    template = ChatTemplate(tokenizer, special_tokens=given)
    if not template.writes_time:
        return template
    return ChatTemplate(tokenizer, _first_start(run), given)


def _first_start(run: Run[Config]) -> datetime:
    """The time of the run's first start, which the run keeps."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "time.txt").write_text(datetime.now().isoformat())

    return datetime.fromisoformat((run.once("first_start", write) / "time.txt").read_text())


def sample_prompt(data: text.Text) -> list[int]:
    """The beginning of a sample: that of a document, or the first held-out prompt."""
    corpus, begin = data.held_out.corpus, language.document_begin(data.tokenizer)
    if corpus.counts is None:
        return begin
    first = corpus[0][: int(np.argmax(corpus.counts))].tolist()
    return first if first and corpus.framed else [*begin, *first]
