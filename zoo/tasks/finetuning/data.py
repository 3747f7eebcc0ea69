"""Text to fine-tune on: documents, completions, chats, pairs, and where a sample begins."""

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data import completions, text
from zoo.data.chats import ChatTemplate
from zoo.data.documents import Document, help_topics
from zoo.data.preferences import make_pairs, read_preferences
from zoo.data.prepared.agreement import check_tokenizer
from zoo.data.tokenizer import Tokenizer
from zoo.runs.run import Run
from zoo.tasks import begun, language
from zoo.tasks.finetuning.config import Config, Data

_REMEDY = "prepare the text again, with --tokenizer and the model's folder"


def read_text(run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code."""
    config = run.config.data
    text.check_label(config, label)
    if config.format == "text":
        for_memory = begun.for_memory(run)
        prepared = text.find_prepared(config, Data(), label, tokenizer, for_memory=for_memory)
        if prepared is not None:
            check_tokenizer(prepared, tokenizer, "the model to fine-tune", _REMEDY)
            data = text.prepared_text(config, prepared, seed=run.config.seed)
            language.say_what_there_is(run, data)
            return data
    documents, tokenize = _documents(run, config, tokenizer, label)
    if config.format != "text" and len({document.text for document in documents}) < 2:
        raise ValueError(
            f"data.files={config.files!r} has one line of {config.format}, or copies of one: give "
            "two or more that differ, one of which is held out"
        )
    if config.format == "preferences":
        data = make_pairs(config, documents, tokenizer, seed=run.config.seed, tokenize=tokenize)
        language.say_what_there_is(run, data)
        return data
    data = text.make_text(
        config,
        text.split(config, documents),
        tokenizer,
        seed=run.config.seed,
        label=label,
        tokenize=tokenize,
    )
    language.say_what_there_is(run, data)
    return data


def _documents(
    run: Run[Config], config: Data, tokenizer: Tokenizer, label: str | None
) -> tuple[list[Document], Any]:
    """The documents, and the function that makes a corpus of them."""
    if config.format != "text" and (label is not None or not config.files):
        raise ValueError(
            f"data.format={config.format!r} takes data.files (now {config.files!r}) and no label "
            f"(now {label!r})"
        )
    if config.format == "completions":
        fields = {"prompt": config.prompt, "completion": config.completion}
        return completions.read_completions(config.files, **fields), completions.tokenize_parts
    if config.format == "preferences":
        pairs, are_chats = read_preferences(
            config.files, lambda: _template(run, tokenizer), prompt=config.prompt
        )
        return pairs, completions.tokenize_chats if are_chats else completions.tokenize_parts
    if config.format == "chats":
        template = _template(run, tokenizer)
        chats = completions.read_chats(config.files, template, field=config.messages)
        return chats, completions.tokenize_chats
    documents = text.read_documents_of(config, label) if config.files else help_topics()
    return documents, text.tokenize


def _template(run: Run[Config], tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's template; a run that is resumed on another day reads the same."""
    template = ChatTemplate(tokenizer)
    return ChatTemplate(tokenizer, _first_start(run)) if template.writes_time else template


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
