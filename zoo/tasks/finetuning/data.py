"""Text to fine-tune on: documents, completions, chats, pairs, and where a sample begins."""

from datetime import datetime
from pathlib import Path

import numpy as np

from zoo.data import rows, text
from zoo.data.chats import ChatTemplate, writes_time
from zoo.data.documents import help_topics
from zoo.data.prepared.opening import Prepared, check_tokenizer
from zoo.data.tokenizer import Tokenizer
from zoo.runs.run import Run
from zoo.tasks import language
from zoo.tasks.finetuning.config import Config, Data

_REMEDY = "prepare the text again, with --tokenizer and the model's folder"


def read_text(run: Run[Config], tokenizer: Tokenizer, *, label: str | None = None) -> text.Text:
    """The run's text; without files, Python's help texts, which are English and no code."""
    config = run.config.data
    text.check_label(config, label)
    if config.format == "text":
        prepared = text.open_text(config, Data(), tokenizer, built_in=help_topics, label=label)
    else:
        prepared = _open_rows(run, config.format, tokenizer, label)
    check_tokenizer(prepared, tokenizer, "the model to fine-tune", _REMEDY)
    data = text.prepared_text(config, prepared, seed=run.config.seed)
    language.say_what_there_is(run, data)
    return data


def _open_rows(
    run: Run[Config], format: rows.Format, tokenizer: Tokenizer, label: str | None
) -> Prepared:
    """The text of rows, whose form is said."""
    config = run.config.data
    if label is not None or not config.files:
        raise ValueError(
            f"data.format={format!r} takes data.files (now {config.files!r}) and no label "
            f"(now {label!r})"
        )
    if format == "chats":
        ChatTemplate(tokenizer)  # a tokenizer without one is refused before any file is read
    given: rows.RowOptions = {
        "format": format,
        "names": {name: getattr(config, name) for name in ("prompt", "completion", "messages")},
        "now": _first_start(run) if writes_time(tokenizer) else None,
    }
    prepared = text.open_text(config, Data(), tokenizer, rows=given)
    manifest = prepared.manifest
    count = sum(manifest.total(part).documents for part in ("train", "held_out"))
    count //= 2 if format == "preferences" else 1
    run.say(f"{count:,} examples of {format}: {manifest.form}")
    return prepared


def _first_start(run: Run[Config]) -> str:
    """The time of the run's first start, so that one that goes on another day reads the same."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "time.txt").write_text(datetime.now().isoformat())

    return (run.once("first_start", write) / "time.txt").read_text()


def sample_prompt(data: text.Text) -> list[int]:
    """The beginning of a sample: that of a document, or the first held-out prompt."""
    corpus, begin = data.held_out.corpus, language.document_begin(data.tokenizer)
    if (counted := corpus.counted(0)) is None:
        return begin
    first = corpus[0][: int(np.argmax(counted))].tolist()
    return first if first and corpus.framed else [*begin, *first]
